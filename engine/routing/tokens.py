"""Tokens: those of a question, which a replica is asked for."""

import asyncio
import logging
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
from aiohttp import ClientError, ClientSession

from kvtier.engine.routing.config import TokensConfig
from kvtier.engine.routing.question import Question
from kvtier.engine.routing.replica import Replica
from kvtier.engine.routing.token_cache import TokenArray, TokenCache, asking, tokens_in
from kvtier.engine.routing.upstream import NoAnswer

log = logging.getLogger(__name__)


class Tokens:
    """Asks the least busy replica's `/tokenize`, as only it has the tokenizer and the chat template that count.

    The newest answers are kept. A replica that has no such route is not asked again. Owned by the event loop.
    """

    def __init__(self, config: TokensConfig, session: ClientSession) -> None:
        self._config = config
        self._session = session
        self._cache = TokenCache(config.max_cached)
        self._unable: set[str] = set()
        self.num_asked = self.num_failed = 0

    async def of(
        self, question: Question, replicas: Iterable[Replica], credentials: Mapping[str, str]
    ) -> TokenArray | None:
        """The question's tokens; None if nobody says in time. *credentials*: the headers by which a replica lets in."""
        if question.token_ids is not None:
            return np.array(question.token_ids, dtype=np.uint32)
        able = [each for each in replicas if each.is_open and each.name not in self._unable]
        if not self._config.ask or question.tokenize is None or not able:
            return None
        body = asking(question.tokenize)
        if (kept := self._cache.get(body)) is not None:
            return kept
        tokens = await self._ask(min(able, key=lambda each: each.load.num_waiting_tokens), body, credentials)
        if tokens is not None:
            self._cache.keep(body, tokens)
        return tokens

    async def _ask(self, replica: Replica, body: bytes, credentials: Mapping[str, str]) -> TokenArray | None:
        headers = {"content-type": "application/json", **credentials}
        self.num_asked += 1
        try:
            async with asyncio.timeout(self._config.timeout_s):
                async with self._session.post(f"{replica.url}/tokenize", data=body, headers=headers) as answer:
                    status, content = answer.status, await answer.read()
            if status in (404, 405):
                log.warning("%s has no /tokenize: prompts are compared by their texts", replica.name)
                self._unable.add(replica.name)
            if status == 200:
                return tokens_in(content)
        except (NoAnswer, ClientError, OSError, msgspec.MsgspecError, OverflowError):
            pass  # the text has to do
        self.num_failed += 1
        return None
