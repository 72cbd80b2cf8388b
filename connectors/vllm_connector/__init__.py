"""The KV connector for vLLM: one half in its scheduler, one in each worker. Offloading is in `vllm_offloading`."""
