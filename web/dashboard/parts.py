"""The data that the dashboards of both engines and sidecars show, taken from the same statistics as `/metrics`.

The history has a column for each number from the functions `..._totals` (counts since the start) and `..._levels`
(current values). The functions `..._facts` return other data as JSON values.
"""

import math
import socket
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version

from kvtier.engine.observability.memory import MemoryStatistics
from kvtier.engine.observability.metrics.http import HttpStatistics
from kvtier.engine.observability.metrics.tiers import WITH_SLOTS
from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.engine.stores.reopening_store import StoreStanding
from kvtier.tiers.histogram import HistogramStatistics
from kvtier.tiers.lower.remote.remote_statistics import RemoteStatistics
from kvtier.tiers.lower.statistics import DiskStatistics, TierStatistics, TokenBalance
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.tiers.reuse.what_if import SIZES, HitRatios
from kvtier.transfer.transfer_engine import RouteStatistics
from kvtier.web.dashboard.recent_values import RecentValues, quantile

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
SOURCES = (*(tier.value for tier in Tier), "recomputed")
AGES_WINDOW_S = 600.0
NUM_SLOWEST = 10

Numbers = dict[str, float]


def token_columns() -> tuple[str, ...]:
    """Return the names of the columns that `token_totals` returns."""
    return (*(f"tokens.{source}" for source in SOURCES), *(f"reason.{reason}" for reason in Reason))


def token_totals(tokens: TokenBalance) -> Numbers:
    """Return the numbers of prompt tokens loaded from each tier, and of recomputed tokens by reason."""
    totals: Numbers = {f"tokens.{source}": getattr(tokens, source) for source in SOURCES}
    return totals | {f"reason.{reason}": tokens.reasons.get(reason, 0) for reason in Reason}


def tier_columns(tier: Tier) -> tuple[str, ...]:
    """Return the tier's columns in the dashboard's history: those of `tier_totals`, `tier_levels`, `RecentAges`."""
    names = ("evicted", "dropped", "corrupt", "bytes", "capacity", "blocks", "states", "leased", "dirty", "age")
    return tuple(f"tier.{tier}.{name}" for name in names)


def tier_totals(tier: Tier, statistics: TierStatistics) -> Numbers:
    """Return the numbers of the tier's evicted, dropped (evicted without a copy) and damaged blocks since the start."""
    return {
        f"tier.{tier}.evicted": statistics.num_evicted,
        f"tier.{tier}.dropped": statistics.dropped_spills,
        f"tier.{tier}.corrupt": sum(statistics.corrupt.values()),
    }


def tier_levels(tier: Tier, statistics: TierStatistics) -> Numbers:
    """Return the current contents of the tier, in blocks, recurrent states and bytes."""
    levels: Numbers = {f"tier.{tier}.blocks": statistics.num_blocks, f"tier.{tier}.states": statistics.num_states}
    if tier is not Tier.REMOTE:  # kvtier neither knows nor limits the size of the remote tier
        levels |= {f"tier.{tier}.bytes": statistics.num_bytes, f"tier.{tier}.capacity": statistics.capacity_bytes}
    if tier in WITH_SLOTS:
        levels |= {f"tier.{tier}.leased": statistics.num_leased, f"tier.{tier}.dirty": statistics.num_dirty}
    return levels


class RecentAges:
    """The median age of blocks at their eviction, for each tier, over the last ten minutes."""

    def __init__(self) -> None:
        self._recent = {tier: RecentValues(AGES_WINDOW_S) for tier in Tier}

    def levels(self, monotonic_s: float, tiers: Mapping[Tier, TierStatistics]) -> Numbers:
        """Return for each tier the median seconds from a block's last use to its eviction, over the last ten minutes.

        A tier that has evicted no blocks in that time is left out.
        """
        ages = {
            tier: quantile(self._recent[tier].since(monotonic_s, found.eviction_ages), 0.5)
            for tier, found in tiers.items()
        }
        return {f"tier.{tier}.age": age for tier, age in ages.items() if age is not None}


class RecentQuantiles:
    """Quantiles of the durations of the last *window_s* seconds, as columns whose names begin with *name*."""

    def __init__(self, name: str, window_s: float) -> None:
        self._name = name
        self._recent = RecentValues(window_s)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that `levels` returns."""
        return tuple(f"{self._name}.{share}" for share in QUANTILES)

    def levels(self, monotonic_s: float, durations: HistogramStatistics) -> Numbers:
        """Return the quantiles in seconds, or nothing if there were no durations. *durations* has all until now."""
        recent = self._recent.since(monotonic_s, durations)
        found = {name: quantile(recent, share) for name, share in QUANTILES.items()}
        return {f"{self._name}.{name}": value for name, value in found.items() if value is not None}


def memory_columns() -> tuple[str, ...]:
    """Return the names of the columns that `memory_levels` returns."""
    return ("memory.resident", "memory.host_tier", "memory.device", "memory.device_total")


def memory_levels(memory: MemoryStatistics, host_tier_bytes: int) -> Numbers:
    """Return the memory in use: of the process, of its host tier (*host_tier_bytes*), and of the CUDA device."""
    levels = {
        "memory.resident": memory.resident_bytes,
        "memory.host_tier": host_tier_bytes,
        "memory.device": memory.device_used_bytes,
        "memory.device_total": memory.device_total_bytes,
    }
    return {name: value for name, value in levels.items() if value is not None}


def http_columns() -> tuple[str, ...]:
    """Return the names of the columns that `http_totals` returns."""
    return ("http.requests", "http.4xx", "http.429", "http.5xx")


def http_totals(http: HttpStatistics) -> Numbers:
    """Return the numbers of HTTP requests since the start, and of those that were answered with an error."""
    return {
        "http.requests": http.num_requests,
        "http.4xx": http.num_4xx,
        "http.429": http.num_429,
        "http.5xx": http.num_5xx,
    }


def process_facts() -> dict[str, object]:
    """Return constant facts about this process: its version, its host and its start."""
    return {"version": version("kvtier"), "host": socket.gethostname(), "started_at": round(time.time(), 3)}


def lane_columns(lane: str) -> tuple[str, ...]:
    """Return the columns in the dashboard's history for *lane*, a queue of transfers such as `host_to_device`."""
    return tuple(f"lane.{lane}.{name}" for name in ("bytes", "seconds", "failed", "pending", "pending_bytes"))


