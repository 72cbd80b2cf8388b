"""MetricName: a metric's name, kind, help text and labels, with methods that fill it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from math import inf
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from kvtier.tiers.histogram import HistogramStatistics

_Key = TypeVar("_Key", bound=str | tuple[str, ...])


class Kind(StrEnum):
    """The kinds of metrics, as Prometheus calls them."""

    COUNTER = "counter"  # its samples end in _total
    GAUGE = "gauge"
    HISTOGRAM = "histogram"  # its samples end in _bucket, _sum and _count


_FAMILIES = {Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily}


@dataclass(frozen=True, slots=True)
class MetricName:
    """The definition of a metric.

    *name* does not include the suffix that Prometheus adds. Clients must not be able to choose values of
    *labels*, because each new value is a new time series.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    def of(self, value: float) -> Metric:
        """Return the metric with one sample without labels."""
        return self.by({(): value})

    def by(self, values: Mapping[_Key, float]) -> Metric:
        """Return the metric with one sample for each key of *values*.

        A key is the value of the metric's only label, or the tuple of the values of its labels.
        """
        family: Metric = _FAMILIES[self.kind](self.name, self.help, labels=self.labels)
        for key, value in values.items():
            family.add_metric((key,) if isinstance(key, str) else key, value)  # type: ignore[attr-defined]  # both have it
        return family

    def by_histogram(self, values: Mapping[_Key, HistogramStatistics]) -> Metric:
        """Return the metric with one histogram for each key of *values*.

        A key is the value of the metric's only label, or the tuple of the values of its labels.
        """
        family = HistogramMetricFamily(self.name, self.help, labels=self.labels)
        for key, value in values.items():
            bounds = [floatToGoString(bound) for bound in (*value.bounds, inf)]  # type: ignore[no-untyped-call]
            buckets = list(zip(bounds, accumulate(value.counts), strict=True))
            family.add_metric((key,) if isinstance(key, str) else key, buckets, value.total)
        return family

    def counter(self, registry: CollectorRegistry) -> Counter:
        """Register a counter that is incremented as events happen."""
        return Counter(self.name, self.help, self.labels, registry=registry)

    def histogram(self, registry: CollectorRegistry, bounds: Sequence[float]) -> Histogram:
        """Register a histogram that is updated as events happen. *bounds* are the upper bounds of its buckets."""
        return Histogram(self.name, self.help, self.labels, buckets=bounds, registry=registry)


def counter(name: str, help_text: str, *labels: str) -> MetricName:
    """Define a counter."""
    return MetricName(name, Kind.COUNTER, help_text, labels)


def gauge(name: str, help_text: str, *labels: str) -> MetricName:
    """Define a gauge."""
    return MetricName(name, Kind.GAUGE, help_text, labels)


def histogram(name: str, help_text: str, *labels: str) -> MetricName:
    """Define a histogram."""
    return MetricName(name, Kind.HISTOGRAM, help_text, labels)
