"""One frozen configuration tree, read once from TOML; every key has a default, every mistake names its path."""

import difflib
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar, get_args, get_origin

import msgspec

from kvtier.tiers.naming.block_hash import HashAlgorithm
from kvtier.tiers.naming.request_text import check_text

ToolCallParser: TypeAlias = Literal[
    "hermes", "mistral_args", "mistral", "granite", "jamba", "phi4_mini_json", "llama3_json", "json"
]
# Values that earlier versions had, by path, and what to choose instead.
_GONE = {
    ("$.names.algorithm", "xxh3_128"): "xxh3_128 is gone, as two prompts with one name can be made in seconds; "
    "use sha256, and what is stored under the old names leaves in its turn"
}
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}
_MAX_BYTES = 1024**6


class ConfigError(ValueError):
    """A configuration that cannot be used: `source: $.path.to.key: what is wrong`."""


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
    """*size* in bytes: "8GiB", "1.5 GiB", "64KB", "512" or a plain count; units B, KB to TB, KiB to TiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]*)", str(size).strip().lower(), re.ASCII)
    if isinstance(size, bool) or not isinstance(size, int | str) or not match or match[2] not in _UNITS:
        raise ValueError(f'bad size {size!r}; write bytes as an integer, or a string such as "8GiB" or "512MiB"')
    number, unit = match[1], _UNITS[match[2]]
    num_bytes = round(float(number) * unit) if "." in number else int(number) * unit
    if num_bytes > _MAX_BYTES:
        raise ValueError(f"size {size!r} is more than any memory or disk has; 1048576TiB at most")
    return ByteSize(num_bytes)


Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
_MIN_REQUEST_BYTES = 1024  # of headers, and of a body: what clients send with a prompt of a few words
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
HOST_NAME = r"^(\*|(\*\.)?[^*/:\s]+)$"
HostName = Annotated[str, msgspec.Meta(pattern=HOST_NAME, examples=["kv.example"])]
Origin = Annotated[str, msgspec.Meta(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)$", examples=["https://chat.example"])]


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A TOML table. Plain construction does not check types and ranges; `as_config` does."""


_Tree = TypeVar("_Tree", bound=Table)


class ModelConfig(Table, frozen=True, kw_only=True):
    """`[model]`: how the weights are loaded. "auto" follows the checkpoint's dtype and takes a GPU if there is one.

    *generation_config* "auto" takes the model's own settings for sampling (temperature, top_p, top_k, min_p,
    repetition_penalty, max_new_tokens) where a request does not say; "none" leaves them out.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    generation_config: Literal["auto", "none"] = "auto"


class DeviceConfig(Table, frozen=True, kw_only=True):
    """`[device]`: the KV pool that attention reads. *capacity* in bytes of KV, *block_size* in tokens.

    With *gpu_memory_utilization* the pool has that part of the GPU's memory, less the weights and what a step needs, in
    place of *capacity*; see `GpuShare`.
    With *partial_blocks* a prompt that agrees with the first tokens only of a cached block gets a copy of it.
    *retention_tokens* is for models with sliding windows: without it every block of theirs is kept, 0 keeps those that
    a prompt which goes on from this one needs, N also those to resume at every N tokens. *poison* is for debugging: a
    slot is not a number until something was computed or copied into it, so that a read of a wrong one shows.
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
        """What is wrong with *gpu_memory_utilization* where there is no GPU."""
        what = f"gpu_memory_utilization {self.gpu_memory_utilization:g}: there is no GPU"
        return ValueError(f"{what}; give device.capacity in its place, as --device-memory 2GiB")


class HostConfig(Table, frozen=True, kw_only=True):
    """`[host]`: host memory below the device, pinned where there is a GPU. *capacity* in bytes; 0: no host tier."""

    capacity: ByteSize = parse_bytes("4GiB")


