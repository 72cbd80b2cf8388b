"""The configuration of an engine: immutable tables, read once from TOML. An error names the path of the wrong key."""

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar, get_args, get_origin

import msgspec

from kvtier.engine.plain_errors import plain_error
from kvtier.tiers.naming.block_hash import HashAlgorithm
from kvtier.tiers.naming.request_text import check_text

ToolCallParser: TypeAlias = Literal[
    "hermes", "mistral_args", "mistral", "granite", "jamba", "phi4_mini_json", "llama3_json", "json"
]
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}
_MAX_BYTES = 1024**6


class ConfigError(ValueError):
    """An error in a configuration. Its message has the form `source: $.path.to.key: what is wrong`."""


class ByteSize(int):
    """A number of bytes; in TOML an integer or a string such as "8GiB" (1024³) or "64KB" (1000)."""


def is_loopback(host: str) -> bool:
    """Return whether *host*, a name or an address, can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def parse_bytes(size: int | str) -> ByteSize:
    """Parse "8GiB", "1.5 GiB", "64KB", "512" or a plain number into bytes; units B, KB to TB, KiB to TiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]*)", str(size).strip().lower(), re.ASCII)
    if isinstance(size, bool) or not isinstance(size, int | str) or not match or match[2] not in _UNITS:
        raise ValueError(f'bad size {size!r}; write bytes as an integer, or a string such as "8GiB" or "512MiB"')
    number, unit = match[1], _UNITS[match[2]]
    num_bytes = round(float(number) * unit) if "." in number else int(number) * unit
    if num_bytes > _MAX_BYTES:
        raise ValueError(f"size {size!r} is too large; the maximum is 1048576TiB")
    return ByteSize(num_bytes)


Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
_MIN_REQUEST_BYTES = 1024  # a request with a prompt of a few words has about this size of headers, and of body
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
HOST_NAME = r"^(\*|(\*\.)?[^*/:\s]+)$"
HostName = Annotated[str, msgspec.Meta(pattern=HOST_NAME, examples=["kv.example"])]
Origin = Annotated[str, msgspec.Meta(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)$", examples=["https://chat.example"])]


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A TOML table. `as_config` checks the types and ranges of its keys; the constructor does not."""


_Tree = TypeVar("_Tree", bound=Table)


class ModelConfig(Table, frozen=True, kw_only=True):
    """`[model]`: how the model is loaded.

    Attributes:
        dtype: Type of the weights. "auto" is the type in the checkpoint.
        device: Device that computes. "auto" is a GPU if there is one.
        generation_config: With "auto", sampling parameters that a request leaves out (temperature, top_p, top_k, min_p,
            repetition_penalty, max_new_tokens) come from the model's generation config. "none" ignores that file.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    generation_config: Literal["auto", "none"] = "auto"


class DeviceConfig(Table, frozen=True, kw_only=True):
    """`[device]`: the KV cache on the device that computes.

    Attributes:
        capacity: Bytes of KV. Not used if *gpu_memory_utilization* is set.
        gpu_memory_utilization: Fraction of the GPU's memory for the weights, the largest step and the KV cache
            together.
        block_size: Tokens per block.
        partial_blocks: Whether a prompt that shares only the first tokens of a cached block gets a copy of the block.
        retention_tokens: Which blocks of sliding windows, and which recurrent states, are kept. By default all blocks
            of windows are kept, and one state every N tokens, where the KV of N tokens is as large as a state and N is
            at least 512. With 0, only what is needed to resume at the end of a prompt, 128 tokens before that end, at
            the end of an answer, and where two prompts diverge. With N > 0, a multiple of block_size, also what is
            needed to resume after every N tokens.
        poison: For debugging: fill slots with NaN until KV is computed or copied into them, so that reading an unfilled
            slot gives NaN.
    """

    capacity: ByteSize = parse_bytes("1GiB")
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 32
    partial_blocks: bool = True
    retention_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31)] | None = None
    poison: bool = False

    def __post_init__(self) -> None:
        if self.capacity == 0:
            raise ValueError('capacity 0 holds no block; give the device pool a size such as "1GiB"')

    def no_gpu(self) -> ValueError:
        """Return the error for *gpu_memory_utilization* on a machine without a GPU."""
        what = f"gpu_memory_utilization {self.gpu_memory_utilization:g}: there is no GPU"
        return ValueError(f"{what}; set device.capacity instead, for example --device-memory 2GiB")


