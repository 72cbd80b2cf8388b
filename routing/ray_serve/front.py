"""`Front`: the application's HTTP entry point, which passes each request to a replica."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
import numpy as np
from ray.exceptions import RayActorError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from kvtier.routing.question import CREDENTIALS, SESSION_HEADER, Question, Salts, may_repeat, read_question
from kvtier.routing.ray_serve.config import RayServeConfig, server_settings
from kvtier.routing.ray_serve.received_request import ReceivedRequest, Stage, Wanted, Way
from kvtier.routing.token_cache import TokenArray, TokenCache, asking, client_key, tokens_in
from kvtier.server.entrance import browser_rules
from kvtier.web.api_error import ApiError
from kvtier.web.api_keys import ApiKeys
from kvtier.web.error_response import error_response
from kvtier.web.event_stream import BROKEN_EVENT, replica_failed
from kvtier.web.facts import Facts
from kvtier.web.paths import TOKENIZE
from kvtier.web.request_body import read_body
from kvtier.web.request_ids import request_id_of

log = logging.getLogger(__name__)

MAX_TRIES = 3  # attempts to answer a request, each after the replica of the previous attempt has died


@dataclass(frozen=True, slots=True)
class _Begun:
    """An answer that has begun: its status and headers (*head*), the first part of its body, and the rest."""

    head: Message
    first: Message
    rest: AsyncGenerator[Message]


class Front:
    """The deployment that passes each request to a replica of the engine, and streams the answer back.

    If the replica dies before the first byte of the answer, another replica is tried, unless the request must not be
    executed twice. Owned by the event loop.
    """

    def __init__(self, engine: DeploymentHandle, config: RayServeConfig) -> None:
        loaded = config.engine_config()
        self._engine = engine.options(method_name="answer", stream=True)
        self._settings = server_settings(loaded)
        self._tokens = TokenCache(config.tokens.max_cached)
        self._tokens_config = config.tokens
        keys = ApiKeys.of(loaded.server.api_keys)
        self._browser_rules = browser_rules(self._settings, keys)
        self._salts = Salts(keys, loaded.server.tenant_isolation == "strict")

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        facts = Facts(request_id_of(request.headers.get("x-request-id")))
        facts.put(request.scope)
        try:
            if self._browser_rules is not None:
                refusal = self._browser_rules.refusal(request.method, request.headers)
                if refusal is not None:
                    raise refusal
            call = _call(request, await read_body(request, self._settings), facts.request_id)
            way = await self._way(call, request)
            return await self._answer(call, way)
        except ApiError as error:
            return error_response(error, request.scope)

    async def _way(self, call: ReceivedRequest, request: Request) -> Way:
        credentials = {name: request.headers[name] for name in CREDENTIALS if name in request.headers}
        who = next(iter(credentials.values()), "")
        question = read_question(call.path, call.body, request.headers.get(SESSION_HEADER), who)
        if question is None:
            return Way(key=who.encode(errors="surrogatepass"))
        tokens = await self._tokens_of(question, credentials)
        return Way(Wanted(question, tokens, self._salts.of(who, question.salt), who))

    async def _tokens_of(self, question: Question, credentials: Mapping[str, str]) -> TokenArray | None:
        """Return the prompt's token ids, or None if no replica returns them in time.

        The token ids are in the request itself or in the cache, or come from a replica's `/tokenize`.
        """
        if question.token_ids is not None:
            return np.array(question.token_ids, dtype=np.uint32)
        if not self._tokens_config.ask or question.tokenize is None:
            return None
        body = asking(question.tokenize)
        asker = client_key(next(iter(credentials.values()), ""), question.salt)
        if (kept := self._tokens.get(asker, body)) is not None:
            return kept
        headers = [(name.encode(), value.encode("latin-1")) for name, value in credentials.items()]
        call = ReceivedRequest("POST", TOKENIZE, b"", [(b"content-type", b"application/json"), *headers], body)
        try:
            async with asyncio.timeout(self._tokens_config.timeout_s), aclosing(self._ask(call, Way())) as answer:
                found = [message async for message in answer]
            if found[0]["status"] != 200:
                return None
            tokens = tokens_in(b"".join(each.get("body", b"") for each in found[1:]))
        except (TimeoutError, RayActorError, RayServeException, msgspec.MsgspecError, OverflowError):
            return None  # fall back to the text
        self._tokens.keep(asker, body, tokens)
        return tokens

    async def _answer(self, call: ReceivedRequest, way: Way) -> Response:
        for _ in range(MAX_TRIES):
            try:
                begun = await self._begin(call, way)
            except RayActorError as error:
                log.warning("a replica died before it answered: %s", error)
                if not may_repeat(call.method, call.path):
                    break
                way = Way(way.wanted, way.key)  # a new one, because the stage of the previous one is ENDED
            except RayServeException as error:
                raise ApiError(503, f"no replica answers: {error}", code="no_replica") from None
            else:
                response = StreamingResponse(_body(begun), begun.head["status"])
                response.raw_headers = list(begun.head["headers"])
                return response
        raise replica_failed("ended before it answered")

    async def _begin(self, call: ReceivedRequest, way: Way) -> _Begun:
        answer = self._ask(call, way)
        try:
            return _Begun(await anext(answer), await anext(answer), answer)
        except BaseException:
            await answer.aclose()
            raise

    async def _ask(self, call: ReceivedRequest, way: Way) -> AsyncGenerator[Message]:
        """Call a replica and yield its answer. Record in *way*, which the request router reads, the stage of the call.

        The call is cancelled if the generator is closed.
        """
        answer = self._engine.remote(call, way)
        try:
            async for message in answer:
                if message["type"] == "http.response.body":
                    way.stage = Stage.ANSWERING
                yield message
        finally:
            way.stage = Stage.ENDED
            answer.cancel()


async def _body(begun: _Begun) -> AsyncGenerator[bytes]:
    """Yield the bytes of the answer's body. If the replica dies, raise its error, which closes the connection.

    If the answer is a stream of server-sent events, yield an error event before raising.
    """
    is_events = dict(begun.head["headers"]).get(b"content-type", b"").startswith(b"text/event-stream")
    try:
        yield begun.first.get("body", b"")
        async for message in begun.rest:
            yield message.get("body", b"")
    except RayActorError:
        if is_events:
            yield BROKEN_EVENT
        raise
    finally:
        await begun.rest.aclose()


def _call(request: Request, body: bytes, request_id: str) -> ReceivedRequest:
    scope = request.scope
    path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
    headers = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
    headers.append((b"x-request-id", request_id.encode()))
    client = None if request.client is None else (request.client.host, request.client.port)
    return ReceivedRequest(scope["method"], path, scope["query_string"], headers, body, client)
