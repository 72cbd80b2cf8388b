"""Snapshots of the state and the counters of a sidecar."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from kvtier.engine.observability.records.request_log import LogCounts
from kvtier.engine.stores.reopening_store import StoreStanding
from kvtier.sidecar.endpoint import ConnectorCounts
from kvtier.sidecar.layout import Layout
from kvtier.sidecar.layout_tiers import LayoutTiers
from kvtier.sidecar.layouts import Layouts
from kvtier.sidecar.pins import PinStatistics
from kvtier.sidecar.quarantine import QuarantineStatistics
from kvtier.store.blob_store import StoreStatistics
from kvtier.tiers.device.group_slots import NO_AGES
from kvtier.tiers.histogram import HistogramStatistics
from kvtier.tiers.lower.breaker import BreakerState
from kvtier.tiers.lower.disk_tier import evicted_by_cause
from kvtier.tiers.lower.remote.remote_statistics import RemoteStatistics, remote_of_all
from kvtier.tiers.lower.ssd_life import SsdLifeStatistics
from kvtier.tiers.lower.statistics import DiskStatistics, TierStatistics, TokenBalance, causes_summed
from kvtier.tiers.naming.tier import EvictionCause, Tier
from kvtier.tiers.reuse.what_if import HitRatios
from kvtier.transfer.segment import Segment
from kvtier.transfer.transfer_engine import Route, RouteStatistics, TransferEngine

_WORSE = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)


@dataclass(frozen=True, slots=True)
class LayoutStatistics:
    """State of one layout at one moment: its part of the shared host memory, and its chunks there, of all ranks."""

    layout: Layout
    held_bytes: int
    host: TierStatistics
    num_leased_chunks: int
    num_unsaved: int  # chunks that are only in host memory


@dataclass(frozen=True, slots=True)
class SidecarStatistics:
    """State and counters of a sidecar at one moment."""

    segment_name: str
    segment_bytes: int
    backed_bytes: int
    layouts: tuple[LayoutStatistics, ...]
    tiers: Mapping[Tier, TierStatistics]  # of all layouts together
    disk: DiskStatistics | None  # merged over all layouts; None before the first layout, and without a disk
    remote: RemoteStatistics | None  # merged over all layouts
    routes: Mapping[Route, RouteStatistics]
    store: StoreStanding | None
    endpoints: tuple[ConnectorCounts, ...]
    pins: PinStatistics
    what_if: HitRatios  # estimates for smaller and larger tiers, from the prompts that endpoints receive
    quarantine: QuarantineStatistics
    request_log: LogCounts | None = None  # None without a request log

    @property
    def tokens(self) -> TokenBalance:
        """Tokens of all prompts that were looked up: how many came from each tier, and how many were recomputed."""
        return reduce(TokenBalance.plus, (endpoint.tokens for endpoint in self.endpoints), TokenBalance())


def statistics_of(
    layouts: Layouts,
    segment: Segment,
    transfers: TransferEngine,
    store: tuple[StoreStanding, StoreStatistics] | None,
    endpoints: tuple[ConnectorCounts, ...],
    pins: PinStatistics,
    life: SsdLifeStatistics | None = None,
    request_log: LogCounts | None = None,
) -> SidecarStatistics:
    """Return the sidecar's current statistics, gathered from its parts. *store* is None without a disk."""
    found, disks, disk_tiers, remotes = [], [], [], []
    for tiers in layouts:
        lower = tiers.tiers.status.statistics()
        progress = tiers.tiers.status.spill_progress()
        found.append(
            LayoutStatistics(
                tiers.layout,
                tiers.held_bytes,
                _own(lower.tiers[Tier.HOST], tiers),
                tiers.num_leased,
                progress.num_left,
            )
        )
        if lower.disk is not None:
            disks.append(lower.disk)
            disk_tiers.append(lower.tiers[Tier.DISK])
        if lower.remote is not None:
            remotes.append(lower.remote)
    all_tiers = {Tier.HOST: replace(_sum(each.host for each in found), capacity_bytes=segment.num_bytes)}
    if store is not None:
        all_tiers[Tier.DISK] = _disk_tier(store[1], disk_tiers)
    if (remote := remote_of_all(remotes)) is not None:
        all_tiers[Tier.REMOTE] = TierStatistics(remote.known_blocks, corrupt=remote.faults)
    return SidecarStatistics(
        segment.name,
        segment.num_bytes,
        segment.backed_bytes,
        tuple(found),
        all_tiers,
        None if store is None or not disks else disk_of_all(store[1], disks, life),
        remote,
        transfers.statistics(),
        None if store is None else store[0],
        endpoints,
        pins,
        layouts.what_if.hit_ratios(all_tiers),
        layouts.quarantine.statistics(),
        request_log,
    )


