"""The sidecar's configuration: tables of one TOML file, most of them shared with an engine's configuration."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvtier.engine.config import (
    ByteSize,
    DashboardConfig,
    DiskConfig,
    HostConfig,
    HostName,
    OperatorsConfig,
    RemoteConfig,
    RequestLogConfig,
    Seconds,
    Table,
    TenantConfig,
    TracingConfig,
    is_loopback,
    load_toml,
    merge_tables,
    parse_bytes,
    tree_from_dict,
)

_LOOPBACK = ("tcp://127.", "tcp://localhost:", "tcp://[::1]:", "ipc://")
_PAGE_BYTES = 4096
_MAX_PATH_BYTES = 107  # Linux's limit for a Unix socket


class LmcacheConfig(Table, frozen=True, kw_only=True):
    """`[lmcache]`: the endpoint for engines with LMCache's client, such as vLLM.

    Attributes:
        listen: ZMQ address of the endpoint.
        chunk_tokens: Tokens of a chunk. The number must be a multiple of the engine's block size, and of the block size
            of each KV cache group of the engine.
    """

    listen: Annotated[
        str, msgspec.Meta(pattern="^(tcp|ipc)://.", examples=["tcp://127.0.0.1:5555", "ipc:///run/lmcache.sock"])
    ] = "tcp://127.0.0.1:5555"
    chunk_tokens: Annotated[int, msgspec.Meta(ge=16, le=65536)] = 256

    def __post_init__(self) -> None:
        if not self.listen.startswith(_LOOPBACK):
            raise ValueError(
                f"listen {self.listen}: LMCache's protocol has no authentication, and its clients must map memory of "
                "this machine; use tcp://127.0.0.1:PORT or ipc:///PATH"
            )


class SocketConfig(Table, frozen=True, kw_only=True):
    """`[socket]`: the Unix socket at which kvtier's own engines attach.

    Attributes:
        path: The socket. "auto" is `kvtier.sock` in `$XDG_RUNTIME_DIR`, or else in `/run`. With "none" there is no
            socket.
        allow_uids: Ids of the users, in addition to the sidecar's own, whose processes may attach.
    """

    path: Annotated[str, msgspec.Meta(min_length=1)] = "auto"
    allow_uids: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        if len(os.fsencode(self.path)) > _MAX_PATH_BYTES:
            raise ValueError(
                f"path {self.path}: a Unix socket's path has at most {_MAX_PATH_BYTES} bytes; choose a shorter path"
            )


def default_socket(environment: Mapping[str, str]) -> str | None:
    """Return the socket's default path, in the user's runtime folder or else in /run.

    Returns None if this process can write to neither.
    """
    folders = [folder for folder in (environment.get("XDG_RUNTIME_DIR"), "/run") if folder]
    folder = next((folder for folder in folders if os.access(folder, os.W_OK | os.X_OK)), None)
    return None if folder is None else str(Path(folder) / "kvtier.sock")


class ModelWeightsConfig(Table, frozen=True, kw_only=True):
    """`[models."NAME"]`: identifies the weights of the model NAME, so that no KV of other weights is reused.

    Give either *path* or *revision*.

    Attributes:
        path: Folder or file of the weights. The sidecar computes a digest from the files when it starts.
        revision: Any text that changes when the weights change.
    """

    path: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    revision: Annotated[str, msgspec.Meta(min_length=1)] | None = None

    def __post_init__(self) -> None:
        if (self.path is None) == (self.revision is None):
            raise ValueError("give either path (of the weights) or revision (a text that changes with the weights)")


class HttpConfig(Table, frozen=True, kw_only=True):
    """`[http]`: the HTTP server for people and monitoring.

    With a token, every request needs `Authorization: Bearer TOKEN`, except for `/health` and the dashboard's page.
    Without a token, everyone who reaches the server may empty the cache.

    Attributes:
        host: Address to listen at. Without a token it must be a loopback address.
        port: TCP port to listen at. 0 picks a free port. With "none" there is no server.
        token: Token that requests must have.
        token_file: File with the token, instead of *token*.
        allowed_hosts: Without a token, further names to accept in the `Host` header. IP addresses, `localhost` and
            names that end in `.localhost` are always accepted.
    """

    host: Annotated[str, msgspec.Meta(min_length=1)] = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] | Literal["none"] = 9464
    token: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    token_file: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    allowed_hosts: tuple[HostName, ...] = ()

    def __post_init__(self) -> None:
        if self.token is not None and self.token_file is not None:
            raise ValueError("token and token_file are both set; give one of them")
        if not self.has_token and not is_loopback(self.host):
            raise ValueError(f"host {self.host} can be reached from other machines: give token_file, or use 127.0.0.1")

    @property
    def has_token(self) -> bool:
        """True if requests need a token."""
        return self.token is not None or self.token_file is not None


class SidecarMetricsConfig(Table, frozen=True, kw_only=True):
    """`[metrics]`: the metrics for Prometheus.

    Attributes:
        compat: Projects whose dashboards can show kvtier. Its metrics are then also exported under the names that these
            dashboards expect. "vllm" is an error here, because the attached engines export vLLM's names themselves.
    """

    compat: tuple[Literal["vllm", "lmcache"], ...] = ()

    def __post_init__(self) -> None:
        if "vllm" in self.compat:
            raise ValueError(
                "compat vllm: the engines export vLLM's metrics themselves, so dashboards would count them twice; "
                'use "lmcache" here, and "vllm" in the configuration of kvtier serve'
            )


class SidecarConfig(Table, frozen=True, kw_only=True):
    """The sidecar's whole configuration.

    Attributes:
        extent: Bytes of each part into which host memory is divided. At any time, all chunks in an extent have the same
            model and KV format. No chunk may be larger than an extent.
        drain_s: Seconds for which the sidecar, on exit, may write chunks to disk that are only in host memory.
        log_format: Log lines for humans, or in JSON.
    """

    host: HostConfig = HostConfig()
    disk: DiskConfig | None = None
    remote: RemoteConfig | None = None
    socket: SocketConfig = SocketConfig()
    lmcache: LmcacheConfig | None = LmcacheConfig()
    http: HttpConfig = HttpConfig()
    dashboard: DashboardConfig = DashboardConfig()
    operators: OperatorsConfig = OperatorsConfig()
    metrics: SidecarMetricsConfig = SidecarMetricsConfig()
    models: dict[str, ModelWeightsConfig] = msgspec.field(default_factory=dict)
    tenants: dict[str, TenantConfig] = msgspec.field(default_factory=dict)
    request_log: RequestLogConfig = RequestLogConfig()
    tracing: TracingConfig = TracingConfig()
    extent: ByteSize = parse_bytes("64MiB")
    drain_s: Seconds = 30.0
    log_format: Literal["human", "json"] = "human"

    def __post_init__(self) -> None:
        if self.extent < 1 << 20 or self.extent % _PAGE_BYTES:
            raise ValueError(f'extent {self.extent}: use a multiple of {_PAGE_BYTES} bytes, "1MiB" or more')
        if self.host.capacity < self.extent:
            raise ValueError(
                f"host.capacity {self.host.capacity}: use {self.extent} (one extent) or more, because host memory is "
                "divided into extents"
            )
        if self.disk is not None and self.disk.codec == "fp8":
            raise ValueError("disk.codec fp8 is for one dtype, but a sidecar stores all dtypes; use none, zstd or auto")


def sidecar_config(source: str | Path | None, given: Mapping[str, object]) -> SidecarConfig:
    """Return the configuration in the TOML file *source*. The settings in *given* override those in the file.

    Raises `ConfigError` for an unknown key or an invalid value.
    """
    data = merge_tables({} if source is None else load_toml(source), given)
    return tree_from_dict(SidecarConfig, data, "sidecar" if source is None else str(source))