class HostConfig(Table, frozen=True, kw_only=True):
    """`[host]`: the host memory tier, pinned if there is a GPU.

    Attributes:
        capacity: Bytes of host memory for blocks. With 0 there is no host tier.
    """

    capacity: ByteSize = parse_bytes("4GiB")


class DiskConfig(Table, frozen=True, kw_only=True):
    """`[disk]`: the store on disk, which survives the process; without this table there is no disk tier.

    Attributes:
        path: Folder of the store; a leading `~` is expanded.
        capacity: Maximum size of the folder in bytes, at most the size of its file system.
        codec: Compression of blocks. "zstd" makes blocks smaller but slower to read. "auto" compresses only where that
            makes reading faster. "fp8" halves blocks and is lossy.
        read_timeout_s: Seconds after which a read counts as a miss.
        durability: Whether stored blocks survive only a crash of the process ("process"), or also a crash of the
            machine. With "interval", those blocks survive that were stored before the latest checkpoint. With "commit",
            all blocks survive.
        checkpoint_s: Seconds between two checkpoints with the durability "interval".
        writes: How blocks are written. "direct" writes past the page cache (O_DIRECT), which takes less processor time.
            "buffered" writes through the page cache, so that blocks which are read again soon come from memory. By
            default, KVTierL2 (below LMCache) and KVTierCache (transformers) use "buffered", all others "direct".
        min_free: Bytes of the file system that are left free for other programs. If fewer are free, new blocks are
            stored only in the place of old ones.
        max_written_bytes_per_day: Maximum number of bytes written per day. A quarter is reserved for blocks that are
            used a second time.
        endurance: TBW rating of the drive in bytes, for the metrics of drive life.
        encryption_key_file: File with a key of 32 bytes (raw, hex or base64). Blocks are encrypted with AES-256-GCM.
            Blocks stored under another key are misses.
        encryption_key_command: Command that prints the key, instead of a file.
    """

    path: Annotated[str, msgspec.Meta(min_length=1)]
    capacity: ByteSize = parse_bytes("32GiB")
    codec: Literal["none", "zstd", "auto", "fp8"] = "none"
    read_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 10.0
    durability: Literal["process", "interval", "commit"] = "process"
    checkpoint_s: Annotated[float, msgspec.Meta(ge=0.1, le=86400)] = 10.0
    writes: Literal["direct", "buffered"] | None = None
    min_free: ByteSize = parse_bytes("0")
    max_written_bytes_per_day: ByteSize | None = None
    endurance: ByteSize | None = None
    encryption_key_file: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    encryption_key_command: Annotated[str, msgspec.Meta(min_length=1)] | None = None

    def __post_init__(self) -> None:
        if self.encryption_key_file is not None and self.encryption_key_command is not None:
            raise ValueError("encryption_key_file and encryption_key_command are both set; remove one of them")
        if self.endurance == 0:
            raise ValueError('endurance 0: give the drive\'s TBW rating, such as "600TB", or remove the key')
        if self.capacity == 0:
            raise ValueError("capacity 0 stores nothing; give it a size, or remove [disk] to run without a disk tier")
        msgspec.structs.force_setattr(self, "path", str(Path(self.path).expanduser()))


_REDIS = ("redis", "rediss", "valkey", "valkeys")
_OBJECTS = ("s3", "gs", "az", "file")


