"""Entrance: the API keys, connection limits and counters for all requests, also while the model is being loaded."""

from prometheus_client import CollectorRegistry

from kvtier.engine.config import ServerConfig
from kvtier.engine.observability.metrics.http import HttpMetrics
from kvtier.engine.observability.tracing.tracer import Tracer
from kvtier.web.api_keys import ApiKeys
from kvtier.web.browser_check import BrowserRules
from kvtier.web.gate import ConnectionLimits, Gate
from kvtier.web.operating.routes import Operating
from kvtier.web.paths import PROBES


class Entrance:
    """The part of the server's state that does not need the model. Owned by the event loop.

    `LoadingApp` and `ServingApp` share it. *keys* are the accepted API keys; None: requests need no key. *operating*
    carries out operators' requests, such as evicting blocks; None disables them. *tracer* sends a span of each request;
    None disables tracing.
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
        self.metrics = HttpMetrics(self.registry, PROBES)
        limits = ConnectionLimits(
            settings.max_header,
            settings.header_timeout_s,
            settings.max_connections,
            settings.max_connections_per_address,
        )
        self.gate = Gate(limits, lambda why: self.metrics.connections_refused.labels(why).inc())

    def close(self) -> None:
        """Send the pending spans of the tracer, and close the audit log of operators' requests."""
        if self.tracer is not None:
            self.tracer.close()
        if self.operating is not None:
            self.operating.close()

    @property
    def num_tenants(self) -> int:
        """Number of tenants that have an API key. Without API keys, all clients are one tenant."""
        return 1 if self.keys is None else len(self.keys.tenants)

    @property
    def is_strict(self) -> bool:
        """True if tenants are isolated from each other, so that they share no cached blocks."""
        return self.keys is not None and self.settings.tenant_isolation == "strict"


def browser_rules(settings: ServerConfig, keys: ApiKeys | None) -> BrowserRules | None:
    """Return the rules for refusing requests that a web page of another site sends from a user's browser.

    Return None if clients need an API key, because such a page does not have the key.
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
