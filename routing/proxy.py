"""`Proxy`: forwards requests to replicas, and tries another replica if one does not answer."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from aiohttp import ClientSession
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from kvtier.engine.config import ServerConfig
from kvtier.routing.config import RouteConfig
from kvtier.routing.metrics import RouteMetrics
from kvtier.routing.question import CREDENTIALS, SESSION_HEADER, Salts, may_repeat, read_question
from kvtier.routing.replica import Replica
from kvtier.routing.router import RoutedPrompt, Router
from kvtier.routing.tokens import Tokens
from kvtier.routing.upstream import Answer, Asked, Broken, NoAnswer, answered, forwarded
from kvtier.web.api_error import ApiError
from kvtier.web.api_keys import ApiKeys
from kvtier.web.connection import while_connected
from kvtier.web.event_stream import BROKEN_EVENT, replica_failed
from kvtier.web.facts import facts_of
from kvtier.web.request_body import read_body

log = logging.getLogger(__name__)

BODY_S = 60.0  # maximum time to receive a request's body
REFUSED = 503  # the status of a replica that is loading, draining or full, and so has not started the request


@dataclass(slots=True)
class _Way:
    """A request in progress, with the replicas that were tried so far."""

    asked: Asked
    prompt: RoutedPrompt | None  # None: the request has no prompt to look up
    key: bytes  # selects the replica of a request without a prompt
    may_repeat: bool  # whether another replica may be tried even if one may have executed the request
    reading_s: float = 0.0  # time that it took to compute the prompt's prefixes
    tried: set[str] = field(default_factory=set)
    refusal: Answer | None = None  # a complete 503, which is sent if no other replica answers


@dataclass(frozen=True, slots=True)
class _Stop:
    """The replica that a request is sent to next, and the number of prompt tokens that it must compute."""

    replica: Replica
    num_tokens: int


class Proxy:
    """The ASGI app that forwards requests to replicas, for all paths that the router does not answer itself.

    A request is sent to one replica at a time, and to each replica at most once. The next replica is tried if the
    current one cannot be reached, answers 503, or ends before any of its answer is forwarded. In the last case, the
    replica may have executed the request, so a request that must not be executed twice fails instead. Owned by the
    event loop.
    """

    def __init__(
        self,
        config: RouteConfig,
        router: Router,
        tokens: Tokens,
        session: ClientSession,
        metrics: RouteMetrics,
        keys: ApiKeys | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create the proxy.

        *keys* are the replicas' API keys, which tell the tenant of a request. The hashes of cached blocks may depend on
        the tenant.
        """
        self._router, self._tokens, self._session, self._metrics = router, tokens, session, metrics
        self._salts = Salts(keys, config.tenant_isolation == "strict")
        self._limits = ServerConfig(max_body=config.max_body, body_timeout_s=BODY_S)
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request.

        Raises:
            ApiError: If no replica answers and nothing was sent to the client.
            Broken: If an answer ends too early. The caller must then close the connection to the client.
        """
        request = Request(scope, receive)
        body = await read_body(request, self._limits)
        await while_connected(receive, self._pass_on(scope, request.headers, body, send))

    async def _pass_on(self, scope: Scope, headers: Headers, body: bytes, send: Send) -> None:
        way = await self._way(scope, headers, body)
        while (stop := self._next(way)) is not None:
            way.tried.add(stop.replica.name)
            if await self._answer(way, stop, send):
                return  # otherwise, the next replica is tried
        if way.refusal is None:
            self._metrics.failures.labels("no_replica").inc()
            raise ApiError(503, "no replica answers; try again", code="no_replica", headers={"Retry-After": "1"})
        await self._send(way.refusal, send)

    async def _way(self, scope: Scope, headers: Headers, body: bytes) -> _Way:
        path = scope["path"]
        credentials = {name: headers[name] for name in CREDENTIALS if name in headers}
        who = next(iter(credentials.values()), "")
        asked = Asked(scope["method"], _target(scope), _headers_of(scope), body)
        question = read_question(path, body, headers.get(SESSION_HEADER), who)
        # A client's requests without a prompt to look up all go to the same replica, which has the client's documents.
        key = who.encode(errors="surrogatepass")
        if question is None:
            return _Way(asked, None, key, may_repeat=may_repeat(asked.method, path))
        tokens = None
        if self._router.index.block_sizes:
            tokens = await self._tokens.of(question, self._router.replicas.values(), credentials)
        began_at = self._clock()
        prompt = self._router.prompt(question, tokens, self._salts.of(who, question.salt), who)
        return _Way(asked, prompt, key, may_repeat=True, reading_s=self._clock() - began_at)

    def _next(self, way: _Way) -> _Stop | None:
        """Choose the replica that the request is sent to next. Return None if all open replicas were tried."""
        if way.prompt is None:
            name = self._router.any_open(way.key, way.tried)
            if name is not None:
                self._metrics.passed(name)
            return None if name is None else _Stop(self._router.replicas[name], 0)
        began_at = self._clock()
        routed = self._router.choose(way.prompt, way.tried)
        self._metrics.choose_seconds.observe(way.reading_s + self._clock() - began_at)
        if routed is None:
            return None
        self._metrics.sent(way.prompt, routed)
        self._router.sent(way.prompt, routed.choice.name)
        num_computed = max(0, way.prompt.num_tokens - routed.matched.total)
        return _Stop(self._router.replicas[routed.choice.name], num_computed)

    async def _answer(self, way: _Way, stop: _Stop, send: Send) -> bool:
        replica = stop.replica
        with replica.working(stop.num_tokens) as work:
            try:
                async with answered(self._session, replica.url, way.asked) as answer:
                    work.begin()
                    if answer.status == REFUSED and answer.is_whole:
                        self._refused(way, replica, "refused")
                        way.refusal = answer
                        return False
                    if answer.status >= 400 and way.prompt is not None:
                        self._router.refused(way.prompt, replica.name)
                    await self._send(answer, send)
                    return True
            except NoAnswer as error:
                self._give_up(way, replica, error)
                return False

    def _give_up(self, way: _Way, replica: Replica, error: NoAnswer) -> None:
        log.warning("replica %s did not answer: %s", replica.name, error.why)
        if not error.was_connected:
            self._router.mark_dead(replica.name)
        if error.why == "timeout" or (error.was_connected and not way.may_repeat):
            self._metrics.failures.labels(error.why).inc()  # no other replica may be tried
            what = "did not answer in time" if error.why == "timeout" else "ended before it answered"
            raise replica_failed(what, 504 if error.why == "timeout" else 502)
        self._refused(way, replica, error.why)

    def _refused(self, way: _Way, replica: Replica, why: str) -> None:
        self._metrics.retries.labels(why).inc()
        if way.prompt is not None:
            self._router.refused(way.prompt, replica.name)

    async def _send(self, answer: Answer, send: Send) -> None:
        """Forward each part of the answer when it arrives. Raise `Broken` if the replica's answer ends too early."""
        await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
        await send({"type": "http.response.body", "body": answer.first, "more_body": True})
        try:
            async for piece in answer.rest:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Broken:
            self._metrics.failures.labels("broken").inc()
            if answer.is_events:
                await send({"type": "http.response.body", "body": BROKEN_EVENT, "more_body": True})
            raise
        await send({"type": "http.response.body", "body": b""})


def _target(scope: Scope) -> bytes:
    """Return the request's path and query, unchanged."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    return path + (b"?" + scope["query_string"] if scope["query_string"] else b"")


def _headers_of(scope: Scope) -> Sequence[tuple[bytes, bytes]]:
    client = scope["client"][0] if scope.get("client") else "unknown"
    return forwarded(scope["headers"], client, facts_of(scope).request_id)
