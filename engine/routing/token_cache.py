"""TokenCache: the tokens of prompts that were asked for last."""

from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b

import msgspec
import numpy as np
from numpy.typing import NDArray

TokenArray = NDArray[np.uint32]


class _Answer(msgspec.Struct, frozen=True):
    tokens: list[int]


_ANSWER = msgspec.json.Decoder(_Answer)


def tokens_in(answer: bytes) -> TokenArray:
    """Those in what `/tokenize` has answered. `msgspec.MsgspecError` or OverflowError if it has none."""
    return np.array(_ANSWER.decode(answer).tokens, dtype=np.uint32)


class TokenCache:
    """Keeps the newest answers, of *most* tokens in all. Owned by one thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[bytes, TokenArray] = OrderedDict()
        self._num_kept = 0  # tokens of all that is kept

    def get(self, body: bytes) -> TokenArray | None:
        """Those that *body* asks `/tokenize` for, whoever asks: the tokens of a text are no secret to who has it."""
        key = _key(body)
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def keep(self, body: bytes, tokens: TokenArray) -> None:
        """Keep what was answered."""
        key = _key(body)
        if key not in self._kept:
            self._kept[key] = tokens
            self._num_kept += len(tokens)
        while self._num_kept > self._most:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept -= len(oldest)


def asking(tokenize: Mapping[str, object]) -> bytes:
    """The body that asks `/tokenize`."""
    return msgspec.json.encode(tokenize)


def _key(body: bytes) -> bytes:
    return blake2b(body, digest_size=16).digest()
