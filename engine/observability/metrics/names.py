"""Catalogue of all kvtier metrics: of engines, HTTP servers and sidecars."""

from kvtier.engine.observability.metrics.metric_name import MetricName, counter, gauge, histogram

# Where tokens came from.
PROMPT_TOKENS = counter("kvtier_prompt_tokens", "Prompt tokens of admitted requests.")
HIT_TOKENS = counter("kvtier_hit_tokens", "Prompt tokens that came from the cache, by tier.", "tier")
RECOMPUTED_TOKENS = counter("kvtier_recomputed_tokens", "Prompt tokens that were computed, by reason.", "reason")
COPIED_TOKENS = counter(
    "kvtier_copied_tokens", "Hit tokens copied from a cached block of which only the first tokens matched."
)
PREEMPTED_TOKENS = counter(
    "kvtier_preempted_tokens",
    "Tokens of preempted requests that start again, by result.",
    "result",
)
GENERATED_TOKENS = counter("kvtier_generated_tokens", "Tokens that were generated.")
RECENT_HIT_RATIO = gauge(
    "kvtier_recent_hit_ratio", "Fraction of the last 1,000 requests' prompt tokens that were hits."
)
TTFT_SECONDS = histogram(
    "kvtier_ttft_seconds",
    "Seconds from a request's arrival to its first token, by the coldest tier that its tokens came from.",
    "coldest",
)
QUEUE_SECONDS = histogram("kvtier_queue_seconds", "Seconds that a request waited before its prefix began to load.")
LOOKUP_SECONDS = histogram("kvtier_lookup_seconds", "Seconds that all lookups of a request's prefix took together.")
LOAD_SECONDS = histogram("kvtier_load_seconds", "Seconds that loading a request's cached prefix took.")
REQUESTS = gauge("kvtier_requests", "Requests by state.", "state")

REQUEST_LOG_LINES = counter(
    "kvtier_request_log_lines",
    "Lines of the request log that were written, or dropped because the disk was too slow or full.",
    "result",
)

# Images in prompts.
IMAGES = counter(
    "kvtier_images",
    "Images in prompts: runs of the encoder, and results found in host memory or on disk. A sidecar counts as disk.",
    "source",
)
IMAGE_ENCODER_SECONDS = counter("kvtier_image_encoder_seconds", "Seconds that the image encoder ran.")
IMAGE_CACHE_BYTES = gauge("kvtier_image_cache_bytes", "Bytes of the image encoder's results in host memory.")
IMAGE_WAITING_BYTES = gauge("kvtier_image_waiting_bytes", "Bytes of decoded images of requests that wait or run.")

# Tiers.
RESIDENT_BLOCKS = gauge("kvtier_resident_blocks", "Blocks in the tier that lookups can find.", "tier")
RESIDENT_STATES = gauge("kvtier_resident_states", "Blocks in the tier that are recurrent states.", "tier")
RESIDENT_BYTES = gauge("kvtier_resident_bytes", "Bytes of the blocks in the tier.", "tier")
CAPACITY_BYTES = gauge("kvtier_capacity_bytes", "Bytes of blocks that the tier can hold.", "tier")
EVICTED_BLOCKS = counter("kvtier_evicted_blocks", "Blocks evicted from the tier, by cause.", "tier", "cause")
DROPPED_SPILLS = counter("kvtier_dropped_spills", "Blocks evicted without a copy in a lower tier.", "tier")
CORRUPT_BLOCKS = counter("kvtier_corrupt_blocks", "Blocks whose load gave no valid bytes, by cause.", "tier", "cause")
LEASED_SLOTS = gauge("kvtier_leased_slots", "Slots of the tier that are in use and cannot be evicted now.", "tier")
DIRTY_BLOCKS = gauge("kvtier_dirty_blocks", "Blocks in the tier without a copy in a lower tier.", "tier")
EVICTION_AGE = histogram(
    "kvtier_eviction_age_seconds",
    "Seconds since the last use of evicted blocks (on disk: since they were written), from a sample.",
    "tier",
)
CLEAN_AHEAD_BLOCKS = gauge(
    "kvtier_clean_ahead_blocks",
    "Number of device blocks, the next ones to be evicted, that kvtier copies to a lower tier in advance.",
)
HOST_PREPARED_BYTES = gauge(
    "kvtier_host_prepared_bytes", "Bytes of the host tier that are backed by memory and, with CUDA, page-locked."
)
PINNED_BYTES = gauge("kvtier_pinned_bytes", "Bytes that pins keep in host memory or prefetch there.")
TENANT_TOKENS = counter(
    "kvtier_tenant_tokens",
    "Prompt tokens by tenant and source. Only the largest tenants are named; the others are counted together.",
    "tenant",
    "source",
)
TENANT_BYTES = gauge("kvtier_tenant_bytes", "Bytes of blocks of tenants with a quota, by tier.", "tier", "tenant")

