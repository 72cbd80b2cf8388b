"""Metrics of vLLM 0.33 that kvtier can provide. All of them have the labels `model_name` and `engine`."""

from kvtier.engine.observability.metrics.metric_name import MetricName, counter, gauge, histogram

MODEL, ENGINE = "model_name", "engine"
_ITS = (MODEL, ENGINE)

# Where tokens came from.
PROMPT_TOKENS = counter("vllm:prompt_tokens", "Prompt tokens of admitted requests.", *_ITS)
PROMPT_TOKENS_BY_SOURCE = counter(
    "vllm:prompt_tokens_by_source",
    "Prompt tokens that were computed, were on the device, or came from a lower tier (external_kv_transfer).",
    *_ITS,
    "source",
)
PROMPT_TOKENS_CACHED = counter("vllm:prompt_tokens_cached", "Prompt tokens that came from any tier.", *_ITS)
PROMPT_TOKENS_CACHED_BY_SOURCE = counter(
    "vllm:prompt_tokens_cached_by_source", "Prompt tokens that came from any tier, by tier.", *_ITS, "source"
)
PREFIX_CACHE_QUERIES = counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", *_ITS)
PREFIX_CACHE_HITS = counter("vllm:prefix_cache_hits", "Looked-up tokens that were on the device.", *_ITS)
EXTERNAL_QUERIES = counter("vllm:external_prefix_cache_queries", "Looked-up tokens that were not on the device.", *_ITS)
EXTERNAL_HITS = counter("vllm:external_prefix_cache_hits", "Looked-up tokens that came from a lower tier.", *_ITS)
GENERATION_TOKENS = counter("vllm:generation_tokens", "Tokens generated.", *_ITS)

# The scheduler.
KV_CACHE_USAGE = gauge("vllm:kv_cache_usage_perc", "Fraction of the device tier that is leased, from 0 to 1.", *_ITS)
NUM_PREEMPTIONS = counter("vllm:num_preemptions", "Times that a preempted request was readmitted.", *_ITS)
REQUESTS_RUNNING = gauge("vllm:num_requests_running", "Requests that are running.", *_ITS)
REQUESTS_WAITING = gauge("vllm:num_requests_waiting", "Requests that wait, or whose prefix is being loaded.", *_ITS)
REQUESTS_WAITING_BY_REASON = gauge(
    "vllm:num_requests_waiting_by_reason",
    "Requests that are waiting for capacity, or for their prefix (deferred).",
    *_ITS,
    "reason",
)
REQUEST_SUCCESS = counter("vllm:request_success", "Finished requests, by finish reason.", *_ITS, "finished_reason")

# Times and sizes.
TTFT = histogram("vllm:time_to_first_token_seconds", "Seconds from a request's arrival to its first token.", *_ITS)
TOKEN_GAP = histogram("vllm:inter_token_latency_seconds", "Seconds between two tokens of a request.", *_ITS)
TIME_PER_TOKEN = histogram(
    "vllm:request_time_per_output_token_seconds", "Mean seconds between the tokens of each finished request.", *_ITS
)
TOTAL = histogram("vllm:e2e_request_latency_seconds", "Seconds from a request's arrival to its end.", *_ITS)
QUEUE = histogram("vllm:request_queue_time_seconds", "Seconds that a request waited in the queue.", *_ITS)
PREFILL = histogram(
    "vllm:request_prefill_time_seconds",
    "Seconds from leaving the queue to the first token, including the load of the prefix.",
    *_ITS,
)
DECODE = histogram("vllm:request_decode_time_seconds", "Seconds from the first token to the last.", *_ITS)
REQUEST_PROMPT_TOKENS = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", *_ITS)
REQUEST_GENERATION_TOKENS = histogram("vllm:request_generation_tokens", "Tokens generated for a request.", *_ITS)
REQUEST_COMPUTED_TOKENS = histogram(
    "vllm:request_prefill_kv_computed_tokens", "Tokens of a prompt that were computed.", *_ITS
)

# Blocks and copies.
BLOCK_IDLE = histogram(
    "vllm:kv_block_idle_before_evict_seconds",
    "Seconds since the last use of blocks evicted from the device, from a sample.",
    *_ITS,
)
LOAD_BYTES = counter("vllm:kv_offload_load_bytes", "Bytes copied from host memory to the device.", *_ITS)
LOAD_TIME = counter("vllm:kv_offload_load_time", "Seconds for which copies to the device ran.", *_ITS)
STORE_BYTES = counter("vllm:kv_offload_store_bytes", "Bytes copied from the device to host memory.", *_ITS)
STORE_TIME = counter("vllm:kv_offload_store_time", "Seconds for which copies to host memory ran.", *_ITS)

VLLM_CATALOGUE: tuple[MetricName, ...] = tuple(
    each for each in tuple(globals().values()) if isinstance(each, MetricName)
)