class RemoteConfig(Table, frozen=True, kw_only=True):
    """`[remote]`: a store shared by several machines, below host memory and disk; without this table there is none.

    Credentials of object stores, and the account of an Azure container (AZURE_STORAGE_ACCOUNT_NAME), come from the
    environment. All machines that share the store need the same encryption key.

    Attributes:
        url: One of `redis://HOST:6379/0` or `rediss://` (TLS), `redis+cluster://HOST1:6379,HOST2:6379`,
            `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, `file:///FOLDER`.
        password_file: File with the password of a Redis or Valkey server.
        ca_file: Certificate of the CA that signed the certificate of a Redis or Valkey server.
        ttl_s: Seconds after which Redis or Valkey deletes a block. With 0 blocks stay until the server evicts them.
        endpoint: Address of an object store, if it is not the cloud's default.
        region: Region of an object store, if it is not the cloud's default.
        timeout_s: Seconds to wait for an answer. A store that does not answer in time is not used for a while. By
            default, 2 seconds for Redis or Valkey, and 10 seconds for a request to an object store.
        codec: Compression of blocks, as in [disk].
        encryption_key_file: File with a key, as in [disk].
        encryption_key_command: Command that prints the key, instead of a file.
    """

    url: Annotated[str, msgspec.Meta(min_length=1)]
    password_file: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    ca_file: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    ttl_s: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 7 * 24 * 3600
    endpoint: Annotated[str, msgspec.Meta(pattern="^https?://.")] | None = None
    region: str | None = None
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=300)] | None = None
    codec: Literal["none", "zstd", "auto"] = "none"
    encryption_key_file: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    encryption_key_command: Annotated[str, msgspec.Meta(min_length=1)] | None = None

    def __post_init__(self) -> None:
        scheme = self.url.partition("://")[0].removesuffix("+cluster")
        if scheme not in (*_REDIS, *_OBJECTS):
            raise ValueError(
                "url: unknown kind of store; write redis://HOST:6379/0, redis+cluster://HOST:6379,HOST:6379, "
                "s3://BUCKET/PREFIX, gs://, az:// or file:///FOLDER"
            )
        if self.encryption_key_file is not None and self.encryption_key_command is not None:
            raise ValueError("encryption_key_file and encryption_key_command are both set; remove one of them")
        of_others = ("endpoint", "region") if self.is_redis else ("password_file", "ca_file")
        for name in of_others:
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: a store at {scheme}:// does not use this key; remove it")

    @property
    def where(self) -> str:
        """URL without user and password, for display."""
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"

    @property
    def is_redis(self) -> bool:
        """True if the store is Redis or Valkey rather than an object store."""
        return self.url.partition("://")[0].removesuffix("+cluster") in _REDIS


class TenantConfig(Table, frozen=True, kw_only=True):
    """`[tenants."SALT"]`: quotas for the blocks of requests with this cache_salt.

    If a tenant exceeds its quota, its own blocks are evicted, later blocks of a prompt before earlier ones.

    Attributes:
        host: Maximum bytes of the tenant's blocks in host memory. By default there is no limit.
        disk: Maximum bytes of the tenant's blocks on disk. By default there is no limit.
        name: Name of the tenant in metrics and logs. They never show the salt, because it is secret.
    """

    host: ByteSize | None = None
    disk: ByteSize | None = None
    name: str | None = None


class LoraConfig(Table, frozen=True, kw_only=True):
    """`[lora.NAME]`: a LoRA adapter of the model. Requests select it by NAME.

    Attributes:
        path: Folder that `peft` has written.
    """

    path: Annotated[str, msgspec.Meta(min_length=1)]


class NameConfig(Table, frozen=True, kw_only=True):
    """`[names]`: how block names (hashes) are computed. Changing a key makes all stored blocks misses.

    Attributes:
        algorithm: Hash of a block's tokens and its prefix. sha256_cbor with its default seed gives the same names as
            vLLM, for routers that compute vLLM's hashes.
        seed: Text that every name depends on. A secret seed makes names unguessable. By default, the algorithm's own
            seed.
    """

    algorithm: Literal["sha256", "sha256_cbor"] = "sha256"
    seed: str | None = None

    def __post_init__(self) -> None:
        if self.seed is not None:
            check_text("seed", self.seed)

    @property
    def resolved_seed(self) -> str:
        """Seed in effect: the configured one, or the algorithm's default."""
        return HashAlgorithm(self.algorithm).default_seed if self.seed is None else self.seed


