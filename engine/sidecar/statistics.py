"""What a sidecar has and has done, by value."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvtier.engine.reopening_store import StoreStanding
from kvtier.engine.sidecar.layout import Layout
from kvtier.engine.sidecar.layouts import Layouts
from kvtier.tiers.lower.statistics import DiskStatistics, TierStatistics
from kvtier.tiers.naming.tier import Tier
from kvtier.transfer.segment import Segment
from kvtier.transfer.transfer_engine import Route, RouteStatistics, TransferEngine


@dataclass(frozen=True, slots=True)
class LayoutStatistics:
    """One layout now: bytes of the segment that are its own, chunks in host memory by all ranks and their bytes."""

    layout: Layout
    held_bytes: int
    host: TierStatistics
    num_leased_chunks: int
    num_unsaved: int  # chunks that are in host memory only


@dataclass(frozen=True, slots=True)
class SidecarStatistics:
    """A sidecar at one moment."""

    segment_name: str
    segment_bytes: int
    backed_bytes: int
    layouts: tuple[LayoutStatistics, ...]
    tiers: Mapping[Tier, TierStatistics]  # of all layouts together
    disk: DiskStatistics | None  # of the layout that was used last; None before any, and without a disk
    routes: Mapping[Route, RouteStatistics]
    store: StoreStanding | None


def statistics_of(
    layouts: Layouts, segment: Segment, transfers: TransferEngine, standing: StoreStanding | None
) -> SidecarStatistics:
    """The statistics of these parts now."""
    found, disks, disk_tiers = [], [], []
    for tiers in layouts:
        lower = tiers.tiers.statistics()
        progress = tiers.tiers.spill_progress()
        found.append(
            LayoutStatistics(
                tiers.layout,
                tiers.held_bytes,
                _own(lower.tiers[Tier.HOST], tiers.held_bytes),
                tiers.num_leased,
                progress.num_left,
            )
        )
        if lower.disk is not None:
            disks.append(lower.disk)
            disk_tiers.append(lower.tiers[Tier.DISK])
    all_tiers = {Tier.HOST: _sum(each.host for each in found)}
    if disk_tiers:  # all have one store: only what each has met itself is to be summed
        corrupt = _corrupt(disk_tiers)
        last = disk_tiers[-1]
        all_tiers[Tier.DISK] = TierStatistics(
            last.num_blocks, last.num_bytes, last.capacity_bytes, last.num_evicted, last.dropped_spills, corrupt
        )
    return SidecarStatistics(
        segment.name,
        segment.num_bytes,
        segment.backed_bytes,
        tuple(found),
        all_tiers,
        disks[-1] if disks else None,
        transfers.statistics(),
        standing,
    )


def _own(host: TierStatistics, held_bytes: int) -> TierStatistics:
    """The same with the capacity that the layout has, in place of all that it could get."""
    return replace(host, capacity_bytes=held_bytes)


def _sum(tiers: Iterable[TierStatistics]) -> TierStatistics:
    each = list(tiers)
    return TierStatistics(
        num_blocks=sum(one.num_blocks for one in each),
        num_bytes=sum(one.num_bytes for one in each),
        capacity_bytes=sum(one.capacity_bytes for one in each),
        num_evicted=sum(one.num_evicted for one in each),
        dropped_spills=sum(one.dropped_spills for one in each),
        corrupt=_corrupt(each),
    )


def _corrupt(tiers: Iterable[TierStatistics]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for one in tiers:
        counts.update(one.corrupt)
    return dict(counts)
