"""Extensions of vLLM's own offloading: copies on CPUs, and kvtier's store as its disk tier."""
