"""The catalogue of metrics: what the documentation says, and what is told to Prometheus, is what it has."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.engine.observability.metrics.http import HttpMetrics, HttpStatistics
from kvtier.engine.observability.metrics.metric_name import Kind, counter, gauge
from kvtier.engine.observability.metrics.names import CATALOGUE


def test_no_two_metrics_have_one_name() -> None:
    names = [each.name for each in CATALOGUE]

    assert len(set(names)) == len(names)


def test_what_is_counted_as_it_happens_is_told_with_the_kind_and_help_of_the_catalogue() -> None:
    registry = CollectorRegistry()
    metrics = HttpMetrics(registry)
    metrics.on_answer("/health", 200)
    metrics.connections_refused.labels("header").inc()

    families = list(text_string_to_metric_families(generate_latest(registry).decode()))

    told = {(each.name, each.type, each.documentation) for each in families if not each.name.endswith("_created")}
    assert told == {
        (each.name, each.kind.value, each.help) for each in CATALOGUE if each.name.startswith("kvtier_http")
    }


def test_errors_of_http_are_counted_by_their_class_and_429_alone() -> None:
    metrics = HttpMetrics(CollectorRegistry(), {"/ready"})
    metrics.on_answer("/ready", 503)  # while the model is loaded
    for status in (200, 200, 304, 400, 404, 429, 429, 500, 503):
        metrics.on_answer("/v1/completions", status)

    assert metrics.statistics() == HttpStatistics(num_requests=9, num_4xx=2, num_429=2, num_5xx=2)


def test_counters_end_in_total_and_gauges_do_not() -> None:
    families = [counter("a_bytes", "A", "tier").by({"host": 1}), gauge("b", "B").of(2)]

    samples = {sample.name: dict(sample.labels) for family in families for sample in family.samples}

    assert samples == {"a_bytes_total": {"tier": "host"}, "b": {}}
    assert not any(each.name.endswith("_total") for each in CATALOGUE if each.kind is not Kind.COUNTER)