class DiskConfig(Table, frozen=True, kw_only=True):
    """`[disk]`: the store that outlives the process; without this table there is none.

    *path* is a folder, `~` expanded; it never takes more than *capacity* bytes. A read later than *read_timeout_s*
    seconds is a miss. *durability* says what is still there after which accident: process, interval (a checkpoint
    every *checkpoint_s* seconds) or commit; see `Durability`. *codec*: zstd makes blocks smaller and slower, auto does
    so only where that makes reading faster, fp8 halves them and is lossy. Over *max_written_bytes_per_day* only what is
    used a second time is written; *endurance* is the drive's TBW figure, for the gauge of its life. With an encryption
    key (32 bytes: raw, hex or base64, in a file or printed by a command) records are encrypted, AES-256-GCM; with
    another key nothing stored is found.
    """

    path: Annotated[str, msgspec.Meta(min_length=1)]
    capacity: ByteSize = parse_bytes("32GiB")
    codec: Literal["none", "zstd", "auto", "fp8"] = "none"
    read_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 10.0
    durability: Literal["process", "interval", "commit"] = "process"
    checkpoint_s: Annotated[float, msgspec.Meta(ge=0.1, le=86400)] = 10.0
    max_written_bytes_per_day: ByteSize | None = None
    endurance: ByteSize | None = None
    encryption_key_file: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    encryption_key_command: Annotated[str, msgspec.Meta(min_length=1)] | None = None

    def __post_init__(self) -> None:
        if self.encryption_key_file is not None and self.encryption_key_command is not None:
            raise ValueError("encryption_key_file and encryption_key_command: give one of them")
        if self.endurance == 0:
            raise ValueError('endurance 0: give the bytes that the drive is made for ("600TB"), or leave it out')
        if self.capacity == 0:
            raise ValueError("capacity 0 stores nothing; give it a size, or remove the [disk] table for no disk tier")
        msgspec.structs.force_setattr(self, "path", str(Path(self.path).expanduser()))


_REDIS = ("redis", "rediss", "valkey", "valkeys")
_OBJECTS = ("s3", "gs", "az", "file")


class RemoteConfig(Table, frozen=True, kw_only=True):
    """`[remote]`: a store that machines share, beyond host memory and disk; without this table there is none.

    *url* says which: `redis://HOST:6379/0` or `rediss://` (TLS), `redis+cluster://HOST1:6379,HOST2:6379`,
    `s3://BUCKET/PREFIX`, `gs://`, `az://ACCOUNT/CONTAINER/PREFIX`, `file:///FOLDER`. Redis and Valkey: the password is
    in *password_file*, the server's certificate is signed by *ca_file*, and a record stays *ttl_s* seconds; 0: until
    the server evicts it. Object stores: *endpoint* and *region*, where they are not the cloud's own; credentials are
    the environment's. Who does not answer within *timeout_s* is left alone for a while. Records are sealed as on disk:
    *codec* and the encryption key are as those of [disk], and other machines that share it need the same key.
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
                "url: no such kind of store; write redis://HOST:6379/0, redis+cluster://HOST:6379,HOST:6379, "
                "s3://BUCKET/PREFIX, gs://, az:// or file:///FOLDER"
            )
        if self.encryption_key_file is not None and self.encryption_key_command is not None:
            raise ValueError("encryption_key_file and encryption_key_command: give one of them")
        of_others = ("endpoint", "region") if self.is_redis else ("password_file", "ca_file")
        for name in of_others:
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: {scheme} has none; leave it out")

    @property
    def where(self) -> str:
        """The URL for people: no user and no password in it."""
        scheme, _, rest = self.url.partition("://")
        return f"{scheme}://{rest.rpartition('@')[2]}"

    @property
    def is_redis(self) -> bool:
        """Whether the store is a Redis or Valkey, and no object store."""
        return self.url.partition("://")[0].removesuffix("+cluster") in _REDIS


class TenantConfig(Table, frozen=True, kw_only=True):
    """`[tenants."SALT"]`: byte quotas of the requests with that cache_salt; without one a tier is not limited.

    Over its quota a tenant loses its own blocks, tails first. *name* stands for it in metrics, where the salt must not.
    """

    host: ByteSize | None = None
    disk: ByteSize | None = None
    name: str | None = None


class LoraConfig(Table, frozen=True, kw_only=True):
    """`[lora.NAME]`: a LoRA adapter of the model; *path* is a folder that `peft` wrote. Requests name it by NAME."""

    path: Annotated[str, msgspec.Meta(min_length=1)]


class NameConfig(Table, frozen=True, kw_only=True):
    """`[names]`: how blocks are named. Another *algorithm* or *seed* is another namespace: nothing stored is found.

    Without a *seed* it is the algorithm's own: for sha256_cbor, which gives vLLM's names, vLLM's.
    """

    algorithm: Literal["sha256", "sha256_cbor"] = "sha256"
    seed: str | None = None

    def __post_init__(self) -> None:
        if self.seed is not None:
            check_text("seed", self.seed)

    @property
    def resolved_seed(self) -> str:
        """The seed that is used."""
        return HashAlgorithm(self.algorithm).default_seed if self.seed is None else self.seed


class SchedulerConfig(Table, frozen=True, kw_only=True):
    """`[scheduler]`: *token_budget* tokens are computed per step at most, *prefill_chunk* of one prompt at most.

    *max_running* requests decode together, *max_waiting* queue behind them; one more is refused.
    *load*: of a hit in a colder tier, "cost" loads as much as comes faster than computing it, by the measured speeds of
    lanes and prefill and by what is queued; "split" also computes the front of a hit while the rest of it is loaded,
    where that is faster by a tenth and no layer has a window; "always" loads all. *by_layers*: a prompt whose prefix
    comes from host memory, while nothing else runs, begins to compute with the first layers and waits for the others as
    it gets there. *look_ahead* is the share of host memory into which what waiting requests need is brought from disk,
    each for *look_ahead_s* seconds at most.
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
    """`[events]`: KV events for routers, in vLLM's format over ZMQ; without this table there are none.

    *endpoint* is bound if it has a `*` or `::` or begins with ipc:// or inproc://, else connected to; *replay_endpoint*
    is always bound. `*` stands for the address *host*, by default this machine only: events contain the prompts'
    tokens. Port 0 picks a free one. *hwm* batches wait for one slow subscriber at most, the newest *buffer_steps*
    can be replayed. Hashes are the low 64 bits of blocks' names, or the names if not *int_block_hashes*.
    """

    endpoint: Endpoint = "tcp://*:5557"
    replay_endpoint: Endpoint | None = None
    host: Annotated[str, msgspec.Meta(min_length=1)] = "127.0.0.1"
    topic: str = ""
    buffer_steps: BatchCount = 10_000
    hwm: BatchCount = 100_000
    int_block_hashes: bool = True

    def __post_init__(self) -> None:
        for endpoint in (self.endpoint, self.replay_endpoint or ""):  # ZMQ would take the remainder for a port
            port = re.search(r"^tcp://.*:(\d+)$", endpoint)
            if port is not None and int(port[1]) > 65535:
                raise ValueError(f"endpoint {endpoint} has no such port; use 1 to 65535, or 0 for a free one")


