"""Metrics: every name in one place, filled from statistics when Prometheus asks; the sidecar's own names are in
`sidecar/http/metrics.py`."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtier.engine.attached.standing import SidecarStanding
from kvtier.engine.config import Config
from kvtier.engine.reopening_store import NotOpen, StoreStanding
from kvtier.tiers.lower.admission import AdmissionStatistics
from kvtier.tiers.lower.breaker import BreakerState
from kvtier.tiers.lower.statistics import DiskStatistics, TierStatistics
from kvtier.tiers.naming.tier import Tier
from kvtier.transfer.transfer_engine import Route, RouteStatistics

if TYPE_CHECKING:
    from kvtier.engine.core import EngineStatistics  # which imports torch: a server counts before it has that


class EngineCollector(Collector):
    """Reads a snapshot on every scrape; nothing is counted twice or on the engine's path."""

    def __init__(self, statistics: "Callable[[], EngineStatistics]") -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        """All metrics of one snapshot."""
        statistics = self._statistics()
        yield from _token_metrics(statistics)
        yield from tier_metrics(statistics.cache.tiers)
        yield from route_metrics(statistics.cache.routes)
        yield prepared_metric(statistics.host_prepared_bytes)
        yield from _plan_metrics(statistics)
        if statistics.cache.disk is not None:
            yield from disk_metrics(statistics.cache.disk)
        if statistics.cache.admission is not None:
            yield from _admission_metrics(statistics.cache.admission)
        if statistics.store is not None:
            yield from store_metrics(statistics.store)
        if statistics.sidecar is not None:
            yield from _sidecar_metrics(statistics.sidecar)
        yield from _tenant_metrics(statistics)
        requests = GaugeMetricFamily("kvtier_requests", "Requests by state", labels=["state"])
        requests.add_metric(["waiting"], statistics.num_waiting)
        requests.add_metric(["promoting"], statistics.num_promoting)
        requests.add_metric(["running"], statistics.num_running)
        yield requests
        window = "Blocks next to be evicted on the device that are kept copied down"
        yield GaugeMetricFamily("kvtier_clean_ahead_blocks", window, statistics.cache.clean_ahead_blocks)


def _token_metrics(statistics: "EngineStatistics") -> Iterator[Metric]:
    tokens = statistics.tokens
    yield CounterMetricFamily("kvtier_prompt_tokens", "Prompt tokens of admitted requests", tokens.num_tokens)
    hits = CounterMetricFamily("kvtier_hit_tokens", "Prompt tokens that came from the cache, by tier", labels=["tier"])
    for tier in Tier:
        hits.add_metric([tier], getattr(tokens, tier))
    yield hits
    recomputed = CounterMetricFamily(
        "kvtier_recomputed_tokens", "Prompt tokens that were computed, by reason", labels=["reason"]
    )
    for reason, num_tokens in tokens.reasons.items():
        recomputed.add_metric([reason], num_tokens)
    yield recomputed
    yield CounterMetricFamily(
        "kvtier_copied_tokens", "Hit tokens copied out of blocks that share only their first tokens", tokens.copied
    )
    prefix = statistics.prefix
    again = CounterMetricFamily(
        "kvtier_preempted_tokens",
        "Tokens of preempted requests when they were admitted again, hit or missed",
        labels=["result"],
    )
    again.add_metric(["hit"], prefix.preempted_hits)
    again.add_metric(["miss"], prefix.preempted_queries - prefix.preempted_hits)
    yield again
    yield CounterMetricFamily(
        "kvtier_dropped_event_batches", "Batches of KV events that could not be sent", statistics.num_dropped_events
    )
    yield GaugeMetricFamily(
        "kvtier_recent_hit_ratio", "Share of the last 1,000 requests' tokens that were hits", prefix.recent_hit_ratio
    )


