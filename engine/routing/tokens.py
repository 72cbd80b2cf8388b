"""Tokens: those of a question, which a replica is asked for."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from hashlib import blake2b

import msgspec
import numpy as np
from aiohttp import ClientError, ClientSession
from numpy.typing import NDArray

from kvtier.engine.routing.config import TokensConfig
from kvtier.engine.routing.question import Question
from kvtier.engine.routing.replica import Replica
from kvtier.engine.routing.upstream import NoAnswer

log = logging.getLogger(__name__)

TokenArray = NDArray[np.uint32]


class _Answer(msgspec.Struct, frozen=True):
    tokens: list[int]


_ANSWER = msgspec.json.Decoder(_Answer)


class Tokens:
    """Asks the least busy replica's `/tokenize`, as only it has the tokenizer and the chat template that count.

    The newest answers are kept. A replica that has no such route is not asked again. Owned by the event loop.
    """

    def __init__(self, config: TokensConfig, session: ClientSession) -> None:
        self._config = config
        self._session = session
        self._kept: OrderedDict[bytes, TokenArray] = OrderedDict()
        self._num_kept = 0  # tokens of all that is kept
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
        body = msgspec.json.encode(question.tokenize)
        key = blake2b(body, digest_size=16).digest()  # whoever asks: the tokens of a text are no secret to who has it
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        tokens = await self._ask(min(able, key=lambda each: each.load.num_waiting_tokens), body, credentials)
        if tokens is not None and key not in self._kept:
            self._keep(key, tokens)
        return tokens

    def _keep(self, key: bytes, tokens: TokenArray) -> None:
        self._kept[key] = tokens
        self._num_kept += len(tokens)
        while self._num_kept > self._config.max_cached:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept -= len(oldest)

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
                return np.array(_ANSWER.decode(content).tokens, dtype=np.uint32)
        except (NoAnswer, ClientError, OSError, msgspec.MsgspecError, OverflowError):
            pass  # the text has to do
        self.num_failed += 1
        return None
