"""Metrics of an engine under vLLM's names, for dashboards made for vLLM."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from kvtier.engine.observability.metrics.compat import vllm_names as names
from kvtier.engine.observability.metrics.metric_name import MetricName
from kvtier.tiers.histogram import HistogramStatistics
from kvtier.tiers.naming.tier import Tier
from kvtier.transfer.transfer_engine import Route

if TYPE_CHECKING:
    from kvtier.engine.core import EngineStatistics

ENGINE = "0"  # vLLM numbers the engines of a server; kvtier has one
NEVER_A_SOURCE = ("p2p",)  # sources of vLLM that kvtier does not have, shown as 0
_FINISHES = ("stop", "length", "abort", "error", "repetition")

_OWN_PROCESS = ProcessCollector(registry=None)  # the metrics process_… of vLLM's server


def vllm_metrics(statistics: "EngineStatistics", model_name: str) -> Iterator[Metric]:
    """Yield the metrics of one snapshot under vLLM's names. *model_name* is the served name of the model."""
    told = _Labelled(model_name)
    yield from _token_metrics(statistics, told)
    yield from _request_metrics(statistics, told)
    yield from _served_metrics(statistics, told)
    yield from _block_metrics(statistics, told)
    yield from _OWN_PROCESS.collect()


class _Labelled:
    """A helper that fills metrics with the labels common to all metrics of vLLM."""

    def __init__(self, model_name: str) -> None:
        self._labels = (model_name, ENGINE)

    def of(self, name: MetricName, value: float) -> Metric:
        return name.by({self._labels: value})

    def by(self, name: MetricName, values: Mapping[str, float]) -> Metric:
        return name.by({(*self._labels, key): value for key, value in values.items()})

    def histogram(self, name: MetricName, value: HistogramStatistics) -> Metric:
        return name.by_histogram({self._labels: value})


def _token_metrics(statistics: "EngineStatistics", told: _Labelled) -> Iterator[Metric]:
    tokens, num_queried = statistics.tokens, statistics.prefix.queries
    below = tokens.host + tokens.disk + tokens.remote
    yield told.of(names.PROMPT_TOKENS, tokens.num_tokens)
    yield told.by(
        names.PROMPT_TOKENS_BY_SOURCE,
        {"local_compute": tokens.recomputed, "local_cache_hit": tokens.device, "external_kv_transfer": below},
    )
    yield told.of(names.PROMPT_TOKENS_CACHED, tokens.device + below)
    yield told.by(
        names.PROMPT_TOKENS_CACHED_BY_SOURCE,
        {
            "device": tokens.device,
            "host": tokens.host,
            "disk": tokens.disk,
            "external_unspecified": tokens.remote,
            **dict.fromkeys(NEVER_A_SOURCE, 0),
        },
    )
    yield told.of(names.PREFIX_CACHE_QUERIES, num_queried)
    yield told.of(names.PREFIX_CACHE_HITS, tokens.device)
    yield told.of(names.EXTERNAL_QUERIES, num_queried - tokens.device)
    yield told.of(names.EXTERNAL_HITS, below)


def _request_metrics(statistics: "EngineStatistics", told: _Labelled) -> Iterator[Metric]:
    num_waiting, num_promoting = statistics.num_waiting, statistics.num_promoting
    yield told.of(names.REQUESTS_RUNNING, statistics.num_running)
    yield told.of(names.REQUESTS_WAITING, num_waiting + num_promoting)
    yield told.by(names.REQUESTS_WAITING_BY_REASON, {"capacity": num_waiting, "deferred": num_promoting})
    yield told.of(names.NUM_PREEMPTIONS, statistics.prefix.num_preempted)
    device = statistics.cache.tiers[Tier.DEVICE]
    yield told.of(names.KV_CACHE_USAGE, device.leased_bytes / max(1, device.capacity_bytes))


def _served_metrics(statistics: "EngineStatistics", told: _Labelled) -> Iterator[Metric]:
    served = statistics.requests.served
    yield told.of(names.GENERATION_TOKENS, served.num_generated)
    yield told.by(names.REQUEST_SUCCESS, {**dict.fromkeys(_FINISHES, 0), **served.finished})
    for name, found in (
        (names.TTFT, served.ttft),
        (names.TOKEN_GAP, served.token_gap),
        (names.TIME_PER_TOKEN, served.per_token),
        (names.TOTAL, served.total),
        (names.QUEUE, served.queue),
        (names.PREFILL, served.prefill),
        (names.DECODE, served.decode),
        (names.REQUEST_PROMPT_TOKENS, served.prompt_tokens),
        (names.REQUEST_GENERATION_TOKENS, served.generated_tokens),
        (names.REQUEST_COMPUTED_TOKENS, served.computed_tokens),
    ):
        yield told.histogram(name, found)


def _block_metrics(statistics: "EngineStatistics", told: _Labelled) -> Iterator[Metric]:
    cache = statistics.cache
    yield told.histogram(names.BLOCK_IDLE, cache.tiers[Tier.DEVICE].eviction_ages)
    for num_bytes, seconds, route in (
        (names.LOAD_BYTES, names.LOAD_TIME, Route.HOST_TO_DEVICE),
        (names.STORE_BYTES, names.STORE_TIME, Route.DEVICE_TO_HOST),
    ):
        yield told.of(num_bytes, cache.routes[route].num_bytes)
        yield told.of(seconds, cache.routes[route].seconds)
