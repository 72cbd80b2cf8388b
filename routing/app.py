"""`RouteApp`: the router's ASGI app, which answers some paths itself and passes all others on to replicas."""

from collections.abc import Mapping

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from kvtier.routing.event_feed import EventFeed
from kvtier.routing.metrics import RouteMetrics
from kvtier.routing.proxy import Proxy
from kvtier.routing.router import Router
from kvtier.routing.upstream import Broken
from kvtier.web.api_error import ApiError, json_response
from kvtier.web.browser_check import BrowserRules
from kvtier.web.connection import in_time
from kvtier.web.dashboard.assets import ROOT, redirect_route
from kvtier.web.error_response import error_response
from kvtier.web.facts import Facts
from kvtier.web.operating.audit_log import AuditLog
from kvtier.web.operating.operators import Operators, RefusedTokens
from kvtier.web.request_ids import request_id_of

HEALTH, READY, METRICS = "/health", "/ready", "/metrics"
ROUTE = "/v1/route"
REPLICAS, DRAIN, UNDRAIN = f"{ROUTE}/replicas", f"{ROUTE}/drain", f"{ROUTE}/undrain"
OWN = frozenset({ROOT, HEALTH, READY, METRICS, REPLICAS, DRAIN, UNDRAIN})


class RouteApp:
    """The router's ASGI app. It refuses new requests once *is_ending* is set. Owned by the event loop."""

    def __init__(
        self,
        router: Router,
        proxy: Proxy,
        feeds: Mapping[str, EventFeed],
        metrics: RouteMetrics,
        operators: Operators | None,
        audit: AuditLog | None,
        browser_rules: BrowserRules | None,
    ) -> None:
        """Create the app.

        *feeds* maps each replica's name to the feed of its KV events. *operators* may drain replicas, which then get no
        new requests, and each drain is logged in *audit*. If *operators* or *audit* is None, draining is disabled.
        *browser_rules* refuse requests from web pages of other sites. If *browser_rules* is None, such requests are
        allowed.
        """
        self.is_ending = False
        self.num_running = 0  # admitted requests that have not ended
        self._router, self._proxy, self._feeds, self._metrics = router, proxy, feeds, metrics
        self._operators, self._audit = operators, audit
        self._browser_rules = browser_rules
        self._refused = None if audit is None else RefusedTokens(audit)
        routes = [
            Route(HEALTH, self._health),
            Route(READY, self._ready),
            Route(METRICS, self._text),
            Route(REPLICAS, self._replicas),
            redirect_route(REPLICAS),  # a router has no dashboard
            Route(DRAIN, self._drain, methods=["POST"]),
            Route(UNDRAIN, self._drain, methods=["POST"]),
        ]
        handlers = {ApiError: _api_error, HTTPException: _http_error}
        self._own = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]  # each takes its own error type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        facts = Facts(request_id_of(Headers(scope=scope).get("x-request-id")))
        facts.put(scope)
        facts.ids.begin()
        has_begun = False

        async def send_named(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                headers = MutableHeaders(scope=message)
                if "x-request-id" not in headers:
                    headers["x-request-id"] = facts.request_id
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            await error_response(refusal, scope)(scope, receive, in_time(send_named))
            return
        if scope["path"] in OWN:
            await self._own(scope, receive, in_time(send_named))
            return
        self.num_running += 1
        try:
            if self.is_ending:
                raise ApiError(503, "the router is shutting down; use another router", code="shutting_down")
            await self._proxy(scope, receive, in_time(send_named))
        except ApiError as error:
            assert not has_begun, "an error after the answer has begun"
            await error_response(error, scope)(scope, receive, send_named)
        except (Broken, ClientDisconnect, TimeoutError):
            pass  # the answer is incomplete, so the server cuts the connection
        finally:
            self.num_running -= 1

    def _refusal(self, scope: Scope) -> ApiError | None:
        if self._browser_rules is None or scope["path"] in (HEALTH, READY):
            return None
        return self._browser_rules.refusal(scope["method"], Headers(scope=scope))

    async def _health(self, _: Request) -> Response:
        return json_response({"status": "alive"})

    async def _ready(self, _: Request) -> Response:
        """Return 200 if the router can send requests to a replica, else 503."""
        num_open = sum(each.is_open for each in self._router.replicas.values())
        is_ready = num_open > 0 and not self.is_ending
        status = "about to end" if self.is_ending else "ready" if is_ready else "no replica is ready"
        return json_response({"status": status, "num_open": num_open}, 200 if is_ready else 503)

    async def _text(self, _: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _replicas(self, request: Request) -> Response:
        if self._operators is not None:
            self._operator(request, self._operators)
        return json_response({"object": "list", "data": [self._told(name) for name in self._router.replicas]})

    async def _drain(self, request: Request) -> Response:
        """Stop sending new requests to a replica, or resume. Running requests are not affected."""
        if self._operators is None or self._audit is None:
            message = "draining is disabled; start the router with [operators] or KVTIER_OPERATOR_TOKEN"
            raise ApiError(404, message, code="no_operators")
        who, verb = self._operator(request, self._operators), request.url.path.rsplit("/", 1)[-1]
        name = request.query_params.get("replica", "")
        replica = self._router.replicas.get(name)
        if replica is None:
            known = ", ".join(self._router.replicas)
            self._audit.write(who, verb, {"replica": name[:256]}, {"status": 404})
            message = f"there is no replica {name[:64]!r}; the replicas are {known}"
            raise ApiError(404, message, code="no_replica", param="replica")
        replica.is_draining = verb == "drain"
        self._audit.write(who, verb, {"replica": name}, {"status": 200})
        return json_response(self._told(name))

    def _operator(self, request: Request, operators: Operators) -> str:
        """Return the name of the operator whose token the request has. Raise `ApiError` 401 without a valid token."""
        who = operators.name_of(request.headers.get("authorization", ""))
        if who is None:
            self._metrics.operators_refused.inc()
            if self._refused is not None:
                self._refused.note()
            message = "the operator's token is missing or wrong; send it as 'Authorization: Bearer TOKEN'"
            raise ApiError(401, message, code="invalid_token", headers={"WWW-Authenticate": "Bearer"})
        return who

    def _told(self, name: str) -> Mapping[str, object]:
        replica, feed = self._router.replicas[name], self._feeds.get(name)
        events = None
        if feed is not None:
            numbers = {"batches": feed.num_batches, "gaps": feed.num_gaps, "losses": feed.num_losses}
            events = {"next": feed.next_seq, **numbers}
        return {
            "replica": name,
            "url": replica.url,
            "health": str(replica.health),
            "draining": replica.is_draining,
            **msgspec.to_builtins(replica.load),
            "events": events,
        }


async def _api_error(request: Request, error: ApiError) -> Response:
    return error_response(error, request.scope)


async def _http_error(request: Request, error: HTTPException) -> Response:
    message = f"{error.detail}: {request.method} {request.url.path}"
    return error_response(ApiError(error.status_code, message, headers=error.headers), request.scope)