class SchedulerConfig(Table, frozen=True, kw_only=True):
    """`[scheduler]`: limits on steps and requests, and how cached blocks are loaded.

    Attributes:
        token_budget: Maximum number of tokens that a step computes.
        prefill_chunk: Maximum number of tokens of one prompt that a step computes.
        max_running: Maximum number of requests that decode together.
        max_waiting: Maximum number of requests in the queue. Further requests are refused.
        load: How much of a hit in a lower tier is loaded. "always" loads the whole hit. "cost" loads the part that is
            faster to load than to compute, given the measured speeds of copies and prefill and the bytes queued to be
            copied. "split" is like "cost", but may also compute the front of a hit while the rest is loaded. It does so
            if this is faster by a tenth, but never for a model with sliding windows.
        by_layers: Whether computation starts with the first layers while later layers are still being loaded. This
            happens if a prompt's prefix comes from host memory and nothing else runs.
        look_ahead: Fraction of host memory used to prefetch blocks from disk for waiting requests.
        look_ahead_s: Maximum number of seconds that prefetched blocks are kept for a waiting request.
    """

    token_budget: Count = 2048
    prefill_chunk: Count = 512
    max_running: Count = 64
    max_waiting: Count = 4096
    load: Literal["split", "cost", "always"] = "split"
    by_layers: bool = True
    look_ahead: Annotated[float, msgspec.Meta(ge=0, le=0.5)] = 0.25
    look_ahead_s: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 30.0


Endpoint = Annotated[
    str,
    msgspec.Meta(
        pattern="^(tcp|ipc|inproc)://.",
        examples=["tcp://127.0.0.1:5557", "ipc:///run/kvtier-events.sock", "inproc://events"],
    ),
]
BatchCount = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]


class EventsConfig(Table, frozen=True, kw_only=True):
    """`[events]`: KV events for routers, in vLLM's format over ZMQ; without this table none are published.

    Attributes:
        endpoint: ZMQ address of the events. The publisher binds it if it contains `*` or `::` or begins with ipc:// or
            inproc://, and connects to it otherwise. Port 0 picks a free port.
        replay_endpoint: ZMQ address at which subscribers request earlier batches. The publisher always binds it.
        host: Address that `*` stands for. It is loopback by default, because events contain the prompts' tokens.
        topic: ZMQ topic of the events.
        buffer_steps: Number of newest event batches that subscribers can request again.
        hwm: Maximum number of event batches that wait for one slow subscriber.
        int_block_hashes: Whether hashes are the low 64 bits of block names. If false, they are the whole names.
    """

    endpoint: Endpoint = "tcp://*:5557"
    replay_endpoint: Endpoint | None = None
    host: Annotated[str, msgspec.Meta(min_length=1)] = "127.0.0.1"
    topic: str = ""
    buffer_steps: BatchCount = 10_000
    hwm: BatchCount = 100_000
    int_block_hashes: bool = True

    def __post_init__(self) -> None:
        for endpoint in (self.endpoint, self.replay_endpoint or ""):  # ZMQ would use such a port modulo 65536
            port = re.search(r"^tcp://.*:(\d+)$", endpoint)
            if port is not None and int(port[1]) > 65535:
                raise ValueError(f"endpoint {endpoint} has no valid port; use 1 to 65535, or 0 for any free port")


class ImagesConfig(Table, frozen=True, kw_only=True):
    """`[images]`: images in prompts, for models that see images.

    Attributes:
        max_per_prompt: Maximum number of images of a prompt.
        max_pixels: Maximum number of pixels of an image. It is checked before the image is decoded.
        cache: Bytes of host memory for the encoder's results, so that an image is encoded once.
        disk: Whether the encoder's results are also stored in the store of [disk], within its capacity, or in the tiers
            of the sidecar.
        waiting: Bytes of decoded images that may wait in the engine. Further requests with images are refused.
        url_hosts: Hosts from which `kvtier serve` fetches images at https URLs. By default it fetches none. `*.example`
            allows every name below example, `*` any name. Hosts with addresses that are not public are never reached.
        url_timeout_s: Seconds in which an image must be fetched.
    """

    max_per_prompt: Count = 16
    max_pixels: Count = 1 << 24
    cache: ByteSize = parse_bytes("256MiB")
    disk: bool = True
    waiting: ByteSize = parse_bytes("1GiB")
    url_hosts: tuple[HostName, ...] = ()
    url_timeout_s: Seconds = 10.0


