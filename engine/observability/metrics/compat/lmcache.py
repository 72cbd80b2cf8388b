"""Metrics of an engine or a sidecar under the names of an LMCache server, for LMCache's dashboards."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from kvtier.engine.observability.metrics.compat import lmcache_names as names
from kvtier.engine.observability.metrics.tiers import corrupt_by_cause
from kvtier.tiers.lower.statistics import TierStatistics, TokenBalance
from kvtier.tiers.naming.tier import Tier
from kvtier.transfer.transfer_engine import Route, RouteStatistics

if TYPE_CHECKING:
    from kvtier.engine.core import EngineStatistics

DISK = "disk"  # the name of kvtier's one L2


@dataclass(frozen=True, slots=True)
class LowerNumbers:
    """The statistics of an engine or a sidecar from which LMCache's metrics of host memory and disk are filled.

    *tokens* counts the tokens of all lookups. *num_loaded* and *num_stored* are the numbers of blocks that engines have
    loaded and stored.
    """

    model_name: str  # "" if several models are served, because clients must not choose labels
    tokens: TokenBalance
    tiers: Mapping[Tier, TierStatistics]
    routes: Mapping[Route, RouteStatistics]
    num_loaded: int
    num_stored: int


def engine_lmcache_metrics(statistics: "EngineStatistics", model_name: str) -> Iterator[Metric]:
    """Yield the metrics of one snapshot of an engine under LMCache's names."""
    routes = statistics.cache.routes
    up, down = routes[Route.HOST_TO_DEVICE], routes[Route.DEVICE_TO_HOST]
    numbers = LowerNumbers(
        model_name,
        statistics.tokens,
        statistics.cache.tiers,
        routes,
        num_loaded=up.copies.num_done_blocks,
        num_stored=down.copies.num_done_blocks,
    )
    yield from lmcache_metrics(numbers)
    yield names.L0_IDLE.by_histogram({(): statistics.cache.tiers[Tier.DEVICE].eviction_ages})
    yield names.PREFETCH_JOBS.of(statistics.num_promoting)
    for submitted, finished, route in (
        (names.STORES_SUBMITTED, names.STORES_FINISHED, down),
        (names.RETRIEVES_SUBMITTED, names.RETRIEVES_FINISHED, up),
    ):
        yield submitted.by({"0": route.copies.num_submitted})
        yield finished.by({"0": route.copies.num_done + route.copies.num_failed})
    directions = {("d2h", "staging"): down, ("h2d", "staging"): up}
    yield names.TRANSFER_BYTES.by({key: copies.num_bytes for key, copies in directions.items()})
    yield names.TRANSFER_SECONDS.by({key: copies.seconds for key, copies in directions.items()})


def lmcache_metrics(numbers: LowerNumbers) -> Iterator[Metric]:
    """Yield the metrics of host memory and disk under LMCache's names."""
    tokens, model = numbers.tokens, numbers.model_name
    below = tokens.host + tokens.disk + tokens.remote
    yield names.LOOKUP_REQUESTED.by({model: below + tokens.recomputed})
    yield names.LOOKUP_HIT.by({model: below})
    yield names.LOOKUP_HIT_L1.by({model: tokens.host})
    yield names.LOOKUP_HIT_L2.by({model: tokens.disk + tokens.remote})
    yield names.LOOKUP_PROMPT.by({model: tokens.num_tokens})
    yield names.LOOKUP_REQUEST_HIT.by({model: tokens.device + below})
    yield names.CHUNKS_LOADED.by({model: numbers.num_loaded})
    if Tier.HOST in numbers.tiers:
        yield from _host_metrics(numbers, numbers.tiers[Tier.HOST])
    if Tier.DISK in numbers.tiers:
        yield from _disk_metrics(numbers, numbers.tiers[Tier.DISK])


def _host_metrics(numbers: LowerNumbers, host: TierStatistics) -> Iterator[Metric]:
    spilled, read = numbers.routes[Route.HOST_TO_DISK].copies, numbers.routes[Route.DISK_TO_HOST].copies
    yield names.L1_USED.of(host.num_bytes)
    yield names.L1_RATIO.of(host.num_bytes / max(1, host.capacity_bytes))
    yield names.L1_READ.of(numbers.num_loaded + spilled.num_done_blocks)
    yield names.L1_WRITE.of(numbers.num_stored + read.num_done_blocks)
    yield names.L1_EVICTED.of(host.num_evicted)
    yield names.L1_READ_FAILURE.of(sum(host.corrupt.values()))
    yield names.L1_IDLE.by_histogram({(): host.eviction_ages})


def _disk_metrics(numbers: LowerNumbers, disk: TierStatistics) -> Iterator[Metric]:
    spilled, read = numbers.routes[Route.HOST_TO_DISK], numbers.routes[Route.DISK_TO_HOST]
    yield names.L2_USED.by({DISK: disk.num_bytes})
    yield names.L2_EVICTED.of(disk.num_evicted)
    yield names.L2_STORES_SUBMITTED.of(spilled.copies.num_submitted)
    yield names.L2_STORES_COMPLETED.by({DISK: spilled.copies.num_done})
    yield names.L2_STORE_CHUNKS_SUBMITTED.of(spilled.copies.num_submitted_blocks)
    yield names.L2_STORE_CHUNKS_COMPLETED.of(spilled.copies.num_done_blocks)
    yield names.L2_LOADS_SUBMITTED.of(read.copies.num_submitted)
    yield names.L2_LOADS_COMPLETED.by({DISK: read.copies.num_done})
    yield names.L2_LOAD_CHUNKS_SUBMITTED.of(read.copies.num_submitted_blocks)
    yield names.L2_LOAD_CHUNKS_COMPLETED.of(read.copies.num_done_blocks)
    yield names.L2_LOAD_FAILURE.by(corrupt_by_cause(Tier.DISK, disk))
    yield names.INFLIGHT_STORES.by({DISK: spilled.num_pending})
    yield names.INFLIGHT_LOADS.by({DISK: read.num_pending})
    yield names.INFLIGHT_LOAD_BYTES.by({DISK: read.pending_bytes})
