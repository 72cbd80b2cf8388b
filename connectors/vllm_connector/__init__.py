"""The KV connector for vLLM, with one half in the scheduler and one in each worker.

Code for vLLM's own offloading connector is in `vllm_offloading`.
"""
