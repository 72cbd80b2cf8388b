"""vLLM's own way to attach to a sidecar: a KV connector, a half of it in the scheduler, a half in each worker."""
