"""The sidecar's metrics for Prometheus."""

import time
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvtier.engine.observability.memory import memory_statistics
from kvtier.engine.observability.metrics import names
from kvtier.engine.observability.metrics.compat.lmcache import LowerNumbers, lmcache_metrics
from kvtier.engine.observability.metrics.disk import disk_metrics, store_metrics
from kvtier.engine.observability.metrics.http import RequestMetrics
from kvtier.engine.observability.metrics.memory import memory_metrics
from kvtier.engine.observability.metrics.tiers import (
    balance_metrics,
    remote_metrics,
    request_log_metrics,
    route_metrics,
    tier_metrics,
    what_if_metrics,
)
from kvtier.sidecar.http.views import LANES, Snapshot
from kvtier.sidecar.statistics import SidecarStatistics
from kvtier.transfer.transfer_engine import Route

_COPIES = (Route.HOST_TO_DISK, Route.DISK_TO_HOST)  # the other lanes copy nothing: they compute and compare digests


class SidecarMetrics:
    """The content of `/metrics`: the sidecar's current state, and the counters of the HTTP server.

    No label names a model, layout or client, so clients cannot create labels. Owned by the event loop.
    """

    def __init__(self, compat: Sequence[str] = ()) -> None:
        """Create the HTTP server's counters. *compat* lists other projects whose metric names are exported too."""
        self._registry = CollectorRegistry()
        self._compat = compat
        self.requests = RequestMetrics(self._registry)

    def text(self, snapshot: Snapshot) -> bytes:
        """Return all metrics in Prometheus' text format."""
        registry = CollectorRegistry()
        registry.register(_SnapshotCollector(snapshot, self._compat))
        return generate_latest(registry) + generate_latest(self._registry)


class _SnapshotCollector(Collector):
    def __init__(self, snapshot: Snapshot, compat: Sequence[str]) -> None:
        self._snapshot = snapshot
        self._compat = compat

    def collect(self) -> Iterator[Metric]:
        snapshot, statistics = self._snapshot, self._snapshot.statistics
        yield from balance_metrics(statistics.tokens)
        yield from tier_metrics(statistics.tiers)
        yield from what_if_metrics(statistics.what_if)
        yield from route_metrics({route: statistics.routes[route] for route in _COPIES if route in statistics.routes})
        yield names.HOST_PREPARED_BYTES.of(statistics.backed_bytes)
        yield from memory_metrics(memory_statistics())
        if statistics.remote is not None:
            yield from remote_metrics(statistics.remote)
        if statistics.disk is not None:
            yield from disk_metrics(statistics.disk)
        if statistics.store is not None:
            yield from store_metrics(statistics.store)
        if statistics.request_log is not None:
            yield from request_log_metrics(statistics.request_log)
        yield from _state_metrics(snapshot)
        yield from _digest_metrics(statistics)
        yield from _endpoint_metrics(statistics)
        if "lmcache" in self._compat:
            yield from lmcache_metrics(_lower_numbers(statistics))


def _lower_numbers(statistics: SidecarStatistics) -> LowerNumbers:
    endpoints = statistics.endpoints
    return LowerNumbers(
        "",
        statistics.tokens,
        statistics.tiers,
        statistics.routes,
        sum(endpoint.num_loaded for endpoint in endpoints),
        sum(endpoint.num_stored for endpoint in endpoints),
    )


def _state_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    layouts, pins = snapshot.statistics.layouts, snapshot.statistics.pins
    quarantine = snapshot.statistics.quarantine
    yield names.SIDECAR_START_TIME.of(round(time.time() - (snapshot.now - snapshot.started_at)))
    yield names.SIDECAR_READY.of(not snapshot.why_not_ready)
    yield names.SIDECAR_CLIENTS.of(len(snapshot.clients))
    yield names.SIDECAR_LAYOUTS.of(len(layouts))
    yield names.SIDECAR_UNKNOWN_WEIGHTS.of(sum(not each.layout.weights for each in layouts))
    yield names.SIDECAR_HELD_BYTES.of(sum(each.held_bytes for each in layouts))
    yield names.SIDECAR_LEASED_CHUNKS.of(sum(each.num_leased_chunks for each in layouts))
    yield names.SIDECAR_QUARANTINED_CLIENTS.of(quarantine.num_clients)
    yield names.SIDECAR_QUARANTINED_CHUNKS.of(quarantine.num_chunks)
    yield names.SIDECAR_PINS.of(pins.num_pins)
    yield names.SIDECAR_PINNED_BYTES.of(pins.num_bytes)
    yield names.SIDECAR_UNSAVED_CHUNKS.of(sum(each.num_unsaved for each in layouts))


def _digest_metrics(statistics: SidecarStatistics) -> Iterator[Metric]:
    lanes = {LANES[route]: totals for route, totals in statistics.routes.items() if route not in _COPIES}
    yield names.SIDECAR_HASHED_BYTES.by({lane: totals.num_bytes for lane, totals in lanes.items()})
    yield names.SIDECAR_HASHED_SECONDS.by({lane: totals.seconds for lane, totals in lanes.items()})


def _endpoint_metrics(statistics: SidecarStatistics) -> Iterator[Metric]:
    endpoints = statistics.endpoints
    yield names.SIDECAR_ASKED_CHUNKS.by({endpoint.kind: endpoint.num_asked for endpoint in endpoints})
    yield names.SIDECAR_PROMISED_CHUNKS.by({endpoint.kind: endpoint.num_promised for endpoint in endpoints})
    yield names.SIDECAR_LOADED_CHUNKS.by({endpoint.kind: endpoint.num_loaded for endpoint in endpoints})
    yield names.SIDECAR_STORED_CHUNKS.by({endpoint.kind: endpoint.num_stored for endpoint in endpoints})
    yield names.SIDECAR_LOST_CHUNKS.by({(d.kind, why): n for d in endpoints for why, n in d.lost.items()})
    yield names.SIDECAR_OPERATIONS.by({(d.kind, word): n for d in endpoints for word, n in d.operations.items()})
    yield names.SIDECAR_REFUSED.by({(d.kind, why): n for d in endpoints for why, n in d.refused.items()})
