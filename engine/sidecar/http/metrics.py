"""The sidecar's metrics: its own names in one place; what it shares with an engine is in `engine/metrics.py`."""

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier.engine.metrics import (
    RequestMetrics,
    disk_metrics,
    prepared_metric,
    route_metrics,
    store_metrics,
    tier_metrics,
)
from kvtier.engine.sidecar.http.views import LANES, Snapshot
from kvtier.engine.sidecar.statistics import SidecarStatistics
from kvtier.transfer.transfer_engine import Route

_COPIES = (Route.HOST_TO_DISK, Route.DISK_TO_HOST)  # the other lanes move no bytes: they take and compare digests


class SidecarMetrics:
    """What `/metrics` answers: a snapshot, and what the HTTP server has counted. No label is a client's to choose: not
    a model's name, a layout or a client. Owned by the event loop."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = RequestMetrics(self._registry)

    def text(self, snapshot: Snapshot) -> bytes:
        """All of it, as Prometheus reads it."""
        registry = CollectorRegistry()
        registry.register(_SnapshotCollector(snapshot))
        return generate_latest(registry) + generate_latest(self._registry)


class _SnapshotCollector(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        snapshot, statistics = self._snapshot, self._snapshot.statistics
        yield from tier_metrics(statistics.tiers)
        yield from route_metrics({route: statistics.routes[route] for route in _COPIES if route in statistics.routes})
        yield prepared_metric(statistics.backed_bytes)
        if statistics.disk is not None:
            yield from disk_metrics(statistics.disk)
        if statistics.store is not None:
            yield from store_metrics(statistics.store)
        yield from _state_metrics(snapshot)
        yield from _digest_metrics(statistics)
        yield from _door_metrics(statistics)


def _state_metrics(snapshot: Snapshot) -> Iterator[Metric]:
    layouts = snapshot.statistics.layouts
    started_at = time.time() - (snapshot.now - snapshot.started_at)
    yield GaugeMetricFamily(
        "kvtier_sidecar_start_time_seconds", "When the sidecar has started, since the Unix epoch", round(started_at)
    )
    yield GaugeMetricFamily(
        "kvtier_sidecar_ready", "1 if engines can attach and store", float(not snapshot.why_not_ready)
    )
    yield GaugeMetricFamily("kvtier_sidecar_clients", "Clients that are attached", len(snapshot.clients))
    yield GaugeMetricFamily("kvtier_sidecar_layouts", "Layouts of KV that engines have registered", len(layouts))
    yield GaugeMetricFamily(
        "kvtier_sidecar_unknown_weights_layouts",
        "Of them those of models without an entry in [models]",
        sum(not each.layout.weights for each in layouts),
    )
    yield GaugeMetricFamily(
        "kvtier_sidecar_held_bytes",
        "Bytes of the segment that layouts have, full or not",
        sum(each.held_bytes for each in layouts),
    )
    yield GaugeMetricFamily(
        "kvtier_sidecar_leased_chunks",
        "Chunks and reserved slots that are not evicted, as clients or copies use them",
        sum(each.num_leased_chunks for each in layouts),
    )
    pins = snapshot.statistics.pins
    yield GaugeMetricFamily("kvtier_sidecar_pins", "Prompts that operators keep in host memory", pins.num_pins)
    yield GaugeMetricFamily(
        "kvtier_sidecar_pinned_bytes", "Bytes of the segment that these keep in their places", pins.num_bytes
    )
    yield GaugeMetricFamily(
        "kvtier_sidecar_unsaved_chunks",
        "Chunks that are in host memory only",
        sum(each.num_unsaved for each in layouts),
    )


def _digest_metrics(statistics: SidecarStatistics) -> Iterator[Metric]:
    hashed = CounterMetricFamily(
        "kvtier_sidecar_hashed_bytes",
        "Bytes of which digests were taken: of new chunks (digest) or before they are read (verify)",
        labels=["lane"],
    )
    seconds = CounterMetricFamily("kvtier_sidecar_hashed_seconds", "Time that this ran", labels=["lane"])
    for route, totals in statistics.routes.items():
        if route not in _COPIES:
            hashed.add_metric([LANES[route]], totals.num_bytes)
            seconds.add_metric([LANES[route]], totals.seconds)
    yield from (hashed, seconds)


def _door_metrics(statistics: SidecarStatistics) -> Iterator[Metric]:
    asked = CounterMetricFamily("kvtier_sidecar_asked_chunks", "Chunks that lookups asked for", labels=["door"])
    promised = CounterMetricFamily(
        "kvtier_sidecar_promised_chunks", "Of them those that were found, verified and promised", labels=["door"]
    )
    loaded = CounterMetricFamily("kvtier_sidecar_loaded_chunks", "Chunks that engines have loaded", labels=["door"])
    stored = CounterMetricFamily("kvtier_sidecar_stored_chunks", "Chunks that engines have stored", labels=["door"])
    lost = CounterMetricFamily(
        "kvtier_sidecar_lost_chunks", "Chunks that were not promised or not stored, by why", labels=["door", "why"]
    )
    operations = CounterMetricFamily(
        "kvtier_sidecar_operations", "Requests of engines, by kind", labels=["door", "operation"]
    )
    refused = CounterMetricFamily(
        "kvtier_sidecar_refused", "Requests and connections that were refused, by why", labels=["door", "why"]
    )
    for door in statistics.doors:
        asked.add_metric([door.kind], door.num_asked)
        promised.add_metric([door.kind], door.num_promised)
        loaded.add_metric([door.kind], door.num_loaded)
        stored.add_metric([door.kind], door.num_stored)
        for family, counts in ((lost, door.lost), (operations, door.operations), (refused, door.refused)):
            for word, number in counts.items():
                family.add_metric([door.kind, word], number)
    yield from (asked, promised, loaded, stored, lost, operations, refused)
