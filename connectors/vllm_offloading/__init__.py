"""Extensions of vLLM's own KV offloading: support for vLLM on CPUs, and a disk tier in kvtier's store."""
