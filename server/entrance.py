"""Entrance: the keys, connection limits and counters that apply to every request, even before the model is loaded."""

from prometheus_client import CollectorRegistry

from kvtier.engine.config import ServerConfig
from kvtier.engine.observability.metrics.http import HttpMetrics
from kvtier.engine.observability.tracing.tracer import Tracer
from kvtier.web.api_keys import ApiKeys
from kvtier.web.browser_check import BrowserRules
from kvtier.web.gate import ConnectionLimits, Gate
from kvtier.web.operating.routes import Operating


class Entrance:
    """The state that `LoadingApp` and `ServingApp` share. Owned by the event loop.

    *keys* are the accepted API keys; None accepts requests without a key. `HttpServer.replace_keys` replaces them.
    *operating* carries out operators' requests, such as evicting blocks; None disables them. *tracer* sends a span of
    each request; None disables tracing.
    """

    def __init__(
        self,
        settings: ServerConfig,
        keys: ApiKeys | None,
        operating: Operating | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.settings = settings
        self.tracer = tracer
        self.operating = operating
        self.keys = keys
        self.browser_rules = browser_rules(settings, keys)
        self.registry = CollectorRegistry()
        self.metrics = HttpMetrics(self.registry)
        limits = ConnectionLimits(
            settings.max_header,
            settings.header_timeout_s,
            settings.max_connections,
            settings.max_connections_per_address,
        )
        self.gate = Gate(limits, lambda why: self.metrics.connections_refused.labels(why).inc())

    def close(self) -> None:
        """Send the pending spans, and close the audit log."""
        if self.tracer is not None:
            self.tracer.close()
        if self.operating is not None:
            self.operating.close()

    @property
    def num_tenants(self) -> int:
        """Number of tenants with a key; without API keys all clients are one tenant."""
        return 1 if self.keys is None else len(self.keys.tenants)

    @property
    def is_strict(self) -> bool:
        """Whether tenants share no cached blocks."""
        return self.keys is not None and self.settings.tenant_isolation == "strict"


def browser_rules(settings: ServerConfig, keys: ApiKeys | None) -> BrowserRules | None:
    """Return the rules that refuse requests from web pages of other sites.

    Return None if clients need a key, because such pages do not have one.
    """
    if keys is not None:
        return None
    return BrowserRules.of(
        settings.host,
        settings.allowed_hosts,
        settings.cors_origins,
        host_advice="add the name to server.allowed_hosts or --allow-host, or give --api-keys",
        origin_advice="add their origin to server.cors_origins, or give --api-keys",
    )
