"""Statistics of the tiers, as immutable objects that any thread may keep."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from types import MappingProxyType

from kvtier.tiers.device.group_slots import NO_AGES, GroupSlots
from kvtier.tiers.histogram import HistogramStatistics
from kvtier.tiers.lower.admission import AdmissionStatistics
from kvtier.tiers.lower.breaker import BreakerState
from kvtier.tiers.lower.remote.remote_statistics import RemoteStatistics
from kvtier.tiers.lower.ssd_life import SsdLifeStatistics
from kvtier.tiers.naming.tier import EvictionCause, Reason, Tier
from kvtier.transfer.transfer_engine import Route, RouteStatistics


@dataclass(frozen=True, slots=True, repr=False)
class TokenBalance:
    """The number of a prompt's tokens that came from each tier, and the number that were recomputed.

    Together they are the length of the prompt.
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    remote: int = 0
    recomputed: int = 0
    reasons: Mapping[Reason, int] = field(default_factory=dict)  # adds up to `recomputed`
    copied: int = 0  # part of `device`: copied from a block that shares only its first tokens with the prompt

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return self.device + self.host + self.disk + self.remote + self.recomputed

    def __str__(self) -> str:
        """Return the counts in words, such as "2,176 device, 14 recomputed (14 never_seen)"."""
        tiers = {"device": self.device, "host": self.host, "disk": self.disk, "remote": self.remote}
        parts = [f"{num_tokens:,} {tier}" for tier, num_tokens in tiers.items() if num_tokens]
        if self.recomputed or not parts:
            reasons = ", ".join(f"{num_tokens:,} {reason}" for reason, num_tokens in self.reasons.items() if num_tokens)
            parts.append(f"{self.recomputed:,} recomputed" + (f" ({reasons})" if reasons else ""))
        return ", ".join(parts)

    def __repr__(self) -> str:
        return f"<TokenBalance {self}>"

    def plus(self, other: "TokenBalance") -> "TokenBalance":
        """Return the sum of this balance and *other*."""
        reasons = dict(self.reasons)
        for reason, num_tokens in other.reasons.items():
            reasons[reason] = reasons.get(reason, 0) + num_tokens
        return TokenBalance(
            self.device + other.device,
            self.host + other.host,
            self.disk + other.disk,
            self.remote + other.remote,
            self.recomputed + other.recomputed,
            reasons,
            self.copied + other.copied,
        )


NO_TOKENS = TokenBalance()


@dataclass(frozen=True, slots=True)
class PrefixStatistics:
    """Tokens that requests looked up in the cache (queries), and tokens that they found there (hits).

    A request that is admitted again after a preemption counts in the *preempted* fields.
    """

    num_requests: int = 0
    queries: int = 0  # tokens
    hits: int = 0  # tokens
    num_preempted: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    recent_hit_ratio: float = 0.0  # of the last requests, see `HitRatio`


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """Statistics of one tier: its present content, and counts of evicted and corrupt blocks since the start."""

    num_blocks: int = 0
    num_bytes: int = 0
    capacity_bytes: int = 0
    evicted: Mapping[EvictionCause, int] = field(default_factory=dict)
    dropped_spills: int = 0  # blocks evicted before a lower tier had a copy
    corrupt: Mapping[str, int] = field(default_factory=dict)  # number of blocks, by the value of the `Fault`
    num_leased: int = 0  # slots that cannot be evicted now, because requests, copies or clients use them
    num_dirty: int = 0  # blocks that have yet to be copied to a lower tier
    leased_bytes: int = 0  # bytes of the leased slots
    eviction_ages: HistogramStatistics = NO_AGES  # seconds since the last use of evicted blocks, from a sample
    num_states: int = 0  # recurrent states; part of *num_blocks*

    @property
    def num_evicted(self) -> int:
        """Number of blocks evicted for any cause."""
        return sum(self.evicted.values())


def causes_summed(each: Iterable[Mapping[EvictionCause, int]]) -> dict[EvictionCause, int]:
    """Add up several counts of evictions by cause."""
    total: Counter[EvictionCause] = Counter()
    for evicted in each:
        total.update(evicted)
    return dict(total)


def slot_statistics(
    groups: Sequence[GroupSlots],
    block_bytes: Sequence[int],
    of_states: Collection[int],
    corrupt: Mapping[str, int] = MappingProxyType({}),
) -> TierStatistics:
    """Return the statistics of the device or of host memory.

    *groups* and *block_bytes* are by attention group. *of_states* has the indices of the groups that keep recurrent
    states.
    """
    both = [(slots.pool, num_bytes) for slots, num_bytes in zip(groups, block_bytes, strict=True)]
    return TierStatistics(
        num_blocks=sum(pool.num_named for pool, _ in both),
        num_bytes=sum(pool.num_named * num_bytes for pool, num_bytes in both),
        capacity_bytes=sum(pool.num_slots * num_bytes for pool, num_bytes in both),
        evicted=causes_summed(slots.evicted for slots in groups),
        dropped_spills=sum(slots.dropped_spills for slots in groups),
        corrupt=dict(corrupt),
        num_leased=sum(pool.num_leased_slots for pool, _ in both),
        num_dirty=sum(len(slots.dirty) for slots in groups),
        leased_bytes=sum(pool.num_leased_slots * num_bytes for pool, num_bytes in both),
        eviction_ages=reduce(HistogramStatistics.plus, (slots.ages.statistics() for slots in groups), NO_AGES),
        num_states=sum(groups[group_id].pool.num_named for group_id in of_states),
    )


@dataclass(frozen=True, slots=True)
class DiskStatistics:
    """The statistics that exist only for the disk, at one moment."""

    file_bytes: int  # bytes that the store's files take on the medium
    written_bytes_total: int  # since the store was created
    known_blocks: int  # blocks in the index
    is_open: bool  # whether there is a store to read from and write to
    is_indexed: bool  # whether the index of the blocks found at opening is complete
    breakers: Mapping[str, BreakerState]  # of "read" and "write"
    num_opened: Mapping[str, int]  # how often each breaker has opened
    why_failed: Mapping[str, str]  # last error of "read" and of "write", for display; empty if there was none
    budget_left_bytes: int | None  # bytes that may still be written; None: no limit
    life: SsdLifeStatistics | None
    tenants: Mapping[bytes, int]  # bytes on disk, by tenant


@dataclass(frozen=True, slots=True)
class PlanStatistics:
    """The decisions of `LoadPlanner` how much of a hit to load, and the prefill speed on which they are based."""

    num_plans: Mapping[str, int]  # number of hits by decision: to load "all", "split", "part" or "nothing"
    prefill_tokens_per_s: float | None  # over the first 1,000 tokens of a prompt; None before it is known


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Statistics of a `TieredCache` at one moment."""

    tiers: Mapping[Tier, TierStatistics]
    routes: Mapping[Route, RouteStatistics]
    clean_ahead_blocks: int  # how many device blocks to be evicted next are kept clean (copied to a lower tier)
    disk: DiskStatistics | None = None
    remote: RemoteStatistics | None = None
    admission: AdmissionStatistics | None = None  # to the disk
    host_tenants: Mapping[bytes, int] = field(default_factory=dict)  # bytes of host memory of each tenant with a quota
