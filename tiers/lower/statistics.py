"""Statistics of the tiers, as frozen values that any thread may keep."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from types import MappingProxyType

from kvtier.tiers.device.group_slots import NO_AGES, GroupSlots
from kvtier.tiers.histogram import HistogramStatistics
from kvtier.tiers.lower.admission import AdmissionStatistics
from kvtier.tiers.lower.breaker import BreakerState
from kvtier.tiers.lower.remote.remote_statistics import RemoteStatistics
from kvtier.tiers.lower.ssd_life import SsdLifeStatistics
from kvtier.tiers.naming.eviction import EvictionCause
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.transfer.transfer_engine import Route, RouteStatistics


@dataclass(frozen=True, slots=True)
class TokenBalance:
    """Where a prompt's tokens came from. `device + host + disk + remote + recomputed` is the prompt, always."""

    device: int = 0
    host: int = 0
    disk: int = 0
    remote: int = 0
    recomputed: int = 0
    reasons: Mapping[Reason, int] = field(default_factory=dict)  # adds up to `recomputed`
    copied: int = 0  # of the device's: out of a block that shares only its first tokens with the prompt

    @property
    def num_tokens(self) -> int:
        """The prompt's length."""
        return self.device + self.host + self.disk + self.remote + self.recomputed

    def plus(self, other: "TokenBalance") -> "TokenBalance":
        """The sum of this balance and another."""
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
    """Tokens looked up and found, of requests that read the cache; those of preempted requests are counted apart."""

    num_requests: int = 0
    queries: int = 0
    hits: int = 0
    num_preempted: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0
    recent_hit_ratio: float = 0.0  # of the last requests, see `HitRatio`


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """One tier now (blocks, bytes) and since the start (evictions, dropped spills, corrupt blocks by cause)."""

    num_blocks: int = 0
    num_bytes: int = 0
    capacity_bytes: int = 0
    evicted: Mapping[EvictionCause, int] = field(default_factory=dict)
    dropped_spills: int = 0  # evicted although no lower tier had a copy yet
    corrupt: Mapping[str, int] = field(default_factory=dict)
    num_leased: int = 0  # slots that are not evicted now: requests, copies or clients use them
    num_dirty: int = 0  # blocks without a copy in a lower tier
    leased_bytes: int = 0  # of these slots
    eviction_ages: HistogramStatistics = NO_AGES  # seconds for which evicted blocks had not been used, by a sample

    @property
    def num_evicted(self) -> int:
        """Blocks evicted, for whatever cause."""
        return sum(self.evicted.values())


def causes_summed(each: Iterable[Mapping[EvictionCause, int]]) -> dict[EvictionCause, int]:
    """The sums of evictions by cause."""
    total: Counter[EvictionCause] = Counter()
    for evicted in each:
        total.update(evicted)
    return dict(total)


def slot_statistics(
    groups: Sequence[GroupSlots], block_bytes: Sequence[int], corrupt: Mapping[str, int] = MappingProxyType({})
) -> TierStatistics:
    """The statistics of the device or of host memory; *block_bytes* by group."""
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
    )


@dataclass(frozen=True, slots=True)
class DiskStatistics:
    """The statistics that only a disk has, at one moment."""

    file_bytes: int  # that the store's files take on the medium
    written_bytes_total: int  # since the store was made
    known_blocks: int
    is_open: bool  # whether there is a store to read from and write to
    is_indexed: bool  # whether the blocks that were there when it was opened have all been found
    breakers: Mapping[str, BreakerState]  # of "read" and "write"
    num_opened: Mapping[str, int]
    why_failed: Mapping[str, str]  # the last error of "read" and "write", for people; empty if there was none
    budget_left_bytes: int | None  # of writes; None: no limit
    life: SsdLifeStatistics | None
    tenants: Mapping[bytes, int]  # bytes on disk of each


@dataclass(frozen=True, slots=True)
class PlanStatistics:
    """How many hits in colder tiers were loaded whole, in part or not at all, and the speed that the choice goes by."""

    num_plans: Mapping[str, int]
    prefill_tokens_per_s: float | None  # of the first 1,000 tokens of a prompt; None before it is known


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """A `TieredCache` at one moment."""

    tiers: Mapping[Tier, TierStatistics]
    routes: Mapping[Route, RouteStatistics]
    promotions_waiting: int
    clean_ahead_blocks: int
    disk: DiskStatistics | None = None
    remote: RemoteStatistics | None = None
    admission: AdmissionStatistics | None = None  # to the disk
    host_tenants: Mapping[bytes, int] = field(default_factory=dict)  # bytes of each with a quota