class DocumentsConfig(Table, frozen=True, kw_only=True):
    """`[documents]`: the documents that `kvtier serve` keeps warm by name. A tenant may have *max_per_tenant*.

    Each is a file in the folder *path*, by default one beside `disk.path`, with "-documents" behind its name; without a
    [disk], as with a sidecar, they end with the process. They are encrypted if [disk] has a key.
    """

    path: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    max_per_tenant: Count = 1000

    def __post_init__(self) -> None:
        if self.path is not None:
            msgspec.structs.force_setattr(self, "path", str(Path(self.path).expanduser()))


class ServerConfig(Table, frozen=True, kw_only=True):
    """`[server]`: settings of `kvtier serve`; options of its command line override them.

    The model is served under *model_name*, by default its own. *api_keys* is a file of keys and their tenants. With
    *tenant_isolation* "strict" they share no cached block, and only *metrics_tenants* may read `/metrics`; with "off"
    they share those of requests without a cache_salt. *max_queued* completions wait behind the *scheduler.max_running*
    that run; what comes then is answered with 429, as a body of more than *max_body* bytes is with 413 and a prompt of
    more than *max_prompt_tokens* with 400. *tokenizer_threads* threads tokenize, and one tenant never has all of them.

    Before a client is known by its key: a request's line and headers have *max_header* bytes at most and come within
    *header_timeout_s*, its body within *body_timeout_s*; there are *max_connections* at once, of them
    *max_connections_per_address* from one address, and what comes then is closed. Told to end, the server lets running
    requests go on for *drain_s* seconds. Pages of *cors_origins*, such as `https://chat.example`, may ask it from a
    browser; `*` is any page. Without *api_keys* the names in *allowed_hosts* may stand as `Host` in requests, in
    addition to IP addresses, loopback names and, if *host* is no loopback address, names that public DNS cannot have;
    `*.example` is every name below it, `*` any. *tool_call_parser* is the family whose calls of tools are read; without
    it the model's chat template tells.
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
                raise ValueError(f"{name} {size}: no request is so small; use {_MIN_REQUEST_BYTES} or more")


class OperatorsConfig(Table, frozen=True, kw_only=True):
    """`[operators]`: who may have the server reset, evict, spill, pin, check and log, see `docs/operations.md`.

    *tokens* is a file of operators' tokens, of the form of API keys; without it KVTIER_OPERATOR_TOKEN of the
    environment is the only one, and without that there are no such routes. What they ask for goes to the log, and to
    the file *audit*; one of *audit_bytes* is full, and five full ones are kept.
    """

    tokens: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    audit: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    audit_bytes: ByteSize = parse_bytes("16MiB")


class MetricsConfig(Table, frozen=True, kw_only=True):
    """`[metrics]`: what Prometheus is told. The *top_tenants* largest tenants are told by name, others together.
    *compat*: whose names are told beside kvtier's own, for boards that know those."""

    top_tenants: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 20
    compat: tuple[Literal["vllm", "lmcache"], ...] = ()


