"""Metrics of LMCache's multi-process server 0.5.6 and 0.5.7 that kvtier can provide.

In the names of the metrics, L0 is the device, L1 host memory and L2 the disk. For an engine, a chunk is a block. For a
sidecar, it is the part of a client's chunk or block that one tensor-parallel rank has stored.
"""

from kvtier.engine.observability.metrics.metric_name import MetricName, counter, gauge, histogram

MODEL, L2 = "model_name", "l2_name"

# Lookups in the tiers below the device.
LOOKUP_REQUESTED = counter("lmcache_mp_lookup_requested_tokens", "Prompt tokens looked up below the device.", MODEL)
LOOKUP_HIT = counter("lmcache_mp_lookup_hit_tokens", "Prompt tokens that came from a tier below the device.", MODEL)
LOOKUP_HIT_L1 = counter("lmcache_mp_lookup_hit_l1_tokens", "Prompt tokens that came from host memory.", MODEL)
LOOKUP_HIT_L2 = counter("lmcache_mp_lookup_hit_l2_tokens", "Prompt tokens that came from disk or remote.", MODEL)
LOOKUP_PROMPT = counter("lmcache_mp_lookup_prompt_tokens", "Tokens of the prompts that were looked up.", MODEL)
LOOKUP_REQUEST_HIT = counter(
    "lmcache_mp_lookup_request_hit_tokens", "Prompt tokens that came from any tier, including the device.", MODEL
)
CHUNKS_LOADED = counter("lmcache_mp_num_chunks_loaded", "Blocks that engines have loaded.", MODEL)

# Host memory.
L1_USED = gauge("lmcache_mp_l1_memory_usage_bytes", "Bytes of the blocks in host memory.")
L1_RATIO = gauge("lmcache_mp_l1_usage_ratio", "Fraction of host memory that blocks take.")
L1_READ = counter("lmcache_mp_l1_read_chunks", "Blocks read from host memory, by engines or for writing to disk.")
L1_WRITE = counter("lmcache_mp_l1_write_chunks", "Blocks written to host memory, by engines or from disk.")
L1_EVICTED = counter("lmcache_mp_l1_evicted_chunks", "Blocks evicted from host memory.")
L1_READ_FAILURE = counter("lmcache_mp_l1_read_failure_chunks", "Blocks whose load from host memory failed to verify.")
L0_IDLE = histogram(
    "lmcache_mp_l0_block_idle_before_evict_seconds",
    "Seconds since the last use of blocks evicted from the device, from a sample.",
)
L1_IDLE = histogram(
    "lmcache_mp_l1_chunk_idle_before_evict_seconds",
    "Seconds since the last use of blocks evicted from host memory, from a sample.",
)

# The disk.
L2_USED = gauge("lmcache_mp_l2_usage_bytes", "Bytes of the blocks on disk.", L2)
L2_EVICTED = counter("lmcache_mp_l2_evicted_objects_chunks", "Blocks evicted from disk.")
L2_STORES_SUBMITTED = counter("lmcache_mp_l2_store_submitted_requests", "Batches to be written to disk.")
L2_STORES_COMPLETED = counter("lmcache_mp_l2_store_completed_requests", "Batches written to disk.", L2)
L2_STORE_CHUNKS_SUBMITTED = counter("lmcache_mp_l2_store_submitted_objects_chunks", "Blocks to be written to disk.")
L2_STORE_CHUNKS_COMPLETED = counter("lmcache_mp_l2_store_completed_objects_chunks", "Blocks written to disk.")
L2_LOADS_SUBMITTED = counter("lmcache_mp_l2_prefetch_load_submitted_requests", "Batches to be read from disk.")
L2_LOADS_COMPLETED = counter("lmcache_mp_l2_load_completed_requests", "Batches read from disk.", L2)
L2_LOAD_CHUNKS_SUBMITTED = counter(
    "lmcache_mp_l2_prefetch_load_submitted_objects_chunks", "Blocks to be read from disk."
)
L2_LOAD_CHUNKS_COMPLETED = counter("lmcache_mp_l2_prefetch_load_completed_chunks", "Blocks read from disk.")
L2_LOAD_FAILURE = counter(
    "lmcache_mp_l2_prefetch_failure_chunks", "Blocks whose load from disk gave no valid bytes, by reason.", "reason"
)

# In flight.
INFLIGHT_STORES = gauge("lmcache_mp_num_inflight_l2_stores", "Batches in flight to disk.", L2)
INFLIGHT_LOADS = gauge("lmcache_mp_num_inflight_l2_loads", "Batches in flight from disk.", L2)
INFLIGHT_LOAD_BYTES = gauge("lmcache_mp_inflight_load_memory_usage_bytes", "Bytes in flight from disk.", L2)

# An engine's own copies between device and host memory. A sidecar has none, because its engines do the copying.
PREFETCH_JOBS = gauge("lmcache_mp_active_prefetch_jobs", "Requests whose prefix is being loaded.")
STORES_SUBMITTED = counter("lmcache_mp_num_submitted_stores", "Copies started from the device.", "device")
STORES_FINISHED = counter("lmcache_mp_num_finished_stores", "Copies from the device that have ended.", "device")
RETRIEVES_SUBMITTED = counter("lmcache_mp_num_submitted_retrieves", "Copies started to the device.", "device")
RETRIEVES_FINISHED = counter("lmcache_mp_num_finished_retrieves", "Copies to the device that have ended.", "device")
TRANSFER_BYTES = counter(
    "lmcache_mp_transfer_phase_bytes", "Bytes copied between device and host memory.", "direction", "phase"
)
TRANSFER_SECONDS = counter(
    "lmcache_mp_transfer_phase_elapsed_seconds",
    "Seconds for which copies between device and host memory ran.",
    "direction",
    "phase",
)

LMCACHE_CATALOGUE: tuple[MetricName, ...] = tuple(
    each for each in tuple(globals().values()) if isinstance(each, MetricName)
)
