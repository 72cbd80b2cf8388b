"""The router's configuration: one immutable tree, from a TOML file and the command line."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from kvtier.engine.config import (
    ByteSize,
    Count,
    HostName,
    OperatorsConfig,
    Origin,
    Seconds,
    Table,
    load_toml,
    merge_tables,
    parse_bytes,
    tree_from_dict,
)
from kvtier.routing.kv_event import Publisher

Weight = Annotated[float, msgspec.Meta(ge=0, le=1_000_000)]
Part = Annotated[float, msgspec.Meta(ge=0, le=1)]


class ReplicaConfig(Table, frozen=True, kw_only=True):
    """`[[replicas]]`: one server that the router sends requests to.

    Attributes:
        url: Address of the server, such as `http://HOST:PORT`.
        name: Name of the server in metrics and logs. By default, its URL.
        events: ZMQ address where the server publishes KV events.
        replay: ZMQ address where the server sends missed events again.
        topic: ZMQ topic of the server's events.
    """

    url: Annotated[str, msgspec.Meta(min_length=1)]
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=128)] = ""
    events: str | None = None
    replay: str | None = None
    topic: str = ""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            is_usable = is_usable and not (parts.query or parts.fragment or parts.username)  # the URL is also the name
        except ValueError:
            is_usable = False
        if not is_usable:
            raise ValueError(f"url {self.url}: is not the URL of a server; write it as http://HOST:PORT")
        for key, endpoint in (("events", self.events), ("replay", self.replay)):
            if endpoint is not None and not re.match(r"^(tcp://[^*]+:\d+|ipc://.+|inproc://.+)$", endpoint):
                raise ValueError(f"{key} {endpoint}: is not an endpoint to connect to; write it as tcp://HOST:PORT")
        if self.replay is not None and self.events is None:
            raise ValueError("replay without events: give the endpoint of events too")
        msgspec.structs.force_setattr(self, "url", self.url.rstrip("/"))
        msgspec.structs.force_setattr(self, "name", self.name or self.url)

    @property
    def publisher(self) -> Publisher | None:
        """ZMQ endpoints where the server publishes KV events; None if the server publishes none."""
        return None if self.events is None else Publisher(self.name, self.events, self.replay, self.topic)


class PolicyConfig(Table, frozen=True, kw_only=True):
    """`[policy]`: the weights of the routing policy, which sends a request to the replica with the lowest cost.

    A prompt token that must be computed costs 1. If no replica has any part of a prompt, the replicas are ordered by
    consistent hashing of the prompt's first tokens.

    Attributes:
        host_cost: Cost of a cached token that is loaded from host memory.
        disk_cost: Cost of a cached token that is loaded from disk.
        queue_weight: Cost of each prompt token that waits at a replica. The cost is low, because a token that is
            computed twice delays all requests at its replica.
        request_tokens: Cost of each request that runs at a replica.
        session_tokens: A conversation stays with its replica unless the cost of another replica is lower by more than
            this.
        first_tokens: Number of a prompt's first tokens that are hashed.
        hash_slack: In the order of the hash, a prompt goes to the first replica with less than this many times the
            average number of requests.
    """

    host_cost: Part = 0.1
    disk_cost: Part = 0.3
    queue_weight: Weight = 0.1
    request_tokens: Weight = 128.0
    session_tokens: Weight = 1024.0
    first_tokens: Count = 1024
    hash_slack: Annotated[float, msgspec.Meta(ge=1, le=100)] = 1.25


class IndexConfig(Table, frozen=True, kw_only=True):
    """`[index]`: limits on what the router remembers.

    Attributes:
        max_blocks: Maximum number of cached blocks of replicas that the router remembers. Each takes about 250 bytes.
        max_sessions: Maximum number of conversations whose replica the router remembers.
    """

    max_blocks: Count = 2_000_000
    max_sessions: Count = 100_000


class TokensConfig(Table, frozen=True, kw_only=True):
    """`[tokens]`: how the router gets a prompt's tokens, which it needs because KV events refer to tokens.

    Attributes:
        ask: Whether the router queries a replica's `/tokenize`. Otherwise, and if no answer comes, the router compares
            the prompt's text with the texts that were sent to each replica.
        timeout_s: Seconds to wait for the answer.
        max_cached: Maximum number of tokens from answers that are cached. Each takes four bytes.
    """

    ask: bool = True
    timeout_s: Seconds = 1.0
    max_cached: Count = 16_000_000


class HealthConfig(Table, frozen=True, kw_only=True):
    """`[health]`: how replicas are polled.

    Attributes:
        every_s: Seconds between two polls of a replica.
        timeout_s: Seconds after which a poll without an answer has failed.
        failures: Number of failed polls in a row after which a replica is dead. It is also dead if its very first poll
            fails.
    """

    every_s: Seconds = 2.0
    timeout_s: Seconds = 2.0
    failures: Count = 2


class RouteConfig(Table, frozen=True, kw_only=True):
    """The router's whole configuration.

    Without *api_keys*, the router protects the replicas from requests that other sites' web pages make a browser send.

    Attributes:
        host: Address to listen at.
        port: TCP port to listen at.
        api_keys: File of API keys that the replicas use, if any. The router needs the file to find out a request's
            tenant, because kvtier's names of blocks depend on the tenant. The router does not reject unknown keys,
            because the replicas do.
        tenant_isolation: As in the replicas' configuration: with "strict", tenants share no cached blocks.
        allowed_hosts: Further names to accept in the `Host` header if there are no *api_keys*. IP addresses and
            loopback names are always accepted. If *host* is not a loopback address, names that public DNS cannot have,
            such as `kvtier.default.svc`, are accepted, too.
        cors_origins: Origins of browser pages that may send requests. The replicas must allow these origins as well.
        max_body: Maximum bytes of a request body.
        max_header: Maximum bytes of the request line and headers.
        header_timeout_s: Seconds in which the request line and headers must arrive.
        max_connections: Maximum number of open connections. Further connections are closed.
        max_connections_per_address: Maximum number of open connections from one address.
        timeout_s: Seconds after which an answer that does not begin, or does not continue, is aborted.
        drain_s: Seconds for which running answers may continue on shutdown.
        log_format: Log lines for humans, or in JSON.
    """

    host: Annotated[str, msgspec.Meta(min_length=1)] = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8080
    replicas: list[ReplicaConfig] = msgspec.field(default_factory=list)
    policy: PolicyConfig = PolicyConfig()
    index: IndexConfig = IndexConfig()
    tokens: TokensConfig = TokensConfig()
    health: HealthConfig = HealthConfig()
    operators: OperatorsConfig = OperatorsConfig()
    api_keys: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    tenant_isolation: Literal["off", "strict"] = "strict"
    allowed_hosts: tuple[HostName, ...] = ()
    cors_origins: tuple[Origin, ...] = ()
    max_body: ByteSize = parse_bytes("64MiB")
    max_header: ByteSize = parse_bytes("32KiB")
    header_timeout_s: Seconds = 20.0
    max_connections: Count = 4096
    max_connections_per_address: Count = 4096
    timeout_s: Seconds = 600.0
    drain_s: Annotated[float, msgspec.Meta(ge=0, le=86400)] = 30.0
    log_format: Literal["human", "json"] = "human"

    def __post_init__(self) -> None:
        if not self.replicas:
            raise ValueError("no replicas: give the URL of at least one server")
        for what in ("name", "url"):
            values = [getattr(each, what) for each in self.replicas]
            if len(set(values)) < len(values):
                twice = next(each for each in values if values.count(each) > 1)
                raise ValueError(f"replicas: the {what} {twice} is used twice; give each replica its own")


def route_config(source: str | Path | None, given: Mapping[str, object]) -> RouteConfig:
    """Return the configuration in the TOML file *source*, overridden by *given*. Raise `ConfigError` if invalid."""
    data = merge_tables({} if source is None else load_toml(source), given)
    return tree_from_dict(RouteConfig, data, "route" if source is None else str(source))