class DocumentsConfig(Table, frozen=True, kw_only=True):
    """`[documents]`: the named documents that `kvtier serve` keeps cached.

    Each document is saved as a file. The files are encrypted if [disk] has a key. If neither *path* nor [disk] is set,
    documents are lost when the process ends, even if a sidecar has a disk.

    Attributes:
        path: Folder of the documents' files. By default, `disk.path` with "-documents" appended.
        max_per_tenant: Maximum number of documents of each tenant.
    """

    path: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    max_per_tenant: Count = 1000

    def __post_init__(self) -> None:
        if self.path is not None:
            msgspec.structs.force_setattr(self, "path", str(Path(self.path).expanduser()))


class ServerConfig(Table, frozen=True, kw_only=True):
    """`[server]`: settings of `kvtier serve`; command-line options override them.

    Attributes:
        host: Address to listen at.
        port: TCP port to listen at.
        model_name: Name under which the model is served, by default its own name.
        api_keys: File of API keys and their tenants.
        tenant_isolation: With "strict", tenants share no cached blocks, and only *metrics_tenants* may read `/metrics`.
            With "off", they share the blocks of requests without a cache_salt.
        metrics_tenants: Tenants that may read `/metrics` if *tenant_isolation* is "strict".
        max_queued: Completions that may wait, in addition to the *scheduler.max_running* completions that run. Further
            completions get status 429.
        max_body: Maximum bytes of a request body. A larger body gets status 413.
        max_prompt_tokens: Maximum tokens of a prompt. A longer prompt gets status 400.
        max_stored_responses: Maximum number of responses of `/v1/responses` that are stored in memory for each tenant.
            With 0, no response is stored.
        max_stored_response_bytes: Maximum bytes of the stored responses and their conversations for each tenant.
        tokenizer_threads: Number of tokenizer threads. One tenant never occupies all of them.
        max_header: Maximum bytes of the request line and headers.
        header_timeout_s: Seconds in which the request line and headers must arrive.
        body_timeout_s: Seconds in which the request body must arrive.
        max_connections: Maximum number of open connections. Further connections are closed.
        max_connections_per_address: Maximum number of open connections from one address.
        drain_s: Seconds for which running requests may continue on shutdown.
        cors_origins: Origins of browser pages that may send requests, such as `https://chat.example`; `*` allows all.
        allowed_hosts: Further names to accept in the `Host` header if there are no *api_keys*. `*.example` allows every
            name below example, `*` any name. IP addresses and loopback names are always accepted. Names that cannot
            exist in public DNS are accepted if *host* is not a loopback address.
        log_format: Log lines for humans, or in JSON.
        tool_call_parser: Tool call format. By default, the chat template determines it.
    """

    host: Annotated[str, msgspec.Meta(min_length=1)] = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    model_name: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    api_keys: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    tenant_isolation: Literal["off", "strict"] = "strict"
    metrics_tenants: tuple[str, ...] = ()
    max_queued: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 256
    max_body: ByteSize = parse_bytes("16MiB")
    max_prompt_tokens: Count | None = None
    max_stored_responses: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 1000
    max_stored_response_bytes: ByteSize = parse_bytes("64MiB")
    tokenizer_threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    max_header: ByteSize = parse_bytes("32KiB")
    header_timeout_s: Seconds = 20.0
    body_timeout_s: Seconds = 60.0
    max_connections: Count = 768
    max_connections_per_address: Count = 512
    drain_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 30.0
    cors_origins: tuple[Origin, ...] = ()
    allowed_hosts: tuple[HostName, ...] = ()
    log_format: Literal["human", "json"] = "human"
    tool_call_parser: ToolCallParser | None = None

    def __post_init__(self) -> None:
        for name, size in (("max_header", self.max_header), ("max_body", self.max_body)):
            if size < _MIN_REQUEST_BYTES:
                raise ValueError(f"{name} {size}: too small for any request; use {_MIN_REQUEST_BYTES} or more")


