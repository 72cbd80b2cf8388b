"""Entrance: what is there before the model is, and what every request passes: who may ask, and what is counted."""

from prometheus_client import CollectorRegistry

from kvtier.engine.config import ServerConfig
from kvtier.engine.metrics import HttpMetrics
from kvtier.engine.server.api_keys import ApiKeys
from kvtier.engine.server.gate import ConnectionLimits, Gate


class Entrance:
    """Owned by the event loop. *keys* may be replaced (`HttpServer.replace_keys`); None: everybody may ask."""

    def __init__(self, settings: ServerConfig, keys: ApiKeys | None) -> None:
        self.settings = settings
        self.keys = keys
        self.registry = CollectorRegistry()
        self.metrics = HttpMetrics(self.registry)
        limits = ConnectionLimits(
            settings.max_header,
            settings.header_timeout_s,
            settings.max_connections,
            settings.max_connections_per_address,
        )
        self.gate = Gate(limits, lambda why: self.metrics.connections_refused.labels(why).inc())

    @property
    def num_tenants(self) -> int:
        """How many tenants may ask; without API keys all clients are one."""
        return 1 if self.keys is None else len(self.keys.tenants)

    @property
    def is_strict(self) -> bool:
        """Whether tenants share nothing."""
        return self.keys is not None and self.settings.tenant_isolation == "strict"
