"""Endpoint: the interface of a socket at which engines attach, and the clients, leases and counts that it reports."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from kvtier.sidecar.layout import Layout
from kvtier.tiers.lower.statistics import TokenBalance


class LeaseUse(StrEnum):
    """Reason why chunks are leased. Leased chunks are not evicted."""

    PROMISED = "promised"  # reported to the client as a hit
    READ = "read"  # the client copies them out of host memory now
    WRITTEN = "written"  # the client copies them into host memory now; no lookup finds them yet
    PINNED = "pinned"  # kept by an operator, not by a client
    QUARANTINED = "quarantined"  # the client's session has ended, but one of its processes may still copy


@dataclass(frozen=True, slots=True)
class Lease:
    """A client's lease, which keeps *num_chunks* chunks of one group (for example, of one rank) in host memory."""

    use: LeaseUse
    group: int
    num_chunks: int
    since: float  # by the sidecar's clock


@dataclass(frozen=True, slots=True)
class AttachedClient:
    """An attached engine's process, or one of its connections.

    *name* identifies the client at its endpoint, for example "process 4711, connection 23". *layout* is None if the
    client has not registered a layout.
    """

    name: str
    since: float  # by the sidecar's clock
    layout: Layout | None
    leases: tuple[Lease, ...] = ()


@dataclass(frozen=True, slots=True)
class ConnectorCounts:
    """Totals of one endpoint since the sidecar's start, mostly counts of blocks (chunks, with LMCache).

    The keys of each mapping become labels of metrics. The set of keys is fixed, so clients cannot create labels.
    """

    kind: str  # such as "lmcache"
    num_asked: int = 0  # looked up
    num_promised: int = 0  # reported as hits, after they were verified and leased in host memory
    num_loaded: int = 0
    num_stored: int = 0
    lost: Mapping[str, int] = field(default_factory=dict)  # chunks that could not be promised or stored, by reason
    operations: Mapping[str, int] = field(default_factory=dict)  # requests by kind
    refused: Mapping[str, int] = field(default_factory=dict)  # requests and connections, by reason
    tokens: TokenBalance = field(default_factory=TokenBalance)  # of the prompts looked up, if the endpoint has them


class Endpoint(Protocol):
    """A socket at which engines attach. It translates their messages into calls of `Layouts`.

    Owned by the sidecar's thread.
    """

    @property
    def file(self) -> int:
        """A file descriptor that is readable when messages may have arrived."""

    @property
    def is_waiting(self) -> bool:
        """True if `tick` must be called often, because engines wait for answers or deadlines are running."""

    def receive(self) -> bool:
        """Process some of the messages that have arrived, and return whether there may be more."""

    def tick(self) -> None:
        """Send the answers that have become ready, and time out requests and clients that are past their deadline."""

    def on_clear(self, layouts: Sequence[Layout]) -> None:
        """Prepare for the eviction of all chunks of these layouts.

        Chunks that engines are storing now must never be found by a lookup. Chunks that were reported to an engine as
        a hit stay leased, because a vLLM engine may crash if it cannot load them.
        """

    def clients(self) -> Sequence[AttachedClient]:
        """Return a snapshot of all attached clients."""

    def counts(self) -> ConnectorCounts:
        """Return a snapshot of all counters."""

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""

    def close(self) -> None:
        """Stop receiving messages, and end all connections."""