class FileTable(Table, frozen=True, kw_only=True):
    """A table with the name of a file, which may begin with `~`."""

    path: Annotated[str, msgspec.Meta(min_length=1)] | None = None

    def __post_init__(self) -> None:
        if self.path is not None:
            msgspec.structs.force_setattr(self, "path", str(Path(self.path).expanduser()))


class TracingConfig(Table, frozen=True, kw_only=True):
    """`[tracing]`: spans of requests for the OpenTelemetry collector at *endpoint*, OTLP over HTTP; without it there
    are none. A request whose `traceparent` says that its trace is sampled is traced; of those without one, the part
    *sample*."""

    endpoint: Annotated[str, msgspec.Meta(pattern="^https?://.", examples=["http://127.0.0.1:4318"])] | None = None
    sample: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


class RequestLogConfig(FileTable, frozen=True, kw_only=True):
    """`[request_log]`: a line of JSON for each request, in names and numbers, in the file *path*; without it there is
    none. A file of *size* bytes gets the ending .1, and *files* are kept in all."""

    size: ByteSize = parse_bytes("64MiB")
    files: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 8


class DashboardConfig(FileTable, frozen=True, kw_only=True):
    """`[dashboard]`: the page at `/dashboard`. *max_viewers* may watch at once. What it shows over time is kept in the
    file *path*, by default one beside `disk.path`, with "-history" behind its name; without a [disk] it ends with the
    process."""

    max_viewers: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 64


_HOST_BY_DEFAULT = HostConfig()
_SOCKET = "unix://"
_OF_A_SIDECAR = {"host": "host memory", "disk": "disk", "remote": "remote tier"}
_MAX_SOCKET_BYTES = 107  # of a Unix socket's path, as Linux has it


class Config(Table, frozen=True, kw_only=True):
    """The whole configuration. A tier of None is absent; *metrics_port* None serves no metrics, 0 picks a free port.

    *sidecar* is the socket of a `kvtier sidecar`, "unix:///run/kvtier.sock", whose host memory and disk are used in
    place of own ones; its configuration has what [host], [disk] and the quotas of [tenants] say else.
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
        is_none = self.host is not None and self.host.capacity == 0  # TOML cannot say None
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
            raise ValueError('tenants."": requests without a cache_salt are no tenant; leave it out')
        if "" in self.lora:
            raise ValueError('lora."": an adapter needs a name that requests can say; give it one')
        names = [tenant.name for tenant in self.tenants.values() if tenant.name is not None]
        if len(set(names)) < len(names):
            raise ValueError(f"tenants: the same name twice among {', '.join(names)}; their bytes would be mixed up")
        if self.disk is not None and self.host is None:
            raise ValueError("disk needs host, where its blocks are read into; raise host.capacity or remove [disk]")
        if self.remote is not None and self.host is None:
            raise ValueError(
                "remote needs host, where its blocks are read into; raise host.capacity or remove [remote]"
            )

    @property
    def sidecar_path(self) -> str | None:
        """The path of the sidecar's socket; None without one."""
        return None if self.sidecar is None else self.sidecar.removeprefix(_SOCKET)

    def _check_beside_sidecar(self) -> None:
        for tier, table in (("host", self.host), ("disk", self.disk), ("remote", self.remote)):
            if table is not None:
                raise ValueError(
                    f"sidecar: it has the {_OF_A_SIDECAR[tier]}; remove [{tier}], or sidecar to have your own"
                )
        for tenant in self.tenants.values():
            for tier, quota in (("host", tenant.host), ("disk", tenant.disk)):
                if quota is not None:
                    name = tenant.name or "..."  # the salt may be a secret
                    raise ValueError(
                        f"tenants.{name}.{tier}: give the quota in the sidecar's configuration, which has the tier"
                    )


