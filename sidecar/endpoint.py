"""Endpoint: a place where engines attach, and what it tells of those that are attached."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from kvtier.sidecar.layout import Layout
from kvtier.tiers.lower.statistics import TokenBalance


class LeaseUse(StrEnum):
    """Why a client's chunks stay where they are."""

    PROMISED = "promised"  # the client was told that it can load them
    READ = "read"  # the client copies them out now
    WRITTEN = "written"  # the client copies them in now; they are found by no request yet
    PINNED = "pinned"  # no client has them: an operator wants them to stay
    QUARANTINED = "quarantined"  # the client's session has ended, and a process of it may still copy


@dataclass(frozen=True, slots=True)
class Lease:
    """*num_chunks* blocks of one group, such as a rank's chunks, that a client has the sidecar keep in host memory."""

    use: LeaseUse
    group: int
    num_chunks: int
    since: float  # by the sidecar's clock


@dataclass(frozen=True, slots=True)
class AttachedClient:
    """An engine's process, or one connection of it, that is attached. *name* is what its endpoint tells clients apart by,
    such as an instance's number and its address; *layout* is None for a client that has registered none."""

    name: str
    since: float  # by the sidecar's clock
    layout: Layout | None
    leases: tuple[Lease, ...] = ()


@dataclass(frozen=True, slots=True)
class ConnectorCounts:
    """Totals of one endpoint since the start, in blocks of one group. The keys of *lost*, *operations* and *refused* are
    the endpoint's own words, which no client can add to."""

    kind: str  # such as "lmcache"
    num_asked: int = 0  # that lookups asked for
    num_promised: int = 0  # of them found, verified and kept in host memory
    num_loaded: int = 0
    num_stored: int = 0
    lost: Mapping[str, int] = field(default_factory=dict)  # why a chunk was not promised or not stored
    operations: Mapping[str, int] = field(default_factory=dict)  # requests of each kind
    refused: Mapping[str, int] = field(default_factory=dict)  # requests and connections, by why
    tokens: TokenBalance = field(default_factory=TokenBalance)  # of the prompts that were looked up, if it is told them


class Endpoint(Protocol):
    """A place where engines attach: it turns frames into calls of the layouts. Owned by the sidecar's thread."""

    @property
    def file(self) -> int:
        """A descriptor that is readable when frames may have come."""

    @property
    def is_waiting(self) -> bool:
        """Whether engines wait for answers that are not ready, or deadlines run."""

    def receive(self) -> bool:
        """Take in some of the frames that have come and answer what can be answered; whether there may be more."""

    def tick(self) -> None:
        """Answer what has become ready, and end what is past its deadline."""

    def on_clear(self, layouts: Sequence[Layout]) -> None:
        """Every chunk of these layouts is about to be forgotten: what engines have begun to store of them is never to
        be found either. What they were promised stays where it is, as the end of a promise ends vLLM's engine."""

    def clients(self) -> Sequence[AttachedClient]:
        """All that are attached, by value."""

    def counts(self) -> ConnectorCounts:
        """Everything counted, by value."""

    def check(self) -> None:
        """Raise AssertionError if any two books disagree."""

    def close(self) -> None:
        """Take no more frames."""
