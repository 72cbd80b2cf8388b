"""The routes of the sidecar's HTTP server, for its state and for operators' actions."""

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from kvtier.engine.stores.remote_store import remote_stays
from kvtier.sidecar.config import SidecarConfig
from kvtier.sidecar.http.access import HEALTH
from kvtier.sidecar.http.actions import checked, spilled
from kvtier.sidecar.http.explain_routes import EXPLAIN, ExplainRoutes
from kvtier.sidecar.http.metrics import SidecarMetrics
from kvtier.sidecar.http.operated_sidecar import OperatedSidecar
from kvtier.sidecar.http.owner import Owner
from kvtier.sidecar.http.pin_routes import PinRoutes
from kvtier.sidecar.http.views import (
    Snapshot,
    clients_view,
    config_view,
    leases_view,
    snapshot_of,
    stats_view,
    tiers_view,
)
from kvtier.sidecar.layout import Layout
from kvtier.web.api_error import ApiError, json_response
from kvtier.web.dashboard.assets import PAGE, REASONS, page_routes
from kvtier.web.dashboard.dashboard import Dashboard
from kvtier.web.dashboard.routes import DashboardRoutes
from kvtier.web.operating.routes import Operating
from kvtier.web.paths import DATA_PATHS, KVTIER, OPERATE, STATS

log = logging.getLogger(__name__)

SPILL_S = 10.0  # default wait of `/spill`
MAX_SPILL_S = 60.0  # longest wait of `/spill`

OWN = ("/stats", "/tiers", "/clients", "/leases", "/config", "/spill", "/clear", "/pin", "/check")  # paths under KVTIER
PATHS = frozenset({HEALTH, "/ready", "/metrics", EXPLAIN, PAGE, REASONS, *DATA_PATHS, *(KVTIER + path for path in OWN)})

Answer: TypeAlias = Callable[[Request], Awaitable[Response]]


