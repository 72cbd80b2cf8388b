"""Metrics of the tiers and of the copies between them, for engines and sidecars."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from kvtier.engine.observability.metrics import names
from kvtier.engine.observability.records.request_log import LogCounts
from kvtier.store.record import Fault
from kvtier.tiers.lower.breaker import BreakerState
from kvtier.tiers.lower.remote.remote_statistics import RemoteStatistics
from kvtier.tiers.lower.statistics import TierStatistics, TokenBalance
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.tiers.reuse.what_if import HitRatios
from kvtier.transfer.transfer_engine import Route, RouteStatistics

WITH_SLOTS = (Tier.DEVICE, Tier.HOST)
_FAULTS = tuple(fault for fault in Fault if fault is not Fault.MISSING)


def tier_metrics(tiers: Mapping[Tier, TierStatistics]) -> Iterator[Metric]:
    """Yield the metrics of each tier's content and evictions."""
    yield names.RESIDENT_BLOCKS.by({tier: each.num_blocks for tier, each in tiers.items()})
    yield names.RESIDENT_STATES.by({tier: each.num_states for tier, each in tiers.items()})
    yield names.RESIDENT_BYTES.by({tier: each.num_bytes for tier, each in tiers.items()})
    yield names.CAPACITY_BYTES.by({tier: each.capacity_bytes for tier, each in tiers.items()})
    yield names.EVICTED_BLOCKS.by(
        {(tier, cause): number for tier, each in tiers.items() for cause, number in each.evicted.items()}
    )
    yield names.DROPPED_SPILLS.by({tier: each.dropped_spills for tier, each in tiers.items()})
    yield names.LEASED_SLOTS.by({tier: each.num_leased for tier, each in tiers.items() if tier in WITH_SLOTS})
    yield names.DIRTY_BLOCKS.by({tier: each.num_dirty for tier, each in tiers.items() if tier in WITH_SLOTS})
    yield names.EVICTION_AGE.by_histogram({tier: each.eviction_ages for tier, each in tiers.items()})
    yield names.CORRUPT_BLOCKS.by(
        {(tier, cause): n for tier, each in tiers.items() for cause, n in corrupt_by_cause(tier, each).items()}
    )


def corrupt_by_cause(tier: Tier, statistics: TierStatistics) -> dict[str, int]:
    """Return the number of corrupt blocks by cause, with 0 for causes that have not occurred yet.

    Without the 0, Prometheus would not see the first increase.
    """
    causes = {Tier.DEVICE: (), Tier.HOST: (Fault.CORRUPT,), Tier.DISK: _FAULTS, Tier.REMOTE: _FAULTS}[tier]
    return {**dict.fromkeys((cause.value for cause in causes), 0), **statistics.corrupt}


def what_if_metrics(ratios: HitRatios) -> Iterator[Metric]:
    """Yield the hit ratios that are estimated for smaller and larger tiers."""
    yield names.WHAT_IF_HIT_RATIO.by(
        {(tier, f"{size:g}"): ratio for tier, each in ratios.items() for size, ratio in each.items()}
    )


def route_metrics(routes: Mapping[Route, RouteStatistics]) -> Iterator[Metric]:
    """Yield the metrics of the copies between tiers."""
    yield names.MOVED_BYTES.by({route: totals.num_bytes for route, totals in routes.items()})
    yield names.MOVED_SECONDS.by({route: totals.seconds for route, totals in routes.items()})
    yield names.FAILED_TRANSFERS.by({route: totals.num_failed for route, totals in routes.items()})
    yield names.PENDING_TRANSFERS.by({route: totals.num_pending for route, totals in routes.items()})
    yield names.PENDING_BYTES.by({route: totals.pending_bytes for route, totals in routes.items()})
    speeds = {route: totals.bytes_per_s for route, totals in routes.items()}
    yield names.ROUTE_SPEED.by({route: speed for route, speed in speeds.items() if speed is not None})


def remote_metrics(remote: RemoteStatistics) -> Iterator[Metric]:
    """Yield the metrics that only a remote tier has."""
    usage = remote.usage
    yield names.REMOTE_ASKED.of(remote.num_asked)
    yield names.REMOTE_LATE.of(remote.num_late)
    yield names.REMOTE_ASK_SECONDS.of(remote.ask_s)
    yield names.REMOTE_BLOCKS.by(
        {"stored": remote.num_stored, "there": remote.num_there, "refused": remote.num_refused}
    )
    yield names.REMOTE_WANTED_BLOCKS.of(remote.num_wanted)
    yield names.REMOTE_KNOWN_BLOCKS.of(remote.known_blocks)
    yield names.REMOTE_REQUESTS.by({"read": usage.num_reads, "write": usage.num_writes, "ask": usage.num_questions})
    yield names.REMOTE_BYTES.by({"read": usage.read_bytes, "written": usage.written_bytes})
    yield names.REMOTE_BREAKER.by(
        {(side, state): state is now for side, now in remote.breakers.items() for state in BreakerState}
    )
    yield names.REMOTE_BREAKER_OPENED.by(remote.num_opened)


def balance_metrics(tokens: TokenBalance) -> Iterator[Metric]:
    """Yield the metrics of where prompt tokens came from, and of why some were computed."""
    yield names.PROMPT_TOKENS.of(tokens.num_tokens)
    yield names.HIT_TOKENS.by({tier: getattr(tokens, tier) for tier in Tier})
    yield names.RECOMPUTED_TOKENS.by({**dict.fromkeys(Reason, 0), **tokens.reasons})


def request_log_metrics(counts: LogCounts) -> Iterator[Metric]:
    """Yield the metrics of the request log."""
    yield names.REQUEST_LOG_LINES.by({"written": counts.num_written, "dropped": counts.num_dropped})


def sources_of(tokens: TokenBalance) -> dict[str, int]:
    """Return the number of tokens by source: a tier, or "recomputed"."""
    return {**{tier.value: getattr(tokens, tier) for tier in Tier}, "recomputed": tokens.recomputed}
