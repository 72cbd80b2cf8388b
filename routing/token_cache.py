"""`TokenCache`: a cache of the token ids of recent prompts."""

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
    """Return the token ids in an answer of `/tokenize`.

    Raises `msgspec.MsgspecError` or OverflowError if the answer has no valid token ids.
    """
    return np.array(_ANSWER.decode(answer).tokens, dtype=np.uint32)


class TokenCache:
    """A cache of recent answers of `/tokenize`, with at most *limit* tokens in total. Owned by one thread."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[bytes, TokenArray] = OrderedDict()
        self._num_kept = 0  # tokens of all answers

    def get(self, asker: str, body: bytes) -> TokenArray | None:
        """Return the cached answer to the request *body* of the client *asker*, or None.

        Clients share no answers, because a fast answer would reveal that another client has sent the same text.
        """
        key = _key(asker, body)
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def keep(self, asker: str, body: bytes, tokens: TokenArray) -> None:
        """Cache the answer to the request *body* of the client *asker*."""
        key = _key(asker, body)
        if key not in self._kept:
            self._kept[key] = tokens
            self._num_kept += len(tokens)
        while self._num_kept > self._limit:
            _, oldest = self._kept.popitem(last=False)
            self._num_kept -= len(oldest)


def asking(tokenize: Mapping[str, object]) -> bytes:
    """Return *tokenize*, the body of a request to `/tokenize`, as JSON."""
    return msgspec.json.encode(tokenize)


def client_key(who: str, salt: str | None) -> str:
    """Return the string by which a `TokenCache` tells clients apart: the credentials header *who* and the *salt*."""
    return repr((who, salt))


def _key(asker: str, body: bytes) -> bytes:
    running = blake2b(asker.encode(errors="surrogatepass"), digest_size=16)
    running.update(b"\0" + body)
    return running.digest()