class SidecarRoutes:
    """The handlers of all routes. Most of them query the thread that owns the tiers. Owned by the event loop."""

    def __init__(
        self,
        owner: Owner,
        config: SidecarConfig,
        metrics: SidecarMetrics,
        dashboard: Dashboard,
        operating: Operating | None,
    ) -> None:
        """Create the handlers. *operating* handles operators' commands, such as evict; None if operators have none."""
        self._operating = operating
        self._owner = owner
        self._dashboard = dashboard
        self._sidecar = owner.sidecar
        self._pins = PinRoutes(owner)
        self._explain = ExplainRoutes(owner)
        self._operated = OperatedSidecar(owner, self._pins)
        self._config = config
        self._metrics = metrics

    def app(self) -> Starlette:
        """Return the app with all routes."""
        routes: list[BaseRoute] = [
            Route(HEALTH, self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._text),
        ]
        own: Sequence[tuple[str, str, Answer]] = (
            ("GET", "/stats", self._stats),
            ("GET", "/tiers", self._tiers),
            ("GET", "/clients", self._clients),
            ("GET", "/leases", self._leases),
            ("GET", "/config", self._config_),
            ("POST", "/spill", self._spill),
            ("POST", "/clear", self._clear),
            ("POST", "/pin", self._pins.pin),
            ("DELETE", "/pin", self._pins.unpin),
            ("POST", "/check", self._check),
        )
        routes += [Route(KVTIER + path, answer, methods=[method]) for method, path, answer in own]
        routes.append(Route(EXPLAIN, self._explain.prompt, methods=["POST"]))
        routes.append(Route(f"{EXPLAIN}/{{id:path}}", self._explain.request, methods=["GET"]))
        routes += [*page_routes(), *DashboardRoutes(self._dashboard, lambda _: None).routes()]
        if self._operating is not None:
            routes.append(Route(f"{OPERATE}/{{verb}}", partial(self._operate, self._operating), methods=["POST"]))
        handlers = {ApiError: _api_error, HTTPException: _http_error, Exception: _unexpected}
        return Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]  # each takes its own kind

    async def _operate(self, operating: Operating, request: Request) -> Response:
        return await operating.answer(request, self._operated)

    async def _health(self, _: Request) -> Response:
        """Answer 200 if the thread that owns the tiers responds."""
        await self._owner.ask(lambda: None)
        return json_response({"status": "alive"})

    async def _ready(self, _: Request) -> Response:
        why_not = await self._owner.ask(lambda: self._sidecar.why_not_ready)
        return json_response({"status": why_not or "ready"}, 503 if why_not else 200)

    async def _stats(self, _: Request) -> Response:
        return json_response(stats_view(await self._snapshot()))

    async def _tiers(self, _: Request) -> Response:
        return json_response(tiers_view((await self._snapshot()).statistics.tiers))

    async def _clients(self, _: Request) -> Response:
        return json_response({"clients": clients_view(await self._snapshot())})

    async def _leases(self, _: Request) -> Response:
        return json_response({"leases": leases_view(await self._snapshot())})

    async def _config_(self, _: Request) -> Response:
        return json_response(config_view(self._config))

    async def _text(self, _: Request) -> Response:
        text = self._metrics.text(await self._snapshot())
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    async def _spill(self, request: Request) -> Response:
        """Wait until all chunks are on disk. This starts no writes: the sidecar always writes new chunks to disk."""
        timeout_s = _seconds(_options(request, {"timeout_s"}).get("timeout_s"))
        await spilled(self._owner, timeout_s)
        return json_response({"num_left": 0})

    async def _clear(self, request: Request) -> Response:
        """Evict the chunks of all layouts, or of the layout with the digest in the query, from host memory and disk."""
        digest = _options(request, {"layout"}).get("layout")

        def clear() -> list[str]:
            layouts = [layout for layout in self._layouts() if digest in (None, layout.digest.hex())]
            self._sidecar.clear(layouts)
            return [layout.digest.hex() for layout in layouts]

        cleared = await self._owner.ask(clear)
        if digest is not None and not cleared:
            raise ApiError(404, f"there is no layout {digest[:64]!r}; {STATS} lists all digests", code="no_layout")
        log.warning("http: %d layouts were cleared", len(cleared))
        remote = self._sidecar.remote_where
        return json_response({"cleared": cleared} | ({} if remote is None else {"note": remote_stays(remote)}))

    async def _check(self, request: Request) -> Response:
        """Verify all bookkeeping. The answer is an error if something is inconsistent."""
        _options(request, frozenset())
        layouts = await checked(self._owner)
        return json_response({"status": "in order", "num_layouts": len(layouts)})

    def _layouts(self) -> list[Layout]:
        return [tiers.layout for tiers in self._sidecar.layouts]

    async def _snapshot(self) -> Snapshot:
        return await self._owner.ask(partial(snapshot_of, self._sidecar))


def _options(request: Request, known: frozenset[str] | set[str]) -> dict[str, str]:
    """Return the query parameters. Raise ApiError 400 if a parameter is unknown or given twice."""
    found: dict[str, str] = {}
    for key, value in request.query_params.multi_items():
        if key not in known:
            there = f"use {', '.join(sorted(known))}" if known else "this route has no options"
            raise ApiError(400, f"unknown option {key[:64]!r}; {there}", param=key[:64])
        if key in found:
            raise ApiError(400, f"the option {key!r} is given twice", param=key)
        found[key] = value
    return found


def _seconds(text: str | None) -> float:
    try:
        seconds = SPILL_S if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_SPILL_S:
        message = f"timeout_s {(text or '')[:64]!r}: give seconds from 0 to {MAX_SPILL_S:g}"
        raise ApiError(400, message, param="timeout_s")
    return seconds


async def _api_error(_: Request, error: ApiError) -> Response:
    return error.response()


async def _http_error(request: Request, error: HTTPException) -> Response:
    """Answer a request that Starlette rejects, because of an unknown route or a wrong method."""
    what = f"no such route; the routes are {', '.join(sorted(PATHS))}" if error.status_code == 404 else error.detail
    return ApiError(error.status_code, f"{request.method}: {what}", headers=error.headers).response()


async def _unexpected(_: Request, error: Exception) -> Response:
    log.error("http: a request failed: %r", error)
    return ApiError(500, "internal error; see the sidecar's log").response()
