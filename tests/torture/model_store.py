"""A store and a model of it: every call works, or raises OSError and changes nothing; no byte is ever wrong."""

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
    """A store and the numbers of the blocks that it must have; owned by one thread.

    `there` is exact as long as every `OSError` means that nothing happened but the evictions that it tells.
    """

    folder: Path
    capacity_bytes: int
    codec: str
    durability: str
    rng: random.Random
    there: set[int] = field(default_factory=set)
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    doubtful: set[int] = field(default_factory=set)  # blocks whose put failed, at level commit perhaps at the sync only
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
        """The capacity in bytes that the store has now: less than asked for on a full disk."""
        return self.store.statistics().capacity_bytes

    def open(self) -> None:
        """Open the store; OSError if that fails."""
        self._store = self._timed(lambda: open_store(self.folder, self.capacity_bytes, self.codec, self.durability))

    def close(self) -> None:
        """Close the store in any case; OSError if that was not clean."""
        store, self._store = self.store, None
        self._timed(store.close)

    def abandon(self) -> None:
        """Close the store, whether cleanly or not."""
        with suppress(OSError):
            self.close()

    def try_anything(self) -> OSError | None:
        """Make one random call, and check its result."""
        act = self.rng.choices([self.put, self.touch, self.delete, self.read, self.sync], [10, 2, 2, 4, 1])[0]
        try:
            act()
        except OSError as error:
            self.outcomes[f"{act.__name__}: {type(error).__name__}"] += 1
            return error
        self.outcomes[f"{act.__name__}: done"] += 1
        return None

    def put(self, kind: str = "") -> None:
        """The blocks of a chain, tail first."""
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
        """Delete a block of the store, if it has any."""
        numbers = sorted(self.there)[:1]
        self.store.delete([key_of(number) for number in numbers])
        self.there -= set(numbers)

    def read_any(self, numbers: list[int]) -> tuple[list[int], dict[int, Fault]]:
        """Read *numbers*: those that came back right, and the faults of the others. AssertionError for wrong bytes."""
        return self._timed(lambda: read_numbers(self.store, numbers))

    def read(self) -> None:
        """Check that a read never raises and finds no bad record; while I/O fails it may miss."""
        numbers = self._some()
        _, faults = self._timed(lambda: read_numbers(self.store, numbers))
        assert set(faults.values()) <= {Fault.MISSING, Fault.IO_ERROR}, f"bad records: {faults}"
        for fault in faults.values():
            self.outcomes[f"read: {fault}"] += 1

    def sync(self) -> None:
        self._timed(self.store.sync)

    def assert_as_expected(self) -> None:
        """Check that the store has the keys of the model and no others."""
        found = self._timed(lambda: numbers_in(self.store))
        assert len(set(found)) == len(found), "a key stands twice"
        missing, extra = self.there - set(found), set(found) - self.there
        if self.durability == "commit" and self.doubtful:
            self.there |= extra & self.doubtful
            extra -= self.doubtful
        assert (missing, extra) == (set(), set()), f"missing {sorted(missing)}, not expected {sorted(extra)}"

    def assert_whole(self) -> None:
        """Check the store against the model: every block bit for bit, and the accounting."""
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