WHAT_IF_HIT_RATIO = gauge(
    "kvtier_what_if_hit_ratio",
    "Estimated fraction of recent prompt tokens in this tier or a faster one if this tier had this size.",
    "tier",
    "size",
)

# Copies.
MOVED_BYTES = counter("kvtier_moved_bytes", "Bytes copied between tiers, by route.", "route")
MOVED_SECONDS = counter(
    "kvtier_moved_seconds", "Seconds that copies took, without the time that they waited, by route.", "route"
)
FAILED_TRANSFERS = counter("kvtier_failed_transfers", "Copies that failed, by route.", "route")
ROUTE_SPEED = gauge("kvtier_route_bytes_per_second", "Bytes per second of the route's latest copies.", "route")
PENDING_TRANSFERS = gauge("kvtier_pending_transfers", "Copies that wait or run, by route.", "route")
PENDING_BYTES = gauge("kvtier_pending_bytes", "Bytes of the copies that wait or run, by route.", "route")
LOAD_PLANS = counter(
    "kvtier_load_plans",
    "Hits in tiers below the device, by how much of the hit was loaded: all, split, part, nothing.",
    "loaded",
)
PREFILL_SPEED = gauge(
    "kvtier_prefill_tokens_per_second", "Tokens per second at which the first 1,000 tokens of a prompt are computed."
)

# The disk.
DISK_OPEN = gauge("kvtier_disk_open", "1 while the disk tier's store is open; at 0 kvtier serves without it.")
DISK_NOT_OPEN = gauge("kvtier_disk_not_open", "1 for the reason why the disk tier's store is not open.", "reason")
DISK_FOLDER_GONE = counter("kvtier_disk_folder_gone", "Times that the open store's folder was removed or replaced.")
DISK_PROCESS_ENDED = counter(
    "kvtier_disk_process_ended", "Store processes that ended unexpectedly, or hung and were killed."
)
DISK_BREAKER = gauge(
    "kvtier_disk_breaker",
    "1 for the current state of the circuit breaker of each side (read, write), 0 for the other states.",
    "side",
    "state",
)
DISK_BREAKER_OPENED = counter("kvtier_disk_breaker_opened", "Times that the side's circuit breaker opened.", "side")
DISK_FILE_BYTES = gauge("kvtier_disk_file_bytes", "Bytes that the store takes on the disk.")
DISK_WRITTEN_BYTES = counter("kvtier_disk_written_bytes", "Bytes written to the store since it was created.")
DISK_INDEX_BLOCKS = gauge("kvtier_disk_index_blocks", "Blocks on disk that are in the index in memory.")
DISK_INDEX_LOADED = gauge(
    "kvtier_disk_index_loaded", "1 once all blocks that were on disk at the start are in the index, until then 0."
)
DISK_ADMISSION_BLOCKS = counter(
    "kvtier_disk_admission_blocks", "Blocks that were admitted to the disk, or refused.", "decision"
)
DISK_BUDGET_LEFT_BYTES = gauge(
    "kvtier_disk_budget_left_bytes",
    "Bytes that may be written now under max_written_bytes_per_day; negative if too much was written.",
)
SSD_LIFE_USED = gauge("kvtier_ssd_life_used_ratio", "Fraction of the drive's endurance that this store has used.")
SSD_YEARS_LEFT = gauge(
    "kvtier_ssd_years_left", "Years until the drive's endurance is used up, at the rate of writes since the start."
)

# The remote tier.
REMOTE_ASKED = counter("kvtier_remote_asked", "Prefixes looked up in the remote tier.")
REMOTE_LATE = counter(
    "kvtier_remote_late",
    "Remote lookups that were answered too late, after the request had continued without the answer.",
)
REMOTE_ASK_SECONDS = gauge("kvtier_remote_ask_seconds", "Seconds that a recent lookup in the remote tier took.")
REMOTE_BLOCKS = counter(
    "kvtier_remote_blocks",
    "Blocks offered to the remote store, by outcome.",
    "outcome",
)
REMOTE_WANTED_BLOCKS = gauge("kvtier_remote_wanted_blocks", "Blocks that wait to be written to the remote tier.")
REMOTE_KNOWN_BLOCKS = gauge("kvtier_remote_known_blocks", "Blocks in the remote tier, known from its recent answers.")
REMOTE_REQUESTS = counter("kvtier_remote_requests", "Requests to the remote store, which may cost money.", "kind")
REMOTE_BYTES = counter("kvtier_remote_bytes", "Bytes read from the remote store and written to it.", "direction")
REMOTE_BREAKER = gauge(
    "kvtier_remote_breaker",
    "1 for the current state of the circuit breaker of each side (ask, read, write), 0 for the other states.",
    "side",
    "state",
)
REMOTE_BREAKER_OPENED = counter("kvtier_remote_breaker_opened", "Times that the side's circuit breaker opened.", "side")

