"""`Tokens`: gets the token ids of prompts from replicas, because the router has no tokenizer."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec
import numpy as np
from aiohttp import ClientError, ClientSession

from kvtier.routing.config import TokensConfig
from kvtier.routing.question import Question
from kvtier.routing.replica import Replica
from kvtier.routing.token_cache import TokenArray, TokenCache, asking, client_key, tokens_in
from kvtier.routing.upstream import NoAnswer

log = logging.getLogger(__name__)

BELIEVED_S = 60.0  # how long the router remembers whether a replica has the route /tokenize
MAX_ANSWER_BYTES = 8 << 20  # a million tokens
_NOT_FOUND = (404, 405)


class Tokens:
    """A client of the replicas' route `/tokenize`, which returns the token ids of a prompt.

    The router itself has neither the tokenizer nor the chat template. It asks the least busy replica, and caches recent
    answers separately for each client. If a replica lacks the route, the router asks it again after one minute at the
    earliest, because it may have been upgraded. Owned by the event loop.
    """

    def __init__(
        self, config: TokensConfig, session: ClientSession, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._session = session
        self._clock = clock
        self._cache = TokenCache(config.max_cached)
        self._unable: dict[str, float] = {}  # replicas without the route, and until when to remember that
        self._able: dict[str, float] = {}  # replicas with the route, and until when to remember that
        self.num_asked = self.num_failed = 0

    async def of(
        self, question: Question, replicas: Iterable[Replica], credentials: Mapping[str, str]
    ) -> TokenArray | None:
        """Return the token ids of the question's prompt, or None if no replica returns them in time.

        *credentials* are the headers with the client's credentials, which are sent to the replica.
        """
        if question.token_ids is not None:
            return np.array(question.token_ids, dtype=np.uint32)
        able = [each for each in replicas if each.is_open and not self._believed(self._unable, each)]
        if not self._config.ask or question.tokenize is None or not able:
            return None
        body = asking(question.tokenize)
        asker = client_key(next(iter(credentials.values()), ""), question.salt)
        if (kept := self._cache.get(asker, body)) is not None:
            return kept
        tokens = await self._ask(min(able, key=lambda each: each.load.num_waiting_tokens), body, credentials)
        if tokens is not None:
            self._cache.keep(asker, body, tokens)
        return tokens

    async def _ask(self, replica: Replica, body: bytes, credentials: Mapping[str, str]) -> TokenArray | None:
        headers = {"content-type": "application/json", **credentials}
        self.num_asked += 1
        try:
            async with asyncio.timeout(self._config.timeout_s):
                status, content = await self._post(replica, body, headers)
                if status in _NOT_FOUND and not self._believed(self._able, replica):
                    await self._look_for_route(replica, headers)
            if status == 200:
                self._able[replica.name] = self._clock() + BELIEVED_S
                return tokens_in(content)
        except (NoAnswer, ClientError, OSError, msgspec.MsgspecError, OverflowError):
            pass  # fall back to the text
        self.num_failed += 1
        return None

    async def _look_for_route(self, replica: Replica, headers: Mapping[str, str]) -> None:
        """Find out whether a replica that answered 404 lacks the route `/tokenize`, and remember the result.

        A 404 may also be caused by the client's request, such as an unknown model. So this sends a body without a
        prompt: a server without the route answers 404 again, and a server with the route reports another error.
        """
        status, _ = await self._post(replica, b"{}", headers)
        is_lacking = status in _NOT_FOUND
        (self._unable if is_lacking else self._able)[replica.name] = self._clock() + BELIEVED_S
        if is_lacking:
            log.warning("replica %s has no route /tokenize, so the router compares prompts as text", replica.name)

    async def _post(self, replica: Replica, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Return the status and the body of the answer. Raise ClientError if the body is too long."""
        async with self._session.post(f"{replica.url}/tokenize", data=body, headers=headers) as answer:
            content = bytearray()
            async for piece in answer.content.iter_any():
                content += piece
                if len(content) > MAX_ANSWER_BYTES:
                    raise ClientError("the answer of /tokenize is too long")
            return answer.status, bytes(content)

    def _believed(self, until: Mapping[str, float], replica: Replica) -> bool:
        return self._clock() < until.get(replica.name, float("-inf"))