class OperatorsConfig(Table, frozen=True, kw_only=True):
    """`[operators]`: access to the operator routes (reset, evict, spill, pin, check, log). Their requests are logged.

    Attributes:
        tokens: File of operator tokens, in the same format as *server.api_keys*. By default, the environment variable
            KVTIER_OPERATOR_TOKEN is the only token. Without any token, the routes do not exist.
        audit: File to which operator requests are also written. Five rotated files are kept.
        audit_bytes: Size in bytes at which the file *audit* is rotated.
    """

    tokens: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    audit: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    audit_bytes: ByteSize = parse_bytes("16MiB")


class MetricsConfig(Table, frozen=True, kw_only=True):
    """`[metrics]`: the Prometheus metrics.

    Attributes:
        top_tenants: Number of tenants that have a label of their own, namely the largest ones. All other tenants share
            one label.
        compat: Projects whose dashboards can show kvtier. Its metrics are then also exported under the names that these
            dashboards expect.
    """

    top_tenants: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 20
    compat: tuple[Literal["vllm", "lmcache"], ...] = ()


class FileTable(Table, frozen=True, kw_only=True):
    """A TOML table with the path of a file.

    Attributes:
        path: The file. A leading `~` is expanded.
    """

    path: Annotated[str, msgspec.Meta(min_length=1)] | None = None

    def __post_init__(self) -> None:
        if self.path is not None:
            msgspec.structs.force_setattr(self, "path", str(Path(self.path).expanduser()))


class TracingConfig(Table, frozen=True, kw_only=True):
    """`[tracing]`: request spans for OpenTelemetry, sent as OTLP over HTTP.

    A request is traced if its `traceparent` header says that it is sampled.

    Attributes:
        endpoint: Address of the OpenTelemetry collector. By default nothing is traced.
        sample: Fraction of the requests without the header `traceparent` that are traced.
    """

    endpoint: Annotated[str, msgspec.Meta(pattern="^https?://.", examples=["http://127.0.0.1:4318"])] | None = None
    sample: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


class RequestLogConfig(FileTable, frozen=True, kw_only=True):
    """`[request_log]`: a JSON line for each request, without its text.

    Attributes:
        path: File of the log. A leading `~` is expanded. By default there is no log.
        size: Size in bytes at which the file is renamed to end in .1, and a new file is begun.
        files: Number of files that are kept, including the current one.
    """

    size: ByteSize = parse_bytes("64MiB")
    files: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 8


class DashboardConfig(FileTable, frozen=True, kw_only=True):
    """`[dashboard]`: the page at `/dashboard`.

    Attributes:
        path: File of the page's history. A leading `~` is expanded. By default, `disk.path` with "-history" appended.
            Without it and without a [disk], the history is lost when the process ends.
        max_viewers: Maximum number of browsers that show the page at once.
    """

    max_viewers: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 64


_HOST_BY_DEFAULT = HostConfig()
_SOCKET = "unix://"
_OF_A_SIDECAR = {"host": "host memory", "disk": "disk", "remote": "remote tier"}
_MAX_SOCKET_BYTES = 107  # limit of Linux on the path of a Unix socket


