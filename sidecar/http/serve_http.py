"""The construction of the HTTP server: the one place where its parts are created and connected."""

import socket
from dataclasses import replace

from kvtier.sidecar.attach_commands import attach_commands
from kvtier.sidecar.config import SidecarConfig
from kvtier.sidecar.http.access import Access, browser_rules, token_of
from kvtier.sidecar.http.app import PATHS, SidecarRoutes
from kvtier.sidecar.http.http_thread import HttpThread, bound_at
from kvtier.sidecar.http.metrics import SidecarMetrics
from kvtier.sidecar.http.owner import ANSWER_S, Owner
from kvtier.sidecar.http.sidecar_source import SidecarSource
from kvtier.sidecar.sidecar import Sidecar
from kvtier.web.dashboard.dashboard import Dashboard
from kvtier.web.dashboard.keeper import history_path, keeper_of
from kvtier.web.gate import ConnectionLimits, Gate
from kvtier.web.operating.routes import Operating

# For monitoring, probes and a few people. Only `/pin` and `/explain` read a body, see `pin_routes.BODY`.
LIMITS = ConnectionLimits(max_header_bytes=16 << 10, header_timeout_s=10.0, max_connections=64, max_per_address=64)


def serve_http(
    sidecar: Sidecar,
    config: SidecarConfig,
    answer_s: float = ANSWER_S,
    bound: socket.socket | None = None,
    operating: Operating | None = None,
) -> HttpThread:
    """Start the HTTP server of *sidecar*. It waits up to *answer_s* seconds for the sidecar's thread.

    The server listens at the socket *bound* if it is given, or else at the configured address. *operating* handles
    operators' verbs; by default there are none. Raises OSError or ValueError with advice if an address or a setting
    cannot be used.
    """
    assert config.http.port != "none", "nothing to serve"
    metrics = SidecarMetrics(config.metrics.compat)
    gate = Gate(limits_of(config), lambda why: metrics.requests.connections_refused.labels(why).inc())
    owner = Owner(sidecar, answer_s)
    source = SidecarSource(owner, attach_commands(config))
    keeper = keeper_of(source.columns, history_path(config.dashboard, config.disk))
    dashboard = Dashboard(source, keeper, config.dashboard.max_viewers)
    routes = SidecarRoutes(owner, config, metrics, dashboard, operating)
    token, rules = token_of(config.http), browser_rules(config.http)
    app = Access(routes.app(), token, rules, PATHS, metrics.requests, operating is not None)
    return HttpThread(app, gate, bound or bound_at(config.http.host, config.http.port), dashboard)


def limits_of(config: SidecarConfig) -> ConnectionLimits:
    """Return the limits on connections, which leave room for all viewers of the dashboard."""
    num_viewers = config.dashboard.max_viewers
    return replace(
        LIMITS,
        max_connections=LIMITS.max_connections + num_viewers,
        max_per_address=LIMITS.max_per_address + num_viewers,
    )