def tier_metrics(tiers: Mapping[Tier, TierStatistics]) -> Iterator[Metric]:
    """What is in each tier, and what has left it."""
    blocks = GaugeMetricFamily("kvtier_resident_blocks", "Blocks in the tier, which look-ups find", labels=["tier"])
    resident = GaugeMetricFamily("kvtier_resident_bytes", "Bytes of the blocks in the tier", labels=["tier"])
    capacity = GaugeMetricFamily("kvtier_capacity_bytes", "Bytes of blocks that the tier can hold", labels=["tier"])
    evicted = CounterMetricFamily("kvtier_evicted_blocks", "Blocks evicted to make room, by tier", labels=["tier"])
    dropped = CounterMetricFamily(
        "kvtier_dropped_spills", "Blocks evicted without a copy in a lower tier", labels=["tier"]
    )
    corrupt = CounterMetricFamily(
        "kvtier_corrupt_blocks", "Blocks whose load gave no valid bytes, by tier and cause", labels=["tier", "cause"]
    )
    for tier, statistics in tiers.items():
        blocks.add_metric([tier], statistics.num_blocks)
        resident.add_metric([tier], statistics.num_bytes)
        capacity.add_metric([tier], statistics.capacity_bytes)
        evicted.add_metric([tier], statistics.num_evicted)
        dropped.add_metric([tier], statistics.dropped_spills)
        for cause, num_blocks in statistics.corrupt.items():
            corrupt.add_metric([tier, cause], num_blocks)
    yield from (blocks, resident, capacity, evicted, dropped, corrupt)


def route_metrics(routes: Mapping[Route, RouteStatistics]) -> Iterator[Metric]:
    """Copies between tiers."""
    moved = CounterMetricFamily("kvtier_moved_bytes", "Bytes copied between tiers, by route", labels=["route"])
    seconds = CounterMetricFamily("kvtier_moved_seconds", "Seconds for which copies ran, by route", labels=["route"])
    failed = CounterMetricFamily("kvtier_failed_transfers", "Copies that failed, by route", labels=["route"])
    lately = "Bytes per second of the route's latest copies"
    speed = GaugeMetricFamily("kvtier_route_bytes_per_second", lately, labels=["route"])
    for route, totals in routes.items():
        moved.add_metric([route], totals.num_bytes)
        seconds.add_metric([route], totals.seconds)
        failed.add_metric([route], totals.num_failed)
        if totals.bytes_per_s is not None:
            speed.add_metric([route], totals.bytes_per_s)
    yield from (moved, seconds, failed, speed)


def prepared_metric(num_bytes: int) -> Metric:
    """How far host memory is prepared."""
    prepared = "Bytes of the host tier that have memory behind them, pinned on CUDA"
    return GaugeMetricFamily("kvtier_host_prepared_bytes", prepared, num_bytes)


def _plan_metrics(statistics: "EngineStatistics") -> Iterator[Metric]:
    plans = CounterMetricFamily(
        "kvtier_load_plans",
        "Hits below the device, by how much of them was loaded: all, split, part, nothing",
        labels=["loaded"],
    )
    for loaded, num_plans in statistics.plans.num_plans.items():
        plans.add_metric([loaded], num_plans)
    yield plans
    if statistics.plans.prefill_tokens_per_s is not None:
        prefill = "Tokens computed per second, for the first 1,000 tokens of a prompt"
        yield GaugeMetricFamily("kvtier_prefill_tokens_per_second", prefill, statistics.plans.prefill_tokens_per_s)


def disk_metrics(disk: DiskStatistics) -> Iterator[Metric]:
    """What only a disk has."""
    yield GaugeMetricFamily("kvtier_disk_file_bytes", "Bytes that the store takes on the disk", disk.file_bytes)
    written = "Bytes written to the store since it was created"
    yield CounterMetricFamily("kvtier_disk_written_bytes", written, disk.written_bytes_total)
    yield GaugeMetricFamily(
        "kvtier_disk_index_blocks", "Blocks on disk that the index in memory knows", disk.known_blocks
    )
    loaded = "1 when the index knows all blocks that were on disk at the start, else 0"
    yield GaugeMetricFamily("kvtier_disk_index_loaded", loaded, disk.is_indexed)
    state = GaugeMetricFamily(
        "kvtier_disk_breaker", "1 for the state of the circuit breaker of each side", labels=["side", "state"]
    )
    opened = CounterMetricFamily(
        "kvtier_disk_breaker_opened", "Times that the circuit breaker of the side has opened", labels=["side"]
    )
    for side, current in disk.breakers.items():
        for possible in BreakerState:
            state.add_metric([side, possible], possible is current)
        opened.add_metric([side], disk.num_opened[side])
    yield from (state, opened)
    if disk.budget_left_bytes is not None:
        left = "Bytes that may be written now under max_written_bytes_per_day; below 0: too much was written"
        yield GaugeMetricFamily("kvtier_disk_budget_left_bytes", left, disk.budget_left_bytes)
    if disk.life is not None:
        used = "Share of the drive's endurance that this store has written"
        yield GaugeMetricFamily("kvtier_ssd_life_used_ratio", used, disk.life.used)
        years = "Years until the endurance is used up, at the rate since the start"
        yield GaugeMetricFamily("kvtier_ssd_years_left", years, disk.life.years_left)