class Config(Table, frozen=True, kw_only=True):
    """The whole configuration of an engine. A tier that is None does not exist.

    Attributes:
        sidecar: Socket of a `kvtier sidecar`, such as "unix:///run/kvtier.sock". The engine then uses the sidecar's
            host memory, disk and remote tier. [host], [disk], [remote] and the quotas of [tenants] belong in the
            sidecar's configuration.
        metrics_port: TCP port for the Prometheus metrics of an engine without a server. 0 picks a free port. By default
            metrics have no port of their own.
        metrics_host: Address to listen at for *metrics_port*.
    """

    model: ModelConfig = ModelConfig()
    device: DeviceConfig = DeviceConfig()
    sidecar: str | None = None
    host: HostConfig | None = _HOST_BY_DEFAULT
    disk: DiskConfig | None = None
    remote: RemoteConfig | None = None
    names: NameConfig = NameConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    events: EventsConfig | None = None
    images: ImagesConfig = ImagesConfig()
    documents: DocumentsConfig = DocumentsConfig()
    server: ServerConfig = ServerConfig()
    operators: OperatorsConfig = OperatorsConfig()
    metrics: MetricsConfig = MetricsConfig()
    request_log: RequestLogConfig = RequestLogConfig()
    tracing: TracingConfig = TracingConfig()
    dashboard: DashboardConfig = DashboardConfig()
    tenants: dict[str, TenantConfig] = {}
    lora: dict[str, LoraConfig] = {}
    metrics_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | None = None
    metrics_host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        # In TOML, a capacity of 0 means that there is no host tier, because TOML has no null.
        is_none = self.host is not None and self.host.capacity == 0
        if is_none or (self.sidecar is not None and self.host is _HOST_BY_DEFAULT):
            msgspec.structs.force_setattr(self, "host", None)
        if self.sidecar is not None:
            _check_socket(self.sidecar)
            self._check_beside_sidecar()
        for salt in self.tenants:
            check_text("tenants", salt)
        for name in self.lora:
            check_text("lora", name)
        if "" in self.tenants:
            raise ValueError('tenants."": requests without a cache_salt belong to no tenant; remove the table')
        if "" in self.lora:
            raise ValueError('lora."": an adapter needs a name for requests to select it; give it one')
        names = [tenant.name for tenant in self.tenants.values() if tenant.name is not None]
        if len(set(names)) < len(names):
            raise ValueError(f"tenants: duplicate name among {', '.join(names)}; give each tenant a name of its own")
        if self.disk is not None and self.host is None:
            raise ValueError(
                "[disk] needs [host], because blocks are read into host memory; raise host.capacity or remove [disk]"
            )
        if self.remote is not None and self.host is None:
            raise ValueError(
                "[remote] needs [host], because blocks are read into host memory; raise host.capacity or remove "
                "[remote]"
            )

    @property
    def sidecar_path(self) -> str | None:
        """Path of the sidecar's socket; None without a sidecar."""
        return None if self.sidecar is None else self.sidecar.removeprefix(_SOCKET)

    def _check_beside_sidecar(self) -> None:
        for tier, table in (("host", self.host), ("disk", self.disk), ("remote", self.remote)):
            if table is not None:
                raise ValueError(
                    f"sidecar: the sidecar provides the {_OF_A_SIDECAR[tier]}; remove [{tier}], "
                    "or remove the key sidecar to use your own"
                )
        for tenant in self.tenants.values():
            for tier, quota in (("host", tenant.host), ("disk", tenant.disk)):
                if quota is not None:
                    name = tenant.name or "..."  # the salt may be a secret
                    raise ValueError(
                        f"tenants.{name}.{tier}: this tier belongs to the sidecar; give the quota in its configuration"
                    )


def _check_socket(address: str) -> None:
    path = address.removeprefix(_SOCKET)
    if not address.startswith(f"{_SOCKET}/") or "\0" in path:
        raise ValueError(f"sidecar {address!r}: write it as unix:///run/kvtier.sock, the absolute path of its socket")
    if len(path.encode()) > _MAX_SOCKET_BYTES:
        raise ValueError(f"sidecar: {path} is longer than the {_MAX_SOCKET_BYTES} bytes of a socket's path; shorten it")


def as_config(value: Config | Mapping[str, object] | str | Path) -> Config:
    """Return a checked `Config` from a `Config`, a dict of tables, a TOML file, or a shipped configuration's name."""
    if isinstance(value, Config):
        return config_from_dict(msgspec.to_builtins(value, enc_hook=int))
    return load_config(value) if isinstance(value, str | Path) else config_from_dict(value)


def load_config(source: str | Path) -> Config:
    """Return the `Config` of the TOML file *source*, or of the configuration shipped under this name."""
    return config_from_dict(load_toml(source), str(source))


def load_toml(source: str | Path) -> dict[str, object]:
    """Return the tables of the TOML file *source*, or of the configuration shipped in `kvtier.configs` under this name.

    Raises:
        ConfigError: If there is no such file, or it is not valid TOML.
    """
    folder = files("kvtier.configs").iterdir()
    shipped = {file.name.removesuffix(".toml"): file for file in folder if file.name.endswith(".toml")}
    file = shipped.get(str(source)) or Path(source).expanduser()
    if str(source) and file.is_dir():
        raise ConfigError(f"{source}: is a folder; give a TOML file")
    if not str(source) or not (file.is_file() or Path(str(source)).expanduser().exists()):  # a pipe is no file
        names = ", ".join(sorted(shipped))
        raise ConfigError(
            f"{source or 'an empty name'}: no such file, and no shipped configuration has this name; use one of {names}"
        )

    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror}; give a file that can be read") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: is not a text file (UTF-8); give a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: is not valid TOML: {error}") from error