# An engine that is attached to a sidecar.
SIDECAR_ATTACHED = gauge(
    "kvtier_sidecar_attached",
    "1 while the engine is attached to its sidecar; at 0 it serves without the sidecar and retries.",
)
SIDECAR_ATTACHED_SECONDS = gauge(
    "kvtier_sidecar_attached_seconds",
    "Seconds since the engine attached to its sidecar; 0 while it is not attached.",
)
SIDECAR_ATTACHMENTS = counter("kvtier_sidecar_attachments", "Times that the engine has attached to a sidecar.")

# HTTP and events.
HTTP_REQUESTS = counter("kvtier_http_requests", "Requests answered, by route and status.", "route", "status")
HTTP_CONNECTIONS_REFUSED = counter(
    "kvtier_http_connections_refused",
    "Connections refused or closed before their request was read, by the limit that they exceeded.",
    "why",
)
HTTP_TTFT_SECONDS = histogram("kvtier_http_ttft_seconds", "Seconds from the tokenized prompt to the first token.")
HTTP_TOKEN_GAP_SECONDS = histogram("kvtier_http_token_gap_seconds", "Seconds between two tokens of a completion.")
DROPPED_EVENT_BATCHES = counter("kvtier_dropped_event_batches", "Batches of KV events that could not be sent.")

# Memory.
RESIDENT_MEMORY = gauge(
    "kvtier_process_resident_bytes", "Resident memory of the process in bytes, including shared memory."
)
DEVICE_MEMORY_USED = gauge(
    "kvtier_device_memory_used_bytes", "Bytes of the CUDA device's memory that all processes use."
)
DEVICE_MEMORY = gauge("kvtier_device_memory_bytes", "Bytes of memory of the CUDA device.")

# The sidecar.
SIDECAR_READY = gauge("kvtier_sidecar_ready", "1 if engines can attach and store.")
SIDECAR_START_TIME = gauge("kvtier_sidecar_start_time_seconds", "Start time of the sidecar, since the Unix epoch.")
SIDECAR_CLIENTS = gauge("kvtier_sidecar_clients", "Clients that are attached.")
SIDECAR_LAYOUTS = gauge("kvtier_sidecar_layouts", "KV layouts that engines have registered.")
SIDECAR_UNKNOWN_WEIGHTS = gauge(
    "kvtier_sidecar_unknown_weights_layouts", "KV layouts of models without an entry in [models]."
)
SIDECAR_HELD_BYTES = gauge("kvtier_sidecar_held_bytes", "Bytes of host memory assigned to KV layouts, used or not.")
SIDECAR_LEASED_CHUNKS = gauge(
    "kvtier_sidecar_leased_chunks",
    "Chunks and reserved slots that cannot be evicted because clients or copies use them.",
)
SIDECAR_QUARANTINED_CLIENTS = gauge(
    "kvtier_sidecar_quarantined_clients", "Clients whose session has ended while one of their processes may still copy."
)
SIDECAR_QUARANTINED_CHUNKS = gauge(
    "kvtier_sidecar_quarantined_chunks", "Slots of quarantined clients, which are not reused until quarantine ends."
)
SIDECAR_PINS = gauge("kvtier_sidecar_pins", "Prompts that operators have pinned in host memory.")
SIDECAR_PINNED_BYTES = gauge("kvtier_sidecar_pinned_bytes", "Bytes of host memory that operators' pins hold.")
SIDECAR_UNSAVED_CHUNKS = gauge("kvtier_sidecar_unsaved_chunks", "Chunks that are in host memory only.")
SIDECAR_HASHED_BYTES = counter(
    "kvtier_sidecar_hashed_bytes",
    "Bytes of chunks hashed by lane: digest (new chunks), verify (chunks checked before an engine reads them).",
    "lane",
)
SIDECAR_HASHED_SECONDS = counter("kvtier_sidecar_hashed_seconds", "Seconds of hashing chunks, by lane.", "lane")
SIDECAR_ASKED_CHUNKS = counter("kvtier_sidecar_asked_chunks", "Chunks requested by lookups.", "endpoint")
SIDECAR_PROMISED_CHUNKS = counter(
    "kvtier_sidecar_promised_chunks",
    "Requested chunks that were found and reported to the engine as hits.",
    "endpoint",
)
SIDECAR_LOADED_CHUNKS = counter("kvtier_sidecar_loaded_chunks", "Chunks that engines have loaded.", "endpoint")
SIDECAR_STORED_CHUNKS = counter("kvtier_sidecar_stored_chunks", "Chunks that engines have stored.", "endpoint")
SIDECAR_LOST_CHUNKS = counter(
    "kvtier_sidecar_lost_chunks",
    "Chunks that could not be reported as hits, loaded or stored, by reason.",
    "endpoint",
    "why",
)
SIDECAR_OPERATIONS = counter("kvtier_sidecar_operations", "Requests of engines, by kind.", "endpoint", "operation")
SIDECAR_REFUSED = counter("kvtier_sidecar_refused", "Requests and connections refused, by reason.", "endpoint", "why")

CATALOGUE: tuple[MetricName, ...] = tuple(each for each in tuple(globals().values()) if isinstance(each, MetricName))