def _admission_metrics(admission: AdmissionStatistics) -> Iterator[Metric]:
    blocks = CounterMetricFamily(
        "kvtier_disk_admission_blocks",
        "Blocks by whether they were admitted to the disk or refused",
        labels=["decision"],
    )
    blocks.add_metric(["admitted"], admission.num_admitted)
    blocks.add_metric(["refused"], admission.num_refused)
    yield blocks


def store_metrics(store: StoreStanding) -> Iterator[Metric]:
    """Whether the disk tier's store is open, and what has happened to it."""
    is_open = "1 while the disk tier's store is open; at 0 kvtier serves without it and tries again"
    yield GaugeMetricFamily("kvtier_disk_open", is_open, store.not_open is None)
    reasons = GaugeMetricFamily(
        "kvtier_disk_not_open", "1 for the reason why the disk tier's store is not open", labels=["reason"]
    )
    for reason in NotOpen:
        reasons.add_metric([reason], reason is store.not_open)
    yield reasons
    gone = "Times that the store's folder was removed or replaced while it was open"
    yield CounterMetricFamily("kvtier_disk_folder_gone", gone, store.num_gone)
    ended = "Processes of the store that have ended by themselves, or hung and were ended"
    yield CounterMetricFamily("kvtier_disk_process_ended", ended, store.num_ended)


def _sidecar_metrics(sidecar: SidecarStanding) -> Iterator[Metric]:
    attached = "1 while the engine is attached to its sidecar; at 0 it serves without it and tries again"
    yield GaugeMetricFamily("kvtier_sidecar_attached", attached, sidecar.is_attached)
    since = "Seconds for which the engine has been attached to its sidecar; 0 while it is not"
    yield GaugeMetricFamily("kvtier_sidecar_attached_seconds", since, sidecar.attached_s)
    times = "Times that the engine has attached to a sidecar"
    yield CounterMetricFamily("kvtier_sidecar_attachments", times, sidecar.num_attached)


def _tenant_metrics(statistics: "EngineStatistics") -> Iterator[Metric]:
    held = GaugeMetricFamily(
        "kvtier_tenant_bytes", "Bytes of blocks of tenants with a quota, by tier", labels=["tier", "tenant"]
    )
    for tenant, usage in statistics.tenants.items():
        for tier, num_bytes in usage.items():
            held.add_metric([tier, tenant], num_bytes)
    yield held


_TTFT_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_TOKEN_GAP_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class RequestMetrics:
    """What every HTTP server of kvtier counts itself, as it happens."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "kvtier_http_requests", "Requests answered, by route and status", ["route", "status"], registry=registry
        )
        self.connections_refused = Counter(
            "kvtier_http_connections_refused",
            "Connections refused or cut before their request was read, by the limit that they exceeded",
            ["why"],
            registry=registry,
        )


class HttpMetrics(RequestMetrics):
    """What a server of completions counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.ttft = Histogram(
            "kvtier_http_ttft_seconds",
            "Seconds from a request's tokenized prompt to its first token",
            buckets=_TTFT_S,
            registry=registry,
        )
        self.token_gap = Histogram(
            "kvtier_http_token_gap_seconds",
            "Seconds between two tokens of a completion",
            buckets=_TOKEN_GAP_S,
            registry=registry,
        )


class MetricsServer(Protocol):
    """The server of `/metrics`, or a stand-in where no port is configured; `close` ends it."""

    def close(self) -> None:
        """Stop serving. Idempotent."""


class _NoServer:
    def close(self) -> None:
        pass


class _HttpServer:
    def __init__(self, collector: EngineCollector, host: str, port: int) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        self._server, self._thread = start_http_server(port, host, registry)
        self.port = self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def serve_metrics(statistics: "Callable[[], EngineStatistics]", config: Config) -> MetricsServer:
    """Serve `/metrics` on the configured port, if there is one. OSError if the port is taken."""
    if config.metrics_port is None:
        return _NoServer()
    try:
        return _HttpServer(EngineCollector(statistics), config.metrics_host, config.metrics_port)
    except OSError as error:
        where = f"{config.metrics_host}:{config.metrics_port}"
        raise OSError(f"metrics: cannot serve on {where} ({error.strerror}); choose another metrics_port") from error