def merge_tables(data: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """Return the tables of *data*, updated with the keys of the tables in *given*."""
    whole = dict(data)
    for table, values in given.items():
        found = whole.get(table)
        whole[table] = {**found, **values} if isinstance(found, dict) and isinstance(values, dict) else values
    return whole


def config_from_dict(data: Mapping[str, object], source: str = "config") -> Config:
    """Convert TOML-like *data* to a checked `Config`. Raise `ConfigError`, whose message begins with *source*."""
    return tree_from_dict(Config, data, source)


def tree_from_dict(kind: type[_Tree], data: Mapping[str, object], source: str) -> _Tree:
    """Convert TOML-like *data* to a checked configuration of type *kind*.

    Raises:
        ConfigError: If *data* is invalid. The message begins with *source*, for example the name of the file.
    """
    try:
        return msgspec.convert(dict(data), kind, dec_hook=lambda _, size: parse_bytes(size))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_explain(str(error), _choices(kind))}") from error


def _explain(message: str, choices: Mapping[str, Sequence[str]]) -> str:
    """Rewrite msgspec's "what - at `$.path`" as "$.path: what", and add the *choices* allowed at the path."""
    located = re.fullmatch(r"(.*) - at `(\$[^`]*)`", message, re.DOTALL)  # errors of the top table have no path
    what, path = located.groups() if located else (message, "$")

    if unknown := re.fullmatch("Object contains unknown field `(.*)`", what):
        key = unknown[1]
        elsewhere = [f"{table}.{key}" for table, keys in choices.items() if key in keys]
        near = difflib.get_close_matches(key, choices[path], n=1) or elsewhere
        return f"{path}.{key}: unknown key" + (f"; did you mean {near[0]}?" if near else "")
    if what.startswith("Invalid enum value"):
        return f"{path}: {what}; use one of {', '.join(choices[_whole(path)])}"
    if what.startswith("Expected `str` matching regex"):
        return f"{path}: not a valid address; write it as {' or '.join(choices[path])}"
    if missing := re.fullmatch("Object missing required field `(.*)`", what):
        return f"{path}.{missing[1]}: is missing; add this key"
    return f"{path}: {plain_error(what)}"


def _whole(path: str) -> str:
    """Remove the index from the configuration path of a list item: "$.table.key[3]" becomes "$.table.key"."""
    return re.sub(r"\[\d+\]$", "", path)


def _choices(kind: object, path: str = "$") -> dict[str, list[str]]:
    """Return, by path, the allowed choices of each value in a configuration of type *kind*.

    *path* is the path of the configuration itself. The choices are the keys of a table, the values of a Literal, or
    the examples of a string with a pattern.
    """
    if get_origin(kind) is Literal:
        return {path: list(get_args(kind))}
    choices: dict[str, list[str]] = {}
    if get_origin(kind) is dict:
        return _choices(get_args(kind)[1], f"{path}[...]")
    if get_origin(kind) is tuple:
        return _choices(get_args(kind)[0], path)
    numbers = ["a number"] if any(get_origin(each) is Annotated for each in get_args(kind)) else []
    for table in (kind, *get_args(kind)):  # Table, Table | None, a number | Literal, or a string with a pattern
        for meta in getattr(table, "__metadata__", ()):
            if meta.examples is not None:
                choices[path] = meta.examples
        if get_origin(table) is Literal:
            choices[path] = [*numbers, *get_args(table)]
        if isinstance(table, type) and issubclass(table, Table):
            fields = msgspec.structs.fields(table)
            choices[path] = [field.name for field in fields]
            for field in fields:
                choices |= _choices(field.type, f"{path}.{field.name}")
    return choices


def size_text(num_bytes: float) -> str:
    """Return *num_bytes* with a suitable unit, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"
