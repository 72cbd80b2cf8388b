"""`LmdbReader`: reads blocks from the slots (places in slab files) that the index names, and verifies each block."""

import logging
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

from kvtier.store.codec.cipher import Cipher
from kvtier.store.codec.codec_choice import CodecChoice
from kvtier.store.codec.seal import fault_of, unseal
from kvtier.store.lmdb.files import LmdbFiles
from kvtier.store.record import Fault, is_plain
from kvtier.store.slab import Slot

NUM_READERS = 8  # threads that share a large read: enough concurrent requests to keep a drive busy
_SHARE_BYTES = 1 << 20  # minimum bytes of a read per thread
_CACHED_SHARE_BYTES = 8 << 20  # the same for blocks in the page cache: handing over work costs as much as copying 1 MiB
_LOCATED_BYTES = 16 << 20  # limit on the bytes of blocks (or one block) whose slots are looked up in one transaction
_READ_BYTES = 1 << 20  # bytes (or one block) that a thread reads before it verifies them, while they are in its cache

_log = logging.getLogger(__name__)


class LmdbReader:
    """A reader of the blocks in *files*, which verifies each block and counts faults. Thread-safe.

    The reader divides a large read among up to `NUM_READERS` threads. Records that turn out to be bad are deleted.
    *timed*, if given, is told how long reads take, so that it can choose the faster codec.
    """

    def __init__(self, files: LmdbFiles, cipher: Cipher | None, timed: CodecChoice | None) -> None:
        self._files = files
        self._cipher = cipher
        self._timed = timed
        self._threads = ThreadPoolExecutor(NUM_READERS, "kvtier-store-read")
        self._counting = threading.Lock()  # guards `_faults`
        self._faults: Counter[Fault] = Counter()

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes | Fault]:
        """See `BlobStore.read_many`."""
        pairs = list(zip(keys, outs, strict=True))
        num_bytes = sum(out.nbytes for out in outs)
        is_cached = bool(pairs) and self._seems_cached(keys[len(keys) // 2])
        num_shares = min(NUM_READERS, len(pairs), num_bytes // (_CACHED_SHARE_BYTES if is_cached else _SHARE_BYTES))
        if is_cached:
            num_shares = min(num_shares, len(os.sched_getaffinity(0)))
        if num_shares <= 1:
            return self._read_share(pairs)
        size = -(-len(pairs) // num_shares)
        shares = [pairs[start : start + size] for start in range(0, len(pairs), size)]
        try:
            others = self._threads.map(self._read_share, shares[1:])
        except RuntimeError as error:  # the pool was shut down
            raise ValueError("store is closed") from error
        return [*self._read_share(shares[0]), *chain.from_iterable(others)]

    def verify_one(self, key: bytes) -> tuple[int, Fault | None] | None:
        """Read and verify a record. Returns the bytes read and the fault, or None if there is no record.

        A bad record is neither deleted nor counted.
        """
        while True:
            with self._files.using():
                found = self._located([key])[0]
                if found is None:
                    return None
                header, slot = found
                value = _scratch(slot)
                if self._fill([(slot, value)]):
                    return 0, Fault.IO_ERROR
                fault = fault_of(key, header, value, self._cipher)
                if fault is None or self._located([key])[0] == found:  # otherwise the record was replaced meanwhile
                    return slot.num_bytes, fault

    def faults(self) -> dict[Fault, int]:
        """Return how often each fault has occurred so far."""
        with self._counting:
            return dict(self._faults)

    def close(self) -> None:
        """End the reader's threads. The files must be closed first. A second call does nothing."""
        self._threads.shutdown()

    def _seems_cached(self, key: bytes) -> bool:
        """Return whether the block of *key* is in the page cache. The caller assumes the same for the whole request."""
        try:
            with self._files.using():
                (found,) = self._located([key])
                return found is not None and self._files.slabs.is_cached(found[1])
        except OSError:  # the following read reports the error
            return False

    def _read_share(self, pairs: Sequence[tuple[bytes, memoryview]]) -> list[bytes | Fault]:
        results: list[bytes | Fault] = []
        for run in _runs(pairs, _LOCATED_BYTES):
            results += self._read_run(pairs[run])
        faults = [i for i, result in enumerate(results) if isinstance(result, Fault)]
        for i in faults:
            if _is_bad(results[i]):
                results[i] = self._judge(*pairs[i])
        with self._counting:
            for i in faults:
                result = results[i]
                if isinstance(result, Fault) and result is not Fault.MISSING:
                    self._faults[result] += 1
        return results

    def _read_run(self, pairs: Sequence[tuple[bytes, memoryview]]) -> list[bytes | Fault]:
        """Find the slots of these blocks in one transaction, and read them after it has ended.

        If a slot is reused meanwhile, the digest of the bytes read does not match, so the block counts as corrupt.
        """
        results: list[bytes | Fault] = []
        try:
            with self._files.using():
                found = self._located([key for key, _ in pairs])
                for piece in _runs(pairs, _READ_BYTES):
                    results += self._read_piece(pairs[piece], found[piece])
        except OSError:
            results += [Fault.IO_ERROR] * (len(pairs) - len(results))
        return results

    def _read_piece(
        self, pairs: Sequence[tuple[bytes, memoryview]], found: Sequence[tuple[bytes, Slot] | None]
    ) -> list[bytes | Fault]:
        """Read and verify the blocks whose headers and slots were *found*. The caller is inside `files.using`."""
        values = [
            memoryview(b"") if place is None else _target(*place, out)
            for place, (_, out) in zip(found, pairs, strict=True)
        ]
        there = [(place[1], value) for place, value in zip(found, values, strict=True) if place is not None]
        started = time.perf_counter()
        failed = self._fill(there)
        if self._timed is not None and there:
            self._timed.on_read(sum(slot.num_bytes for slot, _ in there), time.perf_counter() - started)
        return [
            Fault.MISSING
            if place is None
            else Fault.IO_ERROR
            if place[1] in failed
            else unseal(key, place[0], value, out, self._cipher)
            for (key, out), place, value in zip(pairs, found, values, strict=True)
        ]

    def _located(self, keys: Sequence[bytes]) -> list[tuple[bytes, Slot] | None]:
        """Return header and slot of each key, or None if it has no record. The caller is inside `files.using`."""
        with self._files.tables.env.begin() as txn:
            return [self._files.tables.located(txn, key) for key in keys]

    def _fill(self, places: Sequence[tuple[Slot, memoryview]]) -> set[Slot]:
        """Read all slots into memory together or, if that fails, one by one. Returns the slots that cannot be read."""
        try:
            self._files.slabs.read([slot for slot, _ in places], [value for _, value in places])
            return set()
        except OSError:
            if len(places) == 1:
                return {places[0][0]}
        return set().union(*(self._fill([place]) for place in places))

    def _judge(self, key: bytes, out: memoryview) -> bytes | Fault:
        """Read *key*, whose record was found bad, once more under the writer's lock. If still bad, delete the record.

        A good record may have replaced the bad one since the first read, and must stay.
        """
        with self._files.writer:
            (result,) = self._read_run([(key, out)])
            if _is_bad(result):
                try:
                    self._files.remove(lambda change, _: change.forget(key))
                except OSError as error:
                    _log.warning("store %s: cannot delete a bad record: %s", self._files.name, error)
            return result


def _is_bad(result: bytes | Fault) -> bool:
    """Return whether the *result* of a read means that the record must be deleted."""
    return isinstance(result, Fault) and result.is_bad_record


def _target(header: bytes, slot: Slot, out: memoryview) -> memoryview:
    """Return memory to read a slot into: *out* itself if the slot holds the block's raw bytes, else new memory."""
    return out if out.nbytes <= slot.num_bytes and is_plain(header, out.nbytes) else _scratch(slot)


def _scratch(slot: Slot) -> memoryview:
    """Return new memory for a whole slot, aligned to pages."""
    return memoryview(mmap.mmap(-1, slot.num_bytes))


def _runs(pairs: Sequence[tuple[bytes, memoryview]], max_bytes: int) -> Iterator[slice]:
    """Split *pairs* into slices whose blocks have at most *max_bytes* together; a slice of one block may have more."""
    start = num_bytes = 0
    for i, (_, out) in enumerate(pairs):
        if i > start and num_bytes + out.nbytes > max_bytes:
            yield slice(start, i)
            start, num_bytes = i, 0
        num_bytes += out.nbytes
    yield slice(start, len(pairs))
