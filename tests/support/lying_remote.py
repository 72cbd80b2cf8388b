"""`LyingRemote`: a remote store that is slow, reorders, loses, lies and dies, by a seed."""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from kvtier.store.record import Fault
from kvtier.store.remote_store import RemoteRecord, RemoteStore, RemoteUnavailable, RemoteUsage


@dataclass(frozen=True)
class Vices:
    """How often each thing goes wrong: of calls, of keys."""

    fails: float = 0.1  # calls that nobody answers
    reorders: float = 0.1  # calls whose values come in another order
    loses: float = 0.1  # keys whose put is said to be done and is not, or that are missing when they are read
    lies: float = 0.1  # keys of which presence is told the wrong way round, and values with a bit turned or cut short


class LyingRemote:
    """See `RemoteStore`. Slow for as long as its owner holds `lock`; dead while *is_dead*."""

    def __init__(self, inner: RemoteStore, rng: random.Random, vices: Vices) -> None:
        self.is_dead = False
        self.lock = threading.Lock()
        self.num_wrong = 0  # values that went out and are not what was put
        self._inner = inner
        self._rng = rng
        self._vices = vices
        self.where = inner.where

    def get_many(self, keys: Sequence[bytes]) -> list[memoryview | Fault]:
        with self._asked():
            values = [self._spoiled(value) for value in self._inner.get_many(keys)]
            if len(values) > 1 and self._happens(self._vices.reorders):
                values = values[1:] + values[:1]
                self.num_wrong += len(values)
            return values

    def put_many(self, records: Sequence[RemoteRecord]) -> list[bool]:
        with self._asked():
            kept = [record for record in records if not self._happens(self._vices.loses)]
            if kept:
                self._inner.put_many(kept)
            return [not self._happens(self._vices.lies) for _ in records]

    def exist_many(self, keys: Sequence[bytes], apart: bool = False) -> list[bool | None]:
        with self._asked():
            return [self._told(is_there) for is_there in self._inner.exist_many(keys, apart)]

    def forget(self, namespace: bytes) -> None:
        with self._asked():
            self._inner.forget(namespace)

    def usage(self) -> RemoteUsage:
        return self._inner.usage()

    def close(self) -> None:
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _told(self, is_there: bool | None) -> bool | None:
        lies = self._happens(self._vices.lies)
        return None if is_there is None else is_there != lies

    def _asked(self) -> threading.Lock:
        """The lock, once it is certain that somebody answers."""
        if self.is_dead or self._happens(self._vices.fails):
            raise RemoteUnavailable("nobody answers")
        return self.lock

    def _spoiled(self, value: memoryview | Fault) -> memoryview | Fault:
        if isinstance(value, Fault):
            return value
        if self._happens(self._vices.loses):
            return Fault.MISSING
        if not self._happens(self._vices.lies):
            return value
        self.num_wrong += 1
        spoil: Callable[[bytearray], bytearray] = self._rng.choice([self._with_bit_turned, self._cut_short])
        return memoryview(spoil(bytearray(value)))

    def _with_bit_turned(self, value: bytearray) -> bytearray:
        value[self._rng.randrange(len(value))] ^= 1 << self._rng.randrange(8)
        return value

    def _cut_short(self, value: bytearray) -> bytearray:
        return value[: self._rng.randrange(len(value))]

    def _happens(self, how_often: float) -> bool:
        return self._rng.random() < how_often