def _check_socket(address: str) -> None:
    path = address.removeprefix(_SOCKET)
    if not address.startswith(f"{_SOCKET}/") or "\0" in path:
        raise ValueError(f"sidecar {address!r}: write it as unix:///run/kvtier.sock, the whole path of its socket")
    if len(path.encode()) > _MAX_SOCKET_BYTES:
        raise ValueError(f"sidecar: {path} is longer than the {_MAX_SOCKET_BYTES} bytes of a socket's path; shorten it")


def as_config(value: Config | Mapping[str, object] | str | Path) -> Config:
    """A checked `Config` from another one, a dict of tables, a TOML file, or the name of a shipped configuration."""
    if isinstance(value, Config):
        return config_from_dict(msgspec.to_builtins(value, enc_hook=int))
    return load_config(value) if isinstance(value, str | Path) else config_from_dict(value)


def load_config(source: str | Path) -> Config:
    """The `Config` in the TOML file *source*, or the one that ships in `kvtier.configs` by that name ("laptop")."""
    return config_from_dict(load_toml(source), str(source))


def load_toml(source: str | Path) -> dict[str, object]:
    """The tables in the TOML file *source*, or in the one that ships by that name; `ConfigError`."""
    folder = files("kvtier.configs").iterdir()
    shipped = {file.name.removesuffix(".toml"): file for file in folder if file.name.endswith(".toml")}
    file = shipped.get(str(source)) or Path(source).expanduser()
    if not file.is_file():
        names = ", ".join(sorted(shipped))
        raise ConfigError(
            f"{source or 'an empty name'}: no such file, and no configuration ships by that name; there are: {names}"
        )

    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # not TOML, or not UTF-8
        raise ConfigError(f"{source}: {error}") from error


def with_tables(data: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """The tables of *data* with what is *given* in place of their own, key by key."""
    whole = dict(data)
    for table, values in given.items():
        found = whole.get(table)
        whole[table] = {**found, **values} if isinstance(found, dict) and isinstance(values, dict) else values
    return whole


def config_from_dict(data: Mapping[str, object], source: str = "config") -> Config:
    """The `Config` of TOML-like *data*; *source* begins the message of a `ConfigError`."""
    return tree_from_dict(Config, data, source)


def tree_from_dict(kind: type[_Tree], data: Mapping[str, object], source: str) -> _Tree:
    """The tree of that *kind* of TOML-like *data*; *source* begins the message of a `ConfigError`."""
    try:
        return msgspec.convert(dict(data), kind, dec_hook=lambda _, size: parse_bytes(size))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_explain(str(error), _choices(kind))}") from error


def _explain(message: str, choices: Mapping[str, Sequence[str]]) -> str:
    """msgspec's "what - at `$.path`" as "$.path: what", with those of the *choices* that are allowed there."""
    located = re.fullmatch(r"(.*) - at `(\$[^`]*)`", message, re.DOTALL)  # the top table's own mistakes have no path
    what, path = located.groups() if located else (message, "$")

    if unknown := re.fullmatch("Object contains unknown field `(.*)`", what):
        key = unknown[1]
        elsewhere = [f"{table}.{key}" for table, keys in choices.items() if key in keys]
        near = difflib.get_close_matches(key, choices[path], n=1) or elsewhere
        return f"{path}.{key}: unknown key" + (f"; did you mean {near[0]}?" if near else "")
    if what.startswith("Invalid enum value"):
        if (gone := _GONE.get((path, what.removeprefix("Invalid enum value ").strip("'")))) is not None:
            return f"{path}: {gone}"
        return f"{path}: {what}; use one of {', '.join(choices[_whole(path)])}"
    if what.startswith("Expected `str` matching regex"):
        return f"{path}: is no address; write it as {' or '.join(choices[path])}"
    return f"{path}: {what.replace('`object', '`table')}"


def _whole(path: str) -> str:
    """The path of the list, for that of an item."""
    return re.sub(r"\[\d+\]$", "", path)


def _choices(kind: object, path: str = "$") -> dict[str, list[str]]:
    """What may stand at *path*, of type *kind*, and below it: the keys of each table, the values of each Literal,
    examples of what has a pattern."""
    if get_origin(kind) is Literal:
        return {path: list(get_args(kind))}
    choices: dict[str, list[str]] = {}
    if get_origin(kind) is dict:
        return _choices(get_args(kind)[1], f"{path}[...]")
    if get_origin(kind) is tuple:
        return _choices(get_args(kind)[0], path)
    numbers = ["a number"] if any(get_origin(each) is Annotated for each in get_args(kind)) else []
    for table in (kind, *get_args(kind)):  # Table, Table | None, a number | Literal, or what has a pattern
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
    """*num_bytes* with a unit that suits it, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"
