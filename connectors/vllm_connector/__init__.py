"""The KV connector for vLLM: one half in its scheduler, one in each worker. Offloading belongs to `vllm_offloading`."""