def lane_totals(lane: str, statistics: RouteStatistics) -> Numbers:
    """Return the bytes, seconds and failures of the transfers finished since the start on *lane*, a transfer queue."""
    return {
        f"lane.{lane}.bytes": statistics.num_bytes,
        f"lane.{lane}.seconds": statistics.seconds,
        f"lane.{lane}.failed": statistics.num_failed,
    }


def lane_levels(lane: str, statistics: RouteStatistics) -> Numbers:
    """Return the number and bytes of transfers that are queued or running on *lane*, such as `host_to_device`."""
    return {f"lane.{lane}.pending": statistics.num_pending, f"lane.{lane}.pending_bytes": statistics.pending_bytes}


def what_if_columns(tiers: Iterable[Tier]) -> tuple[str, ...]:
    """Return the dashboard history's columns for the hit ratios that *tiers* would have with other sizes (`SIZES`)."""
    return tuple(f"what_if.{tier}.{size:g}" for tier in tiers for size in SIZES)


def what_if_levels(ratios: HitRatios) -> Numbers:
    """Return the estimated hit ratio of each tier and all faster tiers together, for several sizes of the tier."""
    return {f"what_if.{tier}.{size:g}": ratio for tier, each in ratios.items() for size, ratio in each.items()}


def evicted_facts(tiers: Mapping[Tier, TierStatistics]) -> list[dict[str, object]]:
    """Return the numbers of evicted blocks by tier and cause."""
    return [
        {"tier": tier.value, "cause": cause, "blocks": number}
        for tier, found in tiers.items()
        for cause, number in found.evicted.items()
        if number
    ]


def corrupt_facts(tiers: Mapping[Tier, TierStatistics]) -> list[dict[str, object]]:
    """Return the numbers of damaged blocks by tier and cause."""
    return [
        {"tier": tier.value, "cause": cause, "blocks": number}
        for tier, found in tiers.items()
        for cause, number in found.corrupt.items()
        if number
    ]


def _breaker_facts(store: DiskStatistics | RemoteStatistics) -> list[dict[str, object]]:
    return [
        {"side": side, "state": state, "opened": store.num_opened[side], "why": store.why_failed[side]}
        for side, state in store.breakers.items()
    ]


def disk_facts(disk: DiskStatistics) -> dict[str, object]:
    """Return data that only the disk tier has, such as its write budget."""
    life = None
    if disk.life is not None:
        years = disk.life.years_left
        life = {"used": disk.life.used, "years_left": years if math.isfinite(years) else None}
    return {
        "is_indexed": disk.is_indexed,
        "known_blocks": disk.known_blocks,
        "file_bytes": disk.file_bytes,
        "written_bytes": disk.written_bytes_total,
        "budget_left_bytes": disk.budget_left_bytes,
        "breakers": _breaker_facts(disk),
        "life": life,
    }


def remote_facts(remote: RemoteStatistics) -> dict[str, object]:
    """Return data that only the remote tier has, such as the number of its requests."""
    return {
        "where": remote.where,
        "known_blocks": remote.known_blocks,
        "wanted_blocks": remote.num_wanted,
        "stored_blocks": remote.num_stored,
        "refused_blocks": remote.num_refused,
        "asked": remote.num_asked,
        "late": remote.num_late,
        "ask_s": remote.ask_s,
        "requests": remote.usage.num_reads + remote.usage.num_writes + remote.usage.num_questions,
        "read_bytes": remote.usage.read_bytes,
        "written_bytes": remote.usage.written_bytes,
        "breakers": _breaker_facts(remote),
    }


def store_facts(store: StoreStanding) -> dict[str, object]:
    """Return whether the disk tier's store is open, and how often its folder or process was lost since the start."""
    return {
        "folder": str(store.folder),
        "not_open": store.not_open,
        "why": store.why,
        "num_gone": store.num_gone,
        "num_ended": store.num_ended,
        "why_ended": store.why_ended,
    }


def record_facts(record: RequestRecord) -> dict[str, object]:
    """Return the data of one request, with its prompt tokens by tier and its recomputed tokens by reason."""
    return {
        "id": record.request_id,
        "tenant": record.tenant,
        "model": record.model,
        "arrived_at": round(record.arrived_at, 3),
        "tokens": {source: getattr(record.tokens, source) for source in SOURCES},
        "reasons": dict(record.tokens.reasons),
        "generated": record.num_generated,
        "finish_reason": record.finish_reason,
        "queue_s": record.queue_s,
        "lookup_s": record.lookup_s,
        "load_s": record.load_s,
        "ttft_s": record.ttft_s,
        "total_s": record.total_s,
        "preempted": record.num_preempted,
    }
