"""`TokenCache`: the tokens of the most recent prompts."""

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
    """Return the tokens in an answer of `/tokenize`. Raise `msgspec.MsgspecError` or OverflowError if it has none."""
    return np.array(_ANSWER.decode(answer).tokens, dtype=np.uint32)


class TokenCache:
    """A cache of the newest answers of `/tokenize`, with at most *limit* tokens in all. Owned by one thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[bytes, TokenArray] = OrderedDict()
        self._num_kept = 0  # tokens of all answers

    def get(self, asker: str, body: bytes) -> TokenArray | None:
        """Return the answer to *body*, a request to `/tokenize`, if it was kept for the same *asker*, else None.

        Askers share no answers, because an answer without delay would reveal that another client has sent the text.
        """
        key = _key(asker, body)
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def keep(self, asker: str, body: bytes, tokens: TokenArray) -> None:
        """Keep the answer for *asker*."""
        key = _key(asker, body)
        if key not in self._kept:
            self._kept[key] = tokens
            self._num_kept += len(tokens)
        while self._num_kept > self._limit:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept -= len(oldest)


def asking(tokenize: Mapping[str, object]) -> bytes:
    """Return the body of a request to `/tokenize`."""
    return msgspec.json.encode(tokenize)


def client_key(who: str, salt: str | None) -> str:
    """Return the key that keeps clients apart: the header with the credentials, and the request's salt."""
    return repr((who, salt))


def _key(asker: str, body: bytes) -> bytes:
    running = blake2b(asker.encode(errors="surrogatepass"), digest_size=16)
    running.update(b"\0" + body)
    return running.digest()
