"""Purge: an eviction that an operator has asked for, in parts; what it is to evict, and what it has."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Protocol

from kvtier.tiers.naming.tier import Tier


@dataclass(frozen=True, slots=True)
class PurgeOrder:
    """What is to leave *tiers*: all blocks, or those of one *tenant*. On disk, which may have blocks of other models,
    *namespace* is the beginning of what is meant, in hexadecimal; None: all. With *max_bytes* or *max_blocks* only so
    much of each tier, the oldest first."""

    tiers: frozenset[Tier] = frozenset(Tier)
    tenant: bytes | None = None
    namespace: str | None = None
    max_bytes: int | None = None
    max_blocks: int | None = None

    @property
    def is_bounded(self) -> bool:
        """Whether some may stay."""
        return self.max_bytes is not None or self.max_blocks is not None

    def part(self, part: float) -> "PurgeOrder":
        """The same for that part of what may be had, rounded up; all if all is meant."""
        max_bytes = None if self.max_bytes is None else ceil(self.max_bytes * part)
        max_blocks = None if self.max_blocks is None else ceil(self.max_blocks * part)
        return replace(self, max_bytes=max_bytes, max_blocks=max_blocks)


@dataclass(frozen=True, slots=True)
class Purged:
    """What has left one tier. *num_bytes* of the disk are as stored, of the others as in memory. *num_leased* blocks
    were meant too and stay, as requests, pins or copies lease them. *why_not*: one line, if it could not be done."""

    num_blocks: int = 0
    num_bytes: int = 0
    num_leased: int = 0
    why_not: str = ""

    def plus(self, other: "Purged") -> "Purged":
        """Both together."""
        return Purged(
            self.num_blocks + other.num_blocks,
            self.num_bytes + other.num_bytes,
            self.num_leased + other.num_leased,
            self.why_not or other.why_not,
        )


class Purge(Protocol):
    """One eviction under way. Owned by the tiers' thread, which takes a part of it between two of its other deeds."""

    def parts(self) -> Iterator[bool]:
        """One look through the tiers, a part at each step, which says whether the next part can be had at once. It may
        be gone through again, for what has come since."""

    @property
    def num_evicted(self) -> int:
        """Blocks that have left so far, in all looks."""

    @property
    def is_settled(self) -> bool:
        """Whether no copy is under way that may bring a block to a tier that was looked through already."""

    def outcome(self) -> Mapping[Tier, Purged]:
        """What has left each tier, and what is leased there now."""


class NothingPurged:
    """See `Purge`: of tiers that have nothing, or are another process's."""

    num_evicted = 0
    is_settled = True

    def parts(self) -> Iterator[bool]:
        return iter(())

    def outcome(self) -> Mapping[Tier, Purged]:
        return {}
