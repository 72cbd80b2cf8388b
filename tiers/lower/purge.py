"""Purges, which are evictions requested by an operator: their scope, progress and outcome."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Protocol

from kvtier.tiers.naming.tier import Tier


@dataclass(frozen=True, slots=True)
class PurgeOrder:
    """The scope of a purge: all blocks of *tiers*, or only those of one *tenant*.

    The disk may hold blocks of several models, each in a namespace. *namespace* is the beginning of a namespace in
    hexadecimal; if it is given, only blocks of matching namespaces are evicted from the disk. *max_bytes* or
    *max_blocks* limits how much is evicted from each tier. The oldest blocks are evicted first.
    """

    tiers: frozenset[Tier] = frozenset(Tier)
    tenant: bytes | None = None
    namespace: str | None = None
    max_bytes: int | None = None
    max_blocks: int | None = None

    @property
    def is_bounded(self) -> bool:
        """True if the purge has a limit, so that some blocks may stay."""
        return self.max_bytes is not None or self.max_blocks is not None

    def part(self, part: float) -> "PurgeOrder":
        """Return the same purge order with *max_bytes* and *max_blocks* multiplied by *part* (0 to 1), rounded up."""
        max_bytes = None if self.max_bytes is None else ceil(self.max_bytes * part)
        max_blocks = None if self.max_blocks is None else ceil(self.max_blocks * part)
        return replace(self, max_bytes=max_bytes, max_blocks=max_blocks)


@dataclass(frozen=True, slots=True)
class Purged:
    """The outcome of a purge in one tier.

    *num_bytes* is the size of the evicted blocks in this tier. On disk, it may be the compressed size. *num_leased* is
    the number of blocks that were not evicted because requests, pins or copies lease them. *why_not* is the reason in
    one line if the purge failed, otherwise empty.
    """

    num_blocks: int = 0
    num_bytes: int = 0
    num_leased: int = 0
    why_not: str = ""

    def plus(self, other: "Purged") -> "Purged":
        """Return this outcome and *other* added up."""
        return Purged(
            self.num_blocks + other.num_blocks,
            self.num_bytes + other.num_bytes,
            self.num_leased + other.num_leased,
            self.why_not or other.why_not,
        )


class Purge(Protocol):
    """A purge in progress, which evicts blocks part by part.

    Owned by the tiers' thread, which runs one part at a time between its other work.
    """

    def parts(self) -> Iterator[bool]:
        """Go through the tiers once, and evict the selected blocks part by part.

        Each step evicts one part, and yields whether the next part can run at once. A further call also evicts blocks
        that have been added to a tier since.
        """

    @property
    def num_evicted(self) -> int:
        """Number of blocks evicted so far, by all calls of `parts`."""

    @property
    def is_settled(self) -> bool:
        """False while a copy in flight may still add a block to a tier that was already purged."""

    def outcome(self) -> Mapping[Tier, Purged]:
        """Return for each tier what was evicted, and how many blocks are leased now."""


class NothingPurged:
    """A purge that evicts nothing, because the tiers are empty or in another process; implements `Purge`."""

    num_evicted = 0
    is_settled = True

    def parts(self) -> Iterator[bool]:
        return iter(())

    def outcome(self) -> Mapping[Tier, Purged]:
        return {}
