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
    """Keeps the newest answers, of *limit* tokens in all. Owned by one thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[bytes, TokenArray] = OrderedDict()
        self._num_kept = 0  # tokens of all that is kept

    def get(self, asker: str, body: bytes) -> TokenArray | None:
        """Return the tokens that *body* asks `/tokenize` for, if they were kept for the same *asker*.

        To another one an answer without delay would tell that the text was asked for before.
        """
        key = _key(asker, body)
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def keep(self, asker: str, body: bytes, tokens: TokenArray) -> None:
        """Keep what was answered to *asker*."""
        key = _key(asker, body)
        if key not in self._kept:
            self._kept[key] = tokens
            self._num_kept += len(tokens)
        while self._num_kept > self._limit:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept -= len(oldest)


def asking(tokenize: Mapping[str, object]) -> bytes:
    """The body that asks `/tokenize`."""
    return msgspec.json.encode(tokenize)


def asker_of(who: str, salt: str | None) -> str:
    """Return by what clients are kept apart: the header that says who asks, and the request's salt."""
    return repr((who, salt))


def _key(asker: str, body: bytes) -> bytes:
    running = blake2b(asker.encode(errors="surrogatepass"), digest_size=16)
    running.update(b"\0" + body)
    return running.digest()