def disk_of_all(
    store: StoreStatistics, disks: Sequence[DiskStatistics], life: SsdLifeStatistics | None = None
) -> DiskStatistics:
    """Return the statistics of the disk that several layouts share.

    Sizes come from the store, and *life* is the wear of the SSD. Counters are sums over the layouts. The state of a
    circuit breaker is the worst one of all layouts.
    """
    budgets = [disk.budget_left_bytes for disk in disks if disk.budget_left_bytes is not None]
    sides = disks[0].breakers.keys()
    return DiskStatistics(
        file_bytes=store.file_bytes,
        written_bytes_total=store.written_bytes_total,
        known_blocks=sum(disk.known_blocks for disk in disks),
        is_open=all(disk.is_open for disk in disks),
        is_indexed=all(disk.is_indexed for disk in disks),
        breakers={side: max((disk.breakers[side] for disk in disks), key=_WORSE.index) for side in sides},
        num_opened={side: sum(disk.num_opened[side] for disk in disks) for side in sides},
        why_failed={side: _why_failed(disks, side) for side in sides},
        budget_left_bytes=min(budgets, default=None),
        life=life,
        tenants=dict(store.tenants),
    )


def _why_failed(disks: Sequence[DiskStatistics], side: str) -> str:
    # If several layouts have an error, return the error of the one whose circuit breaker is in the worst state.
    failed = [disk for disk in disks if disk.why_failed[side]]
    worst = max(failed, key=lambda disk: _WORSE.index(disk.breakers[side]), default=None)
    return "" if worst is None else worst.why_failed[side]


def _disk_tier(store: StoreStatistics, disk_tiers: Sequence[TierStatistics]) -> TierStatistics:
    """Return the disk tier's statistics: sizes and evictions from the store, corrupt blocks from the layouts.

    Sizes do not come from the layouts, because each layout's figures are as old as its last write to the shared store.
    """
    return TierStatistics(
        num_blocks=store.num_records,
        num_bytes=store.stored_bytes,
        capacity_bytes=store.capacity_bytes,
        evicted=evicted_by_cause(store, sum(tier.evicted.get(EvictionCause.CLEARED, 0) for tier in disk_tiers)),
        corrupt=_corrupt(disk_tiers),
        eviction_ages=_ages(disk_tiers),
        num_states=sum(tier.num_states for tier in disk_tiers),
    )


def _own(host: TierStatistics, tiers: LayoutTiers) -> TierStatistics:
    """Return *host* with the capacity and the leases of only that part of host memory that the layout has now."""
    return replace(host, capacity_bytes=tiers.held_bytes, num_leased=tiers.num_leased)


def _sum(tiers: Iterable[TierStatistics]) -> TierStatistics:
    each = list(tiers)
    return TierStatistics(
        num_blocks=sum(one.num_blocks for one in each),
        num_bytes=sum(one.num_bytes for one in each),
        capacity_bytes=sum(one.capacity_bytes for one in each),
        evicted=causes_summed(one.evicted for one in each),
        dropped_spills=sum(one.dropped_spills for one in each),
        corrupt=_corrupt(each),
        num_leased=sum(one.num_leased for one in each),
        num_dirty=sum(one.num_dirty for one in each),
        eviction_ages=_ages(each),
        num_states=sum(one.num_states for one in each),
    )


def _ages(tiers: Iterable[TierStatistics]) -> HistogramStatistics:
    return reduce(HistogramStatistics.plus, (one.eviction_ages for one in tiers), NO_AGES)


def _corrupt(tiers: Iterable[TierStatistics]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for one in tiers:
        counts.update(one.corrupt)
    return dict(counts)
