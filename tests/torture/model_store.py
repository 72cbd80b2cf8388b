"""A store and what it must hold: every call works, or raises OSError and changes nothing; no byte is ever wrong."""

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from torture_blocks import KINDS, blob_of, chain, key_of, number_of, numbers_in, open_store, read_numbers

from kvtier.store.blob_store import StoreFull
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.record import Fault

BATCH_BLOCKS = 8

_T = TypeVar("_T")


@dataclass
class ModelStore:
    """Owned by one thread. `there` is exact as long as every `OSError` means that nothing happened but for what it
    says was evicted."""

    folder: Path
    capacity_bytes: int
    codec: str
    durability: str
    rng: random.Random
    there: set[int] = field(default_factory=set)
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    doubtful: set[int] = field(default_factory=set)  # of puts that failed: at level commit perhaps only their sync did
    _chain_ids: "itertools.count[int]" = field(default_factory=itertools.count)
    _store: LmdbStore | None = None

    @property
    def store(self) -> LmdbStore:
        assert self._store is not None, "the store is not open"
        return self._store

    @property
    def is_open(self) -> bool:
        return self._store is not None

    @property
    def capacity(self) -> int:
        """Of the disk there is, in bytes."""
        return self.store.statistics().capacity_bytes

    def open(self) -> None:
        """OSError if it cannot be."""
        self._store = self._timed(lambda: open_store(self.folder, self.capacity_bytes, self.codec, self.durability))

    def close(self) -> None:
        """Closed in any case; OSError if that was not clean."""
        store, self._store = self.store, None
        self._timed(store.close)

    def abandon(self) -> None:
        """Closed, and nobody minds how."""
        with suppress(OSError):
            self.close()

    def try_anything(self) -> OSError | None:
        """One random call, and a look at what came of it."""
        act = self.rng.choices([self.put, self.touch, self.delete, self.read, self.sync], [10, 2, 2, 4, 1])[0]
        try:
            act()
        except OSError as error:
            self.outcomes[f"{act.__name__}: {type(error).__name__}"] += 1
            return error
        self.outcomes[f"{act.__name__}: done"] += 1
        return None

    def put(self, kind: str = "") -> None:
        """A chain's blocks, tail first."""
        numbers = chain(kind or self.rng.choice(KINDS), next(self._chain_ids))[::-1][
            : self.rng.randint(1, BATCH_BLOCKS)
        ]
        if self.there and self.rng.random() < 0.2:
            numbers.append(self.rng.choice(sorted(self.there)))
        blobs = [blob_of(number) for number in numbers]
        try:
            evicted = self._timed(lambda: self.store.put_many(blobs))
        except OSError as error:
            if isinstance(error, StoreFull):
                self.there -= {number_of(key) for key in error.evicted}
            self.doubtful |= set(numbers) - self.there
            raise
        self.there |= set(numbers)
        self.there -= {number_of(key) for key in evicted}
        self.doubtful.clear()

    def touch(self) -> None:
        keys = [key_of(number) for number in self._some()]
        self._timed(lambda: self.store.touch(keys))

    def delete(self) -> None:
        numbers = set(self._some())
        keys = [key_of(number) for number in numbers]
        num_deleted = self._timed(lambda: self.store.delete(keys))
        assert num_deleted == len(numbers & self.there), f"{num_deleted} of {len(numbers & self.there)} were deleted"
        self.there -= numbers

    def delete_one(self) -> None:
        """Any one that is there, if any is."""
        numbers = sorted(self.there)[:1]
        self.store.delete([key_of(number) for number in numbers])
        self.there -= set(numbers)

    def read_any(self, numbers: list[int]) -> tuple[list[int], dict[int, Fault]]:
        """Which of *numbers* came back right, and what of the others; wrong bytes are an AssertionError."""
        return self._timed(lambda: read_numbers(self.store, numbers))

    def read(self) -> None:
        """A read never raises; with faults about it may miss, but no record is bad."""
        numbers = self._some()
        _, faults = self._timed(lambda: read_numbers(self.store, numbers))
        assert set(faults.values()) <= {Fault.MISSING, Fault.IO_ERROR}, f"bad records: {faults}"
        for fault in faults.values():
            self.outcomes[f"read: {fault}"] += 1

    def sync(self) -> None:
        self._timed(self.store.sync)

    def assert_as_expected(self) -> None:
        """The same keys as here, and no other."""
        found = self._timed(lambda: numbers_in(self.store))
        assert len(set(found)) == len(found), "a key stands twice"
        missing, extra = self.there - set(found), set(found) - self.there
        if self.durability == "commit" and self.doubtful:
            self.there |= extra & self.doubtful
            extra -= self.doubtful
        assert (missing, extra) == (set(), set()), f"missing {sorted(missing)}, not expected {sorted(extra)}"

    def assert_whole(self) -> None:
        """As expected, every block bit for bit, and the books agree."""
        self.assert_as_expected()
        self.store.check()
        numbers = sorted(self.there)
        _, faults = read_numbers(self.store, numbers)
        assert faults == {}
        faults_seen = [fault for _, fault in self.store.verify() if fault is not None]
        assert faults_seen == []

    def _some(self) -> list[int]:
        numbers = sorted(self.there)
        return [*self.rng.sample(numbers, min(len(numbers), self.rng.randint(1, 6))), self.rng.randrange(1 << 20)]

    def _timed(self, call: Callable[[], _T]) -> _T:
        began = time.monotonic()
        try:
            return call()
        finally:
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
