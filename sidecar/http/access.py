"""The outermost ASGI layer of the HTTP server: request ids, authentication, and counts of requests."""

import logging
from pathlib import Path

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtier.engine.observability.metrics.http import RequestMetrics
from kvtier.engine.observability.tracing.trace_context import TraceContext
from kvtier.sidecar.config import HttpConfig
from kvtier.store.private_file import read_private
from kvtier.web.api_error import ApiError
from kvtier.web.api_keys import ApiKeys
from kvtier.web.browser_check import BrowserRules
from kvtier.web.connection import in_time
from kvtier.web.dashboard.assets import ASSETS, PAGE, REASONS, ROOT
from kvtier.web.paths import OPERATE
from kvtier.web.request_ids import RequestIds, request_id_of

log = logging.getLogger(__name__)

# Probes of this path need no token, because a supervisor has none. The dashboard's page needs none either, because it
# contains no data.
HEALTH = "/health"


def token_of(config: HttpConfig) -> ApiKeys | None:
    """Return the token that requests must carry, or None if they need no token.

    Logs a warning if other users may read or change the token's file. Raises ValueError if the token is too short, or
    if the file cannot be read.
    """
    if not config.has_token:
        return None
    token, where = config.token or "", "http.token"
    if config.token_file is not None:
        where = f"http.token_file {config.token_file}"
        try:
            file = read_private(Path(config.token_file).expanduser())
            token = file.content.decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            what = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ValueError(f"{where}: {what}; give a file that has the token in its only line") from None
        if file.exposure is not None:
            log.warning("%s: %s", where, file.exposure)
    try:
        return ApiKeys({token: "operator"})
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def browser_rules(config: HttpConfig) -> BrowserRules:
    """Return the rules by which a server without a token refuses requests that other sites' pages make in a browser."""
    return BrowserRules.of(
        config.host,
        config.allowed_hosts,
        (),
        host_advice="add the name to http.allowed_hosts, set http.token_file",
        origin_advice="ask without a browser, or set http.token_file",
    )


class Access:
    """The outermost ASGI layer: gives each request its id, refuses requests without the token, and counts all requests.

    Requests are counted by path and status. If no token is configured, any process of this machine may send requests. A
    web page of another site may not, even in a browser on this machine; see `BrowserRules`.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: ApiKeys | None,
        rules: BrowserRules,
        paths: frozenset[str],
        metrics: RequestMetrics,
        has_operators: bool = False,
    ) -> None:
        """Wrap *app*.

        Each path of *paths* is counted separately. All others are counted together, because a client could make up
        any number of paths. With *has_operators*, requests for operators' verbs, such as evict, need not have the
        token, because *app* checks the operators' own tokens.
        """
        self._has_operators = has_operators
        self._app = app
        self._token = token
        self._rules = rules
        self._paths = paths
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, then count it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, headers = 500, Headers(scope=scope)
        trace = TraceContext.of(headers.get("traceparent"))
        ids = RequestIds(request_id_of(headers.get("x-request-id")), None if trace is None else trace.trace_id)
        ids.begin()

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = ids.request_id
            await send(message)

        refusal = self._refusal(scope)
        try:
            await (self._app if refusal is None else refusal.response())(scope, receive, in_time(send_noted))
        finally:
            self._metrics.on_answer(self._label(scope["path"]), status)

    def _label(self, path: str) -> str:
        """Return the label of a path in metrics. Unknown paths share a label, so clients cannot create labels."""
        if path.startswith(f"{ASSETS}/") or path == REASONS:
            return PAGE
        if path in self._paths:
            return path
        return OPERATE if path.startswith(f"{OPERATE}/") else "other"

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._token is None:
            return self._rules.refusal(scope["method"], headers)
        path = scope["path"]
        is_open = path in (HEALTH, ROOT, PAGE, REASONS) or path.startswith(f"{ASSETS}/")
        if is_open or (self._has_operators and path.startswith(f"{OPERATE}/")):
            return None
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._token.tenant_of(token.strip()) is not None:
            return None
        message = "the token is missing or wrong; send it as 'Authorization: Bearer TOKEN'"
        return ApiError(401, message, code="invalid_token", headers={"WWW-Authenticate": "Bearer"})
