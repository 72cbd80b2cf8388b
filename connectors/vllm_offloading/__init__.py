"""vLLM's own offloading, made to work on CPUs, and with kvtier's store as its disk."""
