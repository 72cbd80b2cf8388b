"""The two outermost layers of the server: `Access` logs and counts all requests, `KeyCheck` checks their API keys."""

import asyncio
import logging
import time
from dataclasses import replace

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtier.engine.observability.tracing.trace_context import Attribute, Span, TraceContext
from kvtier.server.entrance import Entrance
from kvtier.web.api_error import ApiError
from kvtier.web.error_response import error_response
from kvtier.web.facts import Facts, facts_of
from kvtier.web.paths import OF_ALL, OPERATE, PROBES, QUIET, is_anthropics, is_open, label_of
from kvtier.web.request_ids import request_id_of

log = logging.getLogger(__name__)

CLIENT_LEFT = 499  # nginx's number, for logs and metrics: the client disconnected before the answer was complete


class Access:
    """The outermost ASGI layer. It gives each request an id, and logs and counts the request when it has ended."""

    def __init__(self, app: ASGIApp, entrance: Entrance) -> None:
        self._app = app
        self._entrance = entrance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to the inner app, then log and count it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        facts = Facts(request_id_of(Headers(scope=scope).get("x-request-id")))
        facts.put(scope)
        status, began_at = 500, time.monotonic()
        span = self._begin_span(scope, facts)
        facts.ids.begin()

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = facts.request_id
                if is_anthropics(scope["path"]):
                    headers["request-id"] = facts.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except asyncio.CancelledError:
            facts.client_left = True
            raise
        finally:
            status = CLIENT_LEFT if facts.client_left else status
            seconds = time.monotonic() - began_at
            self._tell(scope, facts, status, seconds)
            if span is not None and self._entrance.tracer is not None:
                self._entrance.tracer.end(_ended(span, facts, status, seconds))

    def _begin_span(self, scope: Scope, facts: Facts) -> Span | None:
        """Return a new tracing span for the request, or None if the request is not traced.

        In both cases, the trace id is recorded in *facts* for the log.
        """
        header, path = Headers(scope=scope).get("traceparent"), label_of(scope["path"])
        if (tracer := self._entrance.tracer) is None or path in QUIET:
            facts.trace = TraceContext.of(header)
            return None
        facts.trace, parent_id = tracer.begin(header)
        if not facts.trace.is_sampled:
            return None
        attributes: dict[str, Attribute] = {"http.request.method": scope["method"], "http.route": path}
        now = time.time()
        return Span(f"{scope['method']} {path}", facts.trace, parent_id, now, now, attributes, is_server=True)

    def _tell(self, scope: Scope, facts: Facts, status: int, seconds: float) -> None:
        path = label_of(scope["path"])
        self._entrance.metrics.on_answer(path, status)
        fields = {
            **facts.ids.fields(),
            "method": scope["method"],
            "path": path,
            "status": status,
            "duration_s": round(seconds, 4),
            "tenant": facts.tenant,
            **facts.fields,
        }
        level = logging.DEBUG if path in QUIET and status not in (401, 403) else logging.INFO
        log.log(level, "request", extra={"fields": {key: value for key, value in fields.items() if value is not None}})


def _ended(span: Span, facts: Facts, status: int, seconds: float) -> Span:
    """Return a copy of *span* with its end time and the outcome of its request."""
    known: dict[str, Attribute | None] = {
        **span.attributes,
        "http.response.status_code": status,
        "kvtier.request_id": facts.request_id,
        "kvtier.tenant": facts.tenant,
    }
    attributes = {name: value for name, value in known.items() if value is not None}
    return replace(span, end=span.start + seconds, attributes=attributes, is_failed=status >= 500)


class KeyCheck:
    """An ASGI layer that refuses requests without a known API key, and records the tenant of the key.

    If the server has no key file, the layer only refuses requests that browsers send for web pages of other sites.
    """

    def __init__(self, app: ASGIApp, entrance: Entrance) -> None:
        self._app = app
        self._entrance = entrance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request with 401 or 403, or pass it on to the inner app."""
        refusal = None
        if scope["type"] == "http":
            refusal = self._of_browser(scope)
            if refusal is None and not is_open(scope["path"]):
                refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await error_response(refusal, scope)(scope, receive, send)

    def _of_browser(self, scope: Scope) -> ApiError | None:
        rules = self._entrance.browser_rules
        if rules is None or scope["path"] in PROBES:
            return None
        return rules.refusal(scope["method"], Headers(scope=scope))

    def _refusal(self, scope: Scope) -> ApiError | None:
        entrance = self._entrance
        if entrance.keys is None or (entrance.operating is not None and scope["path"].startswith(f"{OPERATE}/")):
            return None  # operators send a token of their own, which `Operating` checks
        key = _key_of(Headers(scope=scope))
        tenant = None if key is None else entrance.keys.tenant_of(key)
        if tenant is None:
            message = (
                "the API key is missing or unknown; send a known one as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            )
            headers = {"WWW-Authenticate": "Bearer"}
            return ApiError(401, message, code="invalid_api_key", headers=headers)
        facts_of(scope).tenant = tenant
        # Metrics count all tenants together, so they would reveal other tenants' activity.
        if scope["path"] in OF_ALL and entrance.is_strict and tenant not in entrance.settings.metrics_tenants:
            return ApiError(
                403,
                "only the tenants in server.metrics_tenants may read metrics; ask the operator to add yours",
                code="forbidden",
            )
        return None


def _key_of(headers: Headers) -> str | None:
    """Return the request's API key: the bearer token of OpenAI's clients, or the header x-api-key of Anthropic's."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")
