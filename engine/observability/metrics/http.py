"""Metrics that kvtier's HTTP servers update as requests are served."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from kvtier.engine.observability.metrics import names

_TTFT_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_TOKEN_GAP_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)

TOO_MANY = 429


@dataclass(frozen=True, slots=True)
class HttpStatistics:
    """Numbers of requests since the start. *num_4xx* does not include those answered with 429."""

    num_requests: int
    num_4xx: int
    num_429: int
    num_5xx: int


class RequestMetrics:
    """The metrics of every HTTP server of kvtier. Owned by the event loop."""

    def __init__(self, registry: CollectorRegistry, probes: Collection[str] = ()) -> None:
        """Register the metrics.

        `statistics` leaves out requests of the routes *probes*, because they answer 503 while a server starts.
        """
        self._probes = probes
        self._statuses: Counter[int] = Counter()  # requests by the status of their answers
        self._requests = names.HTTP_REQUESTS.counter(registry)
        self.connections_refused = names.HTTP_CONNECTIONS_REFUSED.counter(registry)

    def on_answer(self, route: str, status: int) -> None:
        """Count a request. *route* is a label, so clients must not be able to choose it."""
        if route not in self._probes:
            self._statuses[status] += 1
        self._requests.labels(route, str(status)).inc()

    def statistics(self) -> HttpStatistics:
        """Return the numbers of requests answered so far, other than probes."""
        return HttpStatistics(
            sum(self._statuses.values()),
            sum(number for status, number in self._statuses.items() if 400 <= status < 500 and status != TOO_MANY),
            self._statuses[TOO_MANY],
            sum(number for status, number in self._statuses.items() if status >= 500),
        )


class HttpMetrics(RequestMetrics):
    """The metrics of an HTTP server that generates completions."""

    def __init__(self, registry: CollectorRegistry, probes: Collection[str] = ()) -> None:
        super().__init__(registry, probes)
        self.ttft = names.HTTP_TTFT_SECONDS.histogram(registry, _TTFT_S)
        self.token_gap = names.HTTP_TOKEN_GAP_SECONDS.histogram(registry, _TOKEN_GAP_S)
