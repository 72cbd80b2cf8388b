"""EngineCollector: an engine's metrics, filled from its statistics on every scrape."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvtier.engine.attached.link import SidecarStanding
from kvtier.engine.observability.memory import memory_statistics
from kvtier.engine.observability.metrics import names
from kvtier.engine.observability.metrics.compat.lmcache import engine_lmcache_metrics
from kvtier.engine.observability.metrics.compat.vllm import vllm_metrics
from kvtier.engine.observability.metrics.disk import admission_metrics, disk_metrics, store_metrics
from kvtier.engine.observability.metrics.memory import memory_metrics
from kvtier.engine.observability.metrics.tiers import (
    balance_metrics,
    remote_metrics,
    request_log_metrics,
    route_metrics,
    sources_of,
    tier_metrics,
    what_if_metrics,
)

if TYPE_CHECKING:
    # These import torch, which a starting server has not loaded yet.
    from kvtier.engine.core import EngineStatistics
    from kvtier.engine.images.engine_images import ImageStatistics


class EngineCollector(Collector):
    """A collector that reads a snapshot of the statistics on every scrape, so that it costs the engine nothing."""

    def __init__(
        self, statistics: "Callable[[], EngineStatistics]", compat: Sequence[str] = (), model_name: str = ""
    ) -> None:
        """Create the collector.

        *compat* is the setting `metrics.compat`: the systems under whose metric names the numbers are shown, too.
        *model_name* is a label of these additional metrics.
        """
        self._statistics = statistics
        self._compat = compat
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of one snapshot."""
        statistics = self._statistics()
        yield from _token_metrics(statistics)
        yield from tier_metrics(statistics.cache.tiers)
        yield from what_if_metrics(statistics.requests.what_if)
        yield from route_metrics(statistics.cache.routes)
        yield names.HOST_PREPARED_BYTES.of(statistics.host_prepared_bytes)
        yield from memory_metrics(memory_statistics())
        yield from _plan_metrics(statistics)
        if statistics.cache.remote is not None:
            yield from remote_metrics(statistics.cache.remote)
        if statistics.cache.disk is not None:
            yield from disk_metrics(statistics.cache.disk)
        if statistics.cache.admission is not None:
            yield from admission_metrics(statistics.cache.admission)
        if statistics.store is not None:
            yield from store_metrics(statistics.store)
        if statistics.sidecar is not None:
            yield from _sidecar_metrics(statistics.sidecar)
        yield from _request_metrics(statistics)
        if statistics.requests.log is not None:
            yield from request_log_metrics(statistics.requests.log)
        if statistics.images is not None:
            yield from _image_metrics(statistics.images)
        yield names.PINNED_BYTES.of(statistics.pinned_bytes)
        yield names.TENANT_BYTES.by(
            {(tier, tenant): number for tenant, usage in statistics.tenants.items() for tier, number in usage.items()}
        )
        yield names.REQUESTS.by(
            {
                "waiting": statistics.num_waiting,
                "promoting": statistics.num_promoting,
                "running": statistics.num_running,
            }
        )
        yield names.CLEAN_AHEAD_BLOCKS.of(statistics.cache.clean_ahead_blocks)
        if "vllm" in self._compat:
            yield from vllm_metrics(statistics, self._model_name)
        if "lmcache" in self._compat:
            yield from engine_lmcache_metrics(statistics, self._model_name)


def _token_metrics(statistics: "EngineStatistics") -> Iterator[Metric]:
    tokens, prefix = statistics.tokens, statistics.prefix
    yield from balance_metrics(tokens)
    yield names.COPIED_TOKENS.of(tokens.copied)
    yield names.GENERATED_TOKENS.of(statistics.requests.served.num_generated)
    yield names.PREEMPTED_TOKENS.by(
        {"hit": prefix.preempted_hits, "miss": prefix.preempted_queries - prefix.preempted_hits}
    )
    yield names.DROPPED_EVENT_BATCHES.of(statistics.num_dropped_events)
    yield names.RECENT_HIT_RATIO.of(prefix.recent_hit_ratio)


def _image_metrics(images: "ImageStatistics") -> Iterator[Metric]:
    yield names.IMAGES.by({"encoder": images.num_encoded, "host": images.num_from_host, "disk": images.num_from_disk})
    yield names.IMAGE_ENCODER_SECONDS.of(images.encoding_s)
    yield names.IMAGE_CACHE_BYTES.of(images.cached_bytes)
    yield names.IMAGE_WAITING_BYTES.of(images.waiting_bytes)


def _request_metrics(statistics: "EngineStatistics") -> Iterator[Metric]:
    times = statistics.requests.times
    yield names.TTFT_SECONDS.by_histogram(times.ttft)
    yield names.QUEUE_SECONDS.by_histogram({(): times.queue})
    yield names.LOOKUP_SECONDS.by_histogram({(): times.lookup})
    yield names.LOAD_SECONDS.by_histogram({(): times.load})
    yield names.TENANT_TOKENS.by(
        {
            (tenant, source): number
            for tenant, tokens in statistics.requests.tenants.items()
            for source, number in sources_of(tokens).items()
        }
    )


def _plan_metrics(statistics: "EngineStatistics") -> Iterator[Metric]:
    yield names.LOAD_PLANS.by(statistics.plans.num_plans)
    if statistics.plans.prefill_tokens_per_s is not None:
        yield names.PREFILL_SPEED.of(statistics.plans.prefill_tokens_per_s)


def _sidecar_metrics(sidecar: SidecarStanding) -> Iterator[Metric]:
    yield names.SIDECAR_ATTACHED.of(sidecar.is_attached)
    yield names.SIDECAR_ATTACHED_SECONDS.of(sidecar.attached_s)
    yield names.SIDECAR_ATTACHMENTS.of(sidecar.num_attached)
