"""MetricsServer: serves `/metrics` on `metrics_port` for an engine without its own HTTP server."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, start_http_server

from kvtier.engine.config import Config
from kvtier.engine.observability.metrics.collector import EngineCollector

if TYPE_CHECKING:
    from kvtier.engine.core import EngineStatistics


class MetricsServer(Protocol):
    """A running server of `/metrics`, or an object that does nothing if no port is configured."""

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

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def serve_metrics(statistics: "Callable[[], EngineStatistics]", config: Config, model_name: str) -> MetricsServer:
    """Serve `/metrics` on the configured port, if there is one. Raise OSError if the port is taken."""
    if config.metrics_port is None:
        return _NoServer()
    try:
        return _HttpServer(
            EngineCollector(statistics, config.metrics.compat, model_name), config.metrics_host, config.metrics_port
        )
    except OSError as error:
        where = f"{config.metrics_host}:{config.metrics_port}"
        raise OSError(f"metrics: cannot serve on {where} ({error.strerror}); choose another metrics_port") from error
