"""Metrics that kvtier's HTTP servers update as requests are served."""

from prometheus_client import CollectorRegistry

from kvtier.engine.observability.metrics import names

_TTFT_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_TOKEN_GAP_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class RequestMetrics:
    """The metrics of every HTTP server of kvtier."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = names.HTTP_REQUESTS.counter(registry)
        self.connections_refused = names.HTTP_CONNECTIONS_REFUSED.counter(registry)


class HttpMetrics(RequestMetrics):
    """The metrics of an HTTP server that generates completions."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.ttft = names.HTTP_TTFT_SECONDS.histogram(registry, _TTFT_S)
        self.token_gap = names.HTTP_TOKEN_GAP_SECONDS.histogram(registry, _TOKEN_GAP_S)
