"""The disk tier: a blob store that holds blocks under one namespace, with an index in memory and circuit breakers."""

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.store.blob_store import Blob, Records, StoreStatistics, StoreUnavailable
from kvtier.store.memory_store import MemoryStore
from kvtier.store.record import Fault
from kvtier.tiers.device.group_slots import AGES_S
from kvtier.tiers.histogram import Histogram, HistogramStatistics
from kvtier.tiers.lower.admission import WriteBudget
from kvtier.tiers.lower.breaker import CircuitBreaker
from kvtier.tiers.lower.disk_index import DiskIndex
from kvtier.tiers.lower.name_set import (
    GROUP_BYTES,
    KEY_BYTES,
    NAMESPACE_BYTES,
    block_key,
)
from kvtier.tiers.lower.ssd_life import SsdLife
from kvtier.tiers.lower.statistics import DiskStatistics, TierStatistics
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.tier import EvictionCause

EVERY_S = 1.0  # time between two blocks that `DiskAges` samples; doubled whenever there are too many
MAX_MARKERS = 4096  # maximum number of sampled blocks
WORD_BYTES = 4
PAGE_KEYS = 512  # keys of the index read at a time, which takes the reader and then the owner half a millisecond each


class DiskAges:
    """A histogram of the ages of blocks that the disk evicts to make room, estimated from samples.

    At most one written block per second is sampled. When a sampled block is evicted, all blocks evicted since the
    previous sampled one count with the age of this block. Blocks written by an earlier process are not
    sampled. Owned by the tiers' thread.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ages = Histogram(AGES_S)
        self._written_at: dict[BlockName, float] = {}  # oldest first
        self._every_s = EVERY_S
        self._next_at = float("-inf")
        self._num_uncounted = 0

    def on_written(self, names: Sequence[BlockName]) -> None:
        """Record that these blocks were written just now."""
        now = self._clock()
        if not names or now < self._next_at:
            return
        self._next_at = now + self._every_s
        self._written_at.pop(names[-1], None)
        self._written_at[names[-1]] = now
        if len(self._written_at) > MAX_MARKERS:
            self._written_at = dict(list(self._written_at.items())[::2])
            self._every_s *= 2

    def on_dropped(self, name: BlockName) -> None:
        """Count a block that the disk has evicted to make room."""
        self._num_uncounted += 1
        if (written_at := self._written_at.pop(name, None)) is not None:
            self._ages.add(self._clock() - written_at, self._num_uncounted)
            self._num_uncounted = 0

    def statistics(self) -> HistogramStatistics:
        """Return the histogram of the evicted blocks' ages: seconds from a block's write to its eviction."""
        return self._ages.statistics()


@dataclass(frozen=True, slots=True)
class Written:
    """The outcome of writing a batch: the keys evicted to make room, and the store's statistics after the write."""

    evicted: list[bytes]
    statistics: StoreStatistics
    number: int  # sequence number of *statistics*; later ones are higher


@dataclass(frozen=True, slots=True)
class Dropped:
    """The outcome of deleting records."""

    written: Written  # the keys of the records are those in `written.evicted`
    num_bytes: int  # approximate size of the records


