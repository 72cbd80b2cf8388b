"""The catalogue of metrics: what the documentation says, and what is told to Prometheus, is what it has."""

import re
from pathlib import Path

import pytest
from peer_boards import BOARDS, page_of
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvtier.engine.observability.metrics.compat.lmcache_names import LMCACHE_CATALOGUE
from kvtier.engine.observability.metrics.compat.vllm_names import VLLM_CATALOGUE
from kvtier.engine.observability.metrics.http import HttpMetrics, HttpStatistics
from kvtier.engine.observability.metrics.metric_name import Kind, MetricName, counter, gauge
from kvtier.engine.observability.metrics.names import CATALOGUE

DOCS = Path(__file__).parents[4] / "docs" / "metrics.md"


def test_no_two_metrics_have_one_name() -> None:
    names = [each.name for each in CATALOGUE]

    assert len(set(names)) == len(names)


def test_the_documentation_names_exactly_the_metrics_that_there_are() -> None:
    in_tables = [line for line in DOCS.read_text().splitlines() if line.startswith("| `kvtier_")]
    named = [name for line in in_tables for name in re.findall(r"`(kvtier_\w+)`", line.split("|")[1])]

    assert sorted(named) == sorted(each.name for each in CATALOGUE)


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_the_documentation_has_the_metrics_labels(metric: MetricName) -> None:
    name, labels = metric.name, metric.labels
    rows = [line.split("|") for line in DOCS.read_text().splitlines() if line.startswith("| `kvtier_")]
    _, _, found, *_ = next(row for row in rows if f"`{name}`" in row[1])

    assert set(re.findall(r"`(\w+)`", found)) == set(labels)


@pytest.mark.parametrize("catalogue", [VLLM_CATALOGUE, LMCACHE_CATALOGUE], ids=["vllm", "lmcache"])
def test_the_documentation_names_exactly_the_names_of_others_that_are_told(catalogue: tuple[MetricName, ...]) -> None:
    beside = {"model_name", "engine"} if catalogue is VLLM_CATALOGUE else set()
    rows = [line.split("|") for line in DOCS.read_text().splitlines() if line.startswith(f"| `{catalogue[0].name[:5]}")]

    named = {
        name: set(re.findall(r"`(\w+)`", row[2])) | beside for row in rows for name in re.findall("`([^`]+)`", row[1])
    }

    assert named == {each.name: set(each.labels) for each in catalogue}


def test_the_documentation_has_each_panel_of_the_boards_of_others_and_how_far_it_is_served() -> None:
    assert page_of(BOARDS.values()) in DOCS.read_text()


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
    metrics = HttpMetrics(CollectorRegistry())
    for status in (200, 200, 304, 400, 404, 429, 429, 500, 503):
        metrics.on_answer("/v1/completions", status)

    assert metrics.statistics() == HttpStatistics(num_requests=9, num_4xx=2, num_429=2, num_5xx=2)


def test_counters_end_in_total_and_gauges_do_not() -> None:
    families = [counter("a_bytes", "A", "tier").by({"host": 1}), gauge("b", "B").of(2)]

    samples = {sample.name: dict(sample.labels) for family in families for sample in family.samples}

    assert samples == {"a_bytes_total": {"tier": "host"}, "b": {}}
    assert not any(each.name.endswith("_total") for each in CATALOGUE if each.kind is not Kind.COUNTER)
