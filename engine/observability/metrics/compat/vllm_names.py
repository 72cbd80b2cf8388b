"""The names that vLLM 0.33 has, as far as kvtier has a number for them. Its labels are on every one."""

from kvtier.engine.observability.metrics.metric_name import MetricName, counter, gauge, histogram

MODEL, ENGINE = "model_name", "engine"
_ITS = (MODEL, ENGINE)

# Where tokens came from.
PROMPT_TOKENS = counter("vllm:prompt_tokens", "Prompt tokens of admitted requests", *_ITS)
PROMPT_TOKENS_BY_SOURCE = counter(
    "vllm:prompt_tokens_by_source",
    "Prompt tokens that were computed, were on the device, or came from host memory or disk (external_kv_transfer)",
    *_ITS,
    "source",
)
PROMPT_TOKENS_CACHED = counter("vllm:prompt_tokens_cached", "Prompt tokens that came from any tier", *_ITS)
PROMPT_TOKENS_CACHED_BY_SOURCE = counter(
    "vllm:prompt_tokens_cached_by_source", "The same by the tier that they came from", *_ITS, "source"
)
PREFIX_CACHE_QUERIES = counter("vllm:prefix_cache_queries", "Prompt tokens looked up", *_ITS)
PREFIX_CACHE_HITS = counter("vllm:prefix_cache_hits", "Of them those that were on the device", *_ITS)
EXTERNAL_QUERIES = counter("vllm:external_prefix_cache_queries", "Of them those that were not on the device", *_ITS)
EXTERNAL_HITS = counter("vllm:external_prefix_cache_hits", "Of these those that came from host memory or disk", *_ITS)
GENERATION_TOKENS = counter("vllm:generation_tokens", "Tokens generated", *_ITS)

# The scheduler.
KV_CACHE_USAGE = gauge("vllm:kv_cache_usage_perc", "Share of the device's tier that is leased: 1 is all of it", *_ITS)
NUM_PREEMPTIONS = counter("vllm:num_preemptions", "Times that a preempted request was admitted again", *_ITS)
REQUESTS_RUNNING = gauge("vllm:num_requests_running", "Requests that run", *_ITS)
REQUESTS_WAITING = gauge("vllm:num_requests_waiting", "Requests that wait, or whose prefix is coming", *_ITS)
REQUESTS_WAITING_BY_REASON = gauge(
    "vllm:num_requests_waiting_by_reason",
    "The same: waiting for room (capacity), or for their prefix (deferred)",
    *_ITS,
    "reason",
)
REQUEST_SUCCESS = counter("vllm:request_success", "Requests that have ended, by why", *_ITS, "finished_reason")

# Times and sizes.
TTFT = histogram("vllm:time_to_first_token_seconds", "From a request's arrival to its first token", *_ITS)
TOKEN_GAP = histogram("vllm:inter_token_latency_seconds", "Between two tokens of a request", *_ITS)
TIME_PER_TOKEN = histogram(
    "vllm:request_time_per_output_token_seconds", "The same, the mean of each request that has ended", *_ITS
)
TOTAL = histogram("vllm:e2e_request_latency_seconds", "From a request's arrival to its end", *_ITS)
QUEUE = histogram("vllm:request_queue_time_seconds", "In the queue", *_ITS)
PREFILL = histogram(
    "vllm:request_prefill_time_seconds", "From leaving the queue to the first token, with the load of the prefix", *_ITS
)
DECODE = histogram("vllm:request_decode_time_seconds", "From the first token to the last", *_ITS)
REQUEST_PROMPT_TOKENS = histogram("vllm:request_prompt_tokens", "Tokens of a prompt", *_ITS)
REQUEST_GENERATION_TOKENS = histogram("vllm:request_generation_tokens", "Tokens generated for a request", *_ITS)
REQUEST_COMPUTED_TOKENS = histogram(
    "vllm:request_prefill_kv_computed_tokens", "Tokens of a prompt that were computed", *_ITS
)

# Blocks and copies.
BLOCK_IDLE = histogram(
    "vllm:kv_block_idle_before_evict_seconds",
    "For how long blocks evicted from the device had not been used, by a sample",
    *_ITS,
)
LOAD_BYTES = counter("vllm:kv_offload_load_bytes", "Bytes copied from host memory to the device", *_ITS)
LOAD_TIME = counter("vllm:kv_offload_load_time", "Seconds that this took", *_ITS)
STORE_BYTES = counter("vllm:kv_offload_store_bytes", "Bytes copied from the device to host memory", *_ITS)
STORE_TIME = counter("vllm:kv_offload_store_time", "Seconds that this took", *_ITS)

VLLM_CATALOGUE: tuple[MetricName, ...] = tuple(
    each for each in tuple(globals().values()) if isinstance(each, MetricName)
)