class DiskTier:
    """The disk tier: a store of blocks, an index of their names in memory, and circuit breakers.

    A block's key in the store is namespace (16 B) ‖ block name ‖ attention group's id (4 B, big endian). Copy threads
    call `read`, `write`, `touch`, `delete`, `evict`, `drop`, `walk` and `read_index`, which use the store and may
    block. All other methods are for the owner's thread only, and do not block, except `clear`. Reads and writes each
    have a circuit breaker, and are suspended while the breaker is open.

    The store may be opened after the tier is created, and reopened later with other content (see `IndexLoad`). While
    the store is not open, the tier has no blocks and accepts none.
    """

    is_there = True

    def __init__(
        self,
        store: Records,
        namespace: bytes,
        clock: Callable[[], float] = time.monotonic,
        written_bytes_per_day: int | None = None,
        opening: Callable[[], int] = lambda: 1,
    ) -> None:
        """Create the tier over a store that may not be open yet.

        *written_bytes_per_day* limits writes, see `WriteBudget`. *opening* returns 0 while the store is not open, and
        otherwise a number that grows each time the store is opened. All threads call *opening*, so it must not block.
        """
        assert len(namespace) == NAMESPACE_BYTES, f"a namespace has {NAMESPACE_BYTES} bytes, not {len(namespace)}"
        self.clock = clock
        self.life: SsdLife | None = None  # set if the configuration gives the drive's rated endurance
        self.index = DiskIndex()
        self.faults: Counter[str] = Counter()
        self.ages = DiskAges(clock)
        # Blocks count as on disk only while this breaker is closed. While it is half-open, they do not, so that no
        # request waits for a probe.
        self.reading = CircuitBreaker(clock)
        self.writing = CircuitBreaker(clock)
        self.latest = store.statistics()
        self.budget = WriteBudget(written_bytes_per_day, clock, self.latest.recent_written_bytes)
        self.opening = opening
        self.num_cleared = 0  # blocks evicted on an operator's or caller's request
        self.indexed_opening = 0  # number of the opening that the index reflects; 0: none
        self._counted = 0  # number of the opening after which the store's statistics were read last
        self.why_failed = {"read": "", "write": ""}  # the last error of reads and of writes, set by lanes' threads
        self.key = partial(block_key, namespace)  # `key(group_id, name)` returns the store's key of a block
        # These are methods of the store, for keys of any namespace. They raise what the store raises.
        self.touch, self.delete, self.walk = store.touch, store.delete, store.keys
        self._store = store
        self._namespace = namespace
        self._counting = threading.Lock()  # held to draw a number and read statistics, so that both have the same order
        self._numbers = itertools.count(1)
        self._latest_number = 0
        self._walk: Iterator[bytes] | None = None

    def follow_opening(self) -> None:
        """Start over after the store was opened, reopened or closed: empty the index, so that it is loaded again.

        Bytes that were recently written to the store, for example by an earlier process, are charged to the write
        budget, unless they have been charged already.
        """
        self.indexed_opening = self.opening()
        self.index.begin_again()
        self.rewind_index()
        if self.indexed_opening not in (0, self._counted):
            self._counted = self.indexed_opening
            before, self.latest = self.latest, self._store.statistics()
            self.budget.spend(max(0, self.latest.recent_written_bytes - before.recent_written_bytes))
            if self.life is not None:
                self.life.begin(self.latest.written_bytes_total)

    @property
    def is_open(self) -> bool:
        """True if the store is open, and `follow_opening` has reset the index since the store was last opened."""
        return self.indexed_opening != 0 and self.indexed_opening == self.opening()

    def may_write(self) -> bool:
        """Return whether the store is open and its circuit breaker allows a write now."""
        return self.is_open and self.writing.allows()

    def on_written(self, written: Written) -> EvictionCause:
        """Process the outcome of a write, and return why the write evicted records.

        The cause is QUOTA (a tenant exceeded its quota) if the store's count of such evictions has grown by at least
        the number of evicted records. Otherwise, it is ROOM (the store was full). If outcomes arrive out of order, only
        the newest changes the statistics and the budget.
        """
        num_for_quotas = written.statistics.quota_evicted_total - self.latest.quota_evicted_total
        cause = EvictionCause.QUOTA if 0 < len(written.evicted) <= num_for_quotas else EvictionCause.ROOM
        if written.number < self._latest_number:
            return cause
        total_bytes = written.statistics.written_bytes_total
        was_emptied = total_bytes < self.latest.written_bytes_total  # the store found damage and started empty
        if was_emptied:
            self.indexed_opening = 0
        self.budget.spend(total_bytes if was_emptied else total_bytes - self.latest.written_bytes_total)
        self.latest, self._latest_number = written.statistics, written.number
        return cause

    def block_of(self, key: bytes) -> tuple[int, BlockName] | None:
        """Return group and name of the block with this key; None if the key belongs to another namespace."""
        if not key.startswith(self._namespace):
            return None
        return int.from_bytes(key[-GROUP_BYTES:], "big"), BlockName(key[NAMESPACE_BYTES:-GROUP_BYTES])

    def holds(self, group_id: int, name: BlockName) -> bool:
        """Return whether the block is known to be on disk; False while the disk cannot be read."""
        return self.index.holds(group_id, name) and self.reading.is_closed

    def are_held(self, group_id: int, names: Sequence[BlockName]) -> npt.NDArray[np.bool_]:
        """Return for each of the blocks what `holds` returns."""
        return self.index.are_held(group_id, names) if self.reading.is_closed else np.zeros(len(names), np.bool_)

    def num_held(self, group_id: int, names: Sequence[BlockName]) -> int:
        """Return how many of *names* come before the first one for which `holds` is False."""
        return self.index.num_held(group_id, names) if self.reading.is_closed else 0

    def read(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> list[bytes | Fault]:
        """Read the block of each key into the memory at the same index of *blocks*, and verify it.

        Returns for each block its digest, or the fault if it could not be read.
        """
        with self._errors_of("read"):
            return self._store.read_many(keys, blocks)

    def write(self, blobs: Sequence[Blob]) -> Written:
        """Write the blobs. The store will evict the first one first.

        Raises the store's exceptions, and StoreUnavailable if the store was reopened meanwhile.
        """
        opening = self.opening()
        with self._errors_of("write"):
            written = self._counted_with(self._store.put_many(blobs))
            if opening != self.opening():
                raise StoreUnavailable("the store was reopened during a write; the batch may be lost")
        return written

    def evict(self, num_bytes: int, limit: int, tenant: bytes) -> Dropped:
        """Evict records of any namespace, see `Records.evict`. Raises the store's exceptions."""
        with self._errors_of("write"):
            evicted = self._store.evict(num_bytes, limit, tenant)
            return Dropped(self._counted_with(evicted.keys), evicted.num_bytes)

    def drop(self, keys: list[bytes]) -> Dropped:
        """Delete the records with these keys, of any namespace. Raises the store's exceptions."""
        with self._errors_of("write"):
            before = self._store.statistics().stored_bytes
            if keys:
                self._store.delete(keys)
            written = self._counted_with(keys)
            return Dropped(written, max(0, before - written.statistics.stored_bytes))

    def read_index(self) -> list[bytes]:
        """Return the next page of the store's keys, newest first; empty at the end. Raises the store's exceptions."""
        if self._walk is None:
            self._walk = self._store.keys()
        return list(islice(self._walk, PAGE_KEYS))

    def load(self, keys: Sequence[bytes]) -> dict[int, list[BlockName]]:
        """Add a page of keys to the index and return its new blocks by group. An empty page ends the loading."""
        if not keys:
            self.index.finish_loading()
        if set(map(len, keys)) != {KEY_BYTES}:  # keys of another length belong to another namespace
            keys = [key for key in keys if len(key) == KEY_BYTES]
        # Vectorised, because converting the keys one by one takes as long as the index itself.
        words = np.frombuffer(b"".join(keys), np.uint32).reshape(-1, KEY_BYTES // WORD_BYTES)
        start, end = NAMESPACE_BYTES // WORD_BYTES, -GROUP_BYTES // WORD_BYTES
        words = words[(words[:, :start] == np.frombuffer(self._namespace, np.uint32)).all(axis=1)]
        groups = words[:, -1].view(">u4")
        pages = {
            group_id: np.ascontiguousarray(words[groups == group_id, start:end]).view(np.uint64)
            for group_id in set(groups.tolist())
        }
        return {group_id: new for group_id, page in pages.items() if (new := self.index.load(group_id, page))}

    def rewind_index(self) -> None:
        """Make the next call of `read_index` return the first page again."""
        self._walk = None

    def clear(self) -> bool:
        """Delete every record of this namespace from the store, without changing the index.

        Returns:
            False if the store failed. It may then still have some of the records.
        """
        try:
            self._store.delete([key for key in self._store.keys() if self.block_of(key) is not None])  # noqa: SIM118  # no dict
            self.latest = self._store.statistics()
        except OSError:
            self.faults[Fault.IO_ERROR.value] += 1
            return False
        return True

    def statistics(self) -> TierStatistics:
        """Return the store's counts after the last write, for all namespaces, and the faults in this process."""
        return TierStatistics(
            num_blocks=self.latest.num_records,
            num_bytes=self.latest.stored_bytes,
            capacity_bytes=self.latest.capacity_bytes,
            evicted=evicted_by_cause(self.latest, self.num_cleared),
            corrupt=dict(self.faults),
            eviction_ages=self.ages.statistics(),
        )

    def details(self) -> DiskStatistics:
        """Return the statistics that other tiers do not have."""
        return DiskStatistics(
            file_bytes=self.latest.file_bytes,
            written_bytes_total=self.latest.written_bytes_total,
            known_blocks=self.index.num_blocks,
            is_open=self.is_open,
            is_indexed=self.index.is_loaded,
            breakers={"read": self.reading.state, "write": self.writing.state},
            num_opened={"read": self.reading.num_opened, "write": self.writing.num_opened},
            why_failed=dict(self.why_failed),
            budget_left_bytes=self.budget.left_bytes,
            life=None if self.life is None else self.life.statistics(self.latest.written_bytes_total),
            tenants=dict(self.latest.tenants),
        )

    @property
    def is_failing(self) -> bool:
        """True if the store is closed, or writing is suspended by its circuit breaker."""
        return not self.is_open or not self.writing.is_closed

    def _counted_with(self, evicted: list[bytes]) -> Written:
        with self._counting:
            return Written(evicted, self._store.statistics(), next(self._numbers))

    @contextmanager
    def _errors_of(self, side: str) -> Iterator[None]:
        """Record the message of an OSError in `why_failed`, for display only, and let the error propagate.

        *side* says what has failed: "read" or "write".
        """
        try:
            yield
        except OSError as error:
            self.why_failed[side] = " ".join(str(error).split())
            raise


def evicted_by_cause(store: StoreStatistics, num_cleared: int) -> dict[EvictionCause, int]:
    """Return the number of evicted records by cause.

    Evictions for room and for quotas are counted since the store was created. *num_cleared* is the number of records
    that this process has evicted on request.
    """
    counts = {
        EvictionCause.ROOM: store.evicted_total - store.quota_evicted_total,
        EvictionCause.QUOTA: store.quota_evicted_total,
        EvictionCause.CLEARED: num_cleared,
    }
    return {cause: number for cause, number in counts.items() if number}


class NoDisk(DiskTier):
    """The disk tier of a configuration without a disk: its store never opens."""

    is_there = False

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(MemoryStore(0), bytes(NAMESPACE_BYTES), clock, opening=lambda: 0)
        self.index.finish_loading()


class DiskContent(Protocol):
    """The bookkeeping of blocks on disk that is needed to load the disk's index and to read from the disk."""

    @property
    def disk(self) -> DiskTier:
        """The disk tier."""

    def on_read_failed(self, group_id: int, name: BlockName, fault: Fault) -> None:
        """Record that a read of the block has failed with *fault*."""

    def load_index_page(self, keys: Sequence[bytes]) -> None:
        """Add one page of the store's keys to the index."""

    def report_forgotten(self) -> None:
        """Log removal events for blocks that the disk lost by being reopened or emptied, a part of them per call."""

    def offer_all_to_disk(self, num_at_once: int) -> Iterator[None]:
        """Offer all blocks of host memory to the disk, because the disk may have lost its copies.

        Each step offers the blocks in *num_at_once* slots.
        """
