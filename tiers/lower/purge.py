"""Purges: evictions requested by an operator, their scope and their outcome."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Protocol

from kvtier.tiers.naming.tier import Tier


@dataclass(frozen=True, slots=True)
class PurgeOrder:
    """The scope of a purge: all blocks of *tiers*, or those of one *tenant*.

    The disk may hold blocks of other models. On disk, only blocks are purged whose namespace, in hexadecimal, begins
    with *namespace* (None: all blocks). *max_bytes* or *max_blocks* limits how much leaves each tier, oldest first.
    """

    tiers: frozenset[Tier] = frozenset(Tier)
    tenant: bytes | None = None
    namespace: str | None = None
    max_bytes: int | None = None
    max_blocks: int | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether the purge has a limit, so that some blocks may stay."""
        return self.max_bytes is not None or self.max_blocks is not None

    def part(self, part: float) -> "PurgeOrder":
        """Return this order with its limits multiplied by *part* (0 to 1) and rounded up. No limit stays no limit."""
        max_bytes = None if self.max_bytes is None else ceil(self.max_bytes * part)
        max_blocks = None if self.max_blocks is None else ceil(self.max_blocks * part)
        return replace(self, max_bytes=max_bytes, max_blocks=max_blocks)


@dataclass(frozen=True, slots=True)
class Purged:
    """What a purge evicted from one tier.

    *num_bytes* is the size of the blocks in this tier, which on disk may be the compressed size. *num_leased* is how
    many blocks in scope stay because requests, pins or copies lease them. *why_not* is the reason in one line if the
    purge failed, otherwise empty.
    """

    num_blocks: int = 0
    num_bytes: int = 0
    num_leased: int = 0
    why_not: str = ""

    def plus(self, other: "Purged") -> "Purged":
        """Return the sum of this outcome and *other*."""
        return Purged(
            self.num_blocks + other.num_blocks,
            self.num_bytes + other.num_bytes,
            self.num_leased + other.num_leased,
            self.why_not or other.why_not,
        )


class Purge(Protocol):
    """A purge in progress. Owned by the tiers' thread, which runs one part of it between its other work."""

    def parts(self) -> Iterator[bool]:
        """Iterate over one pass through the tiers. Each step evicts a part; it yields whether the next can run at once.

        Another pass also evicts blocks that have come to a tier since.
        """

    @property
    def num_evicted(self) -> int:
        """Number of blocks evicted so far, in all passes."""

    @property
    def is_settled(self) -> bool:
        """Whether no copy is in flight that may bring a block to a tier that was already scanned."""

    def outcome(self) -> Mapping[Tier, Purged]:
        """Return what was evicted from each tier, and what is leased there now."""


class NothingPurged:
    """A purge of tiers that are empty or belong to another process; implements `Purge`."""

    num_evicted = 0
    is_settled = True

    def parts(self) -> Iterator[bool]:
        return iter(())

    def outcome(self) -> Mapping[Tier, Purged]:
        return {}
