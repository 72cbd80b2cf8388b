"""`LmdbReader`: reads blocks from the slots (places in slab files) that the index names, and verifies each block."""

import contextlib
import logging
import mmap
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from operator import itemgetter
from typing import NamedTuple

from kvtier.store.codec.cipher import Cipher
from kvtier.store.codec.codec_choice import CodecChoice
from kvtier.store.codec.seal import fault_of, unseal
from kvtier.store.lmdb.files import LmdbFiles
from kvtier.store.record import Fault, digest_for_threads, plain_digest
from kvtier.store.slab import Slot

NUM_READERS = 8  # threads that share a large read: enough concurrent requests to keep a drive busy
_LOCATED_BYTES = 64 << 20  # limit on the bytes of blocks (or one block) whose slots are looked up in one transaction

_log = logging.getLogger(__name__)


class _Way(NamedTuple):
    """How a request is divided among threads, and how a thread reads its share."""

    num_threads: int  # limit
    bytes_per_thread: int  # minimum
    shares_per_thread: int  # several, so that a thread that begins late takes fewer
    piece_bytes: int  # bytes (or one block) that a thread reads before it verifies them


# From the page cache, handing over work costs as much as copying 1 MiB, and a piece is verified while it is in the
# thread's cache. On two processors, two threads take four fifths of the time of one, for a third more processor time.
# From the disk, fewer and larger reads save more CPU than that.
_CACHED = _Way(len(os.sched_getaffinity(0)), 8 << 20, 4, 2 << 20)
_COLD = _Way(NUM_READERS, 1 << 20, 1, 4 << 20)


class _Raw(NamedTuple):
    """A stored block that is neither encoded nor encrypted, and is read into its buffer."""

    slot: Slot
    memory: memoryview  # the buffer
    place: int  # of the block in the request
    digest: bytes


class _Other(NamedTuple):
    """A stored block that is decoded into its buffer, or whose record may be bad."""

    slot: Slot
    memory: memoryview  # empty until the slot is read
    place: int  # of the block in the request
    key: bytes
    header: bytes
    out: memoryview  # the buffer


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
        self._counting = threading.Lock()  # guards the next two attributes
        self._num_requests = 0  # that are being read
        self._faults: Counter[Fault] = Counter()

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes | Fault]:
        """See `BlobStore.read_many`."""
        pairs = list(zip(keys, outs, strict=True))
        with self._counting:
            self._num_requests += 1
        try:
            return [result for run in _runs(pairs, _LOCATED_BYTES) for result in self._read_some(pairs[run])]
        finally:
            with self._counting:
                self._num_requests -= 1

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

    def _read_some(self, pairs: Sequence[tuple[bytes, memoryview]]) -> list[bytes | Fault]:
        """Read and verify blocks, delete the records that turn out to be bad, and count faults."""
        results = self._read_now(pairs)
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

    def _read_now(self, pairs: Sequence[tuple[bytes, memoryview]]) -> list[bytes | Fault]:
        """Find the slots of these blocks in one transaction, and read them after it has ended.

        If a slot is reused meanwhile, the digest of the bytes read does not match, so the block counts as corrupt.
        """
        results: list[bytes | Fault] = [Fault.IO_ERROR] * len(pairs)
        raw: list[_Raw] = []
        others: list[_Other] = []
        with contextlib.suppress(OSError), self._files.using():
            for i, ((key, out), place) in enumerate(zip(pairs, self._located([key for key, _ in pairs]), strict=True)):
                if place is None:
                    results[i] = Fault.MISSING
                    continue
                header, slot = place
                known = plain_digest(key, header, out.nbytes) if self._cipher is None else None
                if known is None or out.nbytes > slot.num_bytes:
                    others.append(_Other(slot, memoryview(b""), i, key, header, out))
                else:
                    raw.append(_Raw(slot, out, i, known))
        raw.sort(key=itemgetter(0))  # one system call reads neighbouring slots
        self._share([*raw, *others], results)
        return results

    def _share(self, placed: Sequence[_Raw | _Other], results: list[bytes | Fault]) -> None:
        """Read blocks into their buffers with several threads. Each thread takes the next share when it is free.

        A thread that gets no processor in time delays nothing: if all shares have been taken, it is not waited for.
        The digest or the fault of each block is written to *results*.
        """
        if not placed:
            return
        num_bytes = sum(each.slot.num_bytes for each in placed)
        is_small = num_bytes < 2 * _COLD.bytes_per_thread
        way = _CACHED if is_small or self._seems_cached(placed[len(placed) // 2].slot) else _COLD
        # Requests that are read at the same time have equal numbers of threads.
        num_threads = min(way.num_threads // self._num_requests, len(placed), num_bytes // way.bytes_per_thread)
        if num_threads <= 1:
            self._read_share(placed, results, way.piece_bytes)
            return
        size = -(-len(placed) // (num_threads * way.shares_per_thread))
        left = deque(placed[start : start + size] for start in range(0, len(placed), size))

        def work() -> None:
            while left:
                try:
                    share = left.popleft()
                except IndexError:  # another thread has taken it
                    return
                self._read_share(share, results, way.piece_bytes)

        helpers: list[Future[None]] = []
        try:
            for _ in range(num_threads - 1):
                helpers.append(self._help(work))
            work()
        finally:
            left.clear()
            working = [helper for helper in helpers if not helper.cancel()]
            wait(working)  # they write to the caller's memory
        for helper in working:
            helper.result()

    def _help(self, work: Callable[[], None]) -> "Future[None]":
        try:
            return self._threads.submit(work)
        except RuntimeError as error:  # the pool was shut down
            raise ValueError("store is closed") from error

    def _seems_cached(self, slot: Slot) -> bool:
        """Return whether *slot* is in the page cache. The caller assumes the same for the whole request."""
        try:
            with self._files.using():
                return self._files.slabs.is_cached(slot)
        except OSError:  # the following read reports the error
            return False

    def _read_share(self, placed: Sequence[_Raw | _Other], results: list[bytes | Fault], piece_bytes: int) -> None:
        """Read blocks into their buffers, piece by piece, and verify them. Results of failed reads stay unchanged."""
        digest_of = digest_for_threads(NUM_READERS)
        with contextlib.suppress(OSError), self._files.using():
            for piece in _pieces(placed, piece_bytes):
                read = piece
                if not isinstance(piece[-1], _Raw):  # raw blocks come first
                    read = [
                        each if isinstance(each, _Raw) else each._replace(memory=_scratch(each.slot)) for each in piece
                    ]
                failed = self._fill_timed(read)
                for each in read:
                    if failed and each.slot in failed:
                        continue
                    if isinstance(each, _Raw):
                        _, out, i, known = each
                        results[i] = known if digest_of(out) == known else Fault.CORRUPT
                    else:
                        _, value, i, key, header, out = each
                        results[i] = unseal(key, header, value, out, self._cipher)

    def _located(self, keys: Sequence[bytes]) -> list[tuple[bytes, Slot] | None]:
        """Return header and slot of each key, or None if it has no record. The caller is inside `files.using`."""
        with self._files.tables.env.begin() as txn:
            return self._files.tables.all_located(txn, keys)

    def _fill_timed(self, places: Sequence[_Raw | _Other]) -> set[Slot]:
        started = time.perf_counter()
        failed = self._fill([(place.slot, place.memory) for place in places])
        if self._timed is not None:
            self._timed.on_read(sum(place.slot.num_bytes for place in places), time.perf_counter() - started)
        return failed

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
            (result,) = self._read_now([(key, out)])
            if _is_bad(result):
                try:
                    self._files.remove(lambda change, _: change.forget(key))
                except OSError as error:
                    _log.warning("store %s: cannot delete a bad record: %s", self._files.name, error)
            return result


def _is_bad(result: bytes | Fault) -> bool:
    """Return whether the *result* of a read means that the record must be deleted."""
    return isinstance(result, Fault) and result.is_bad_record


def _pieces(placed: Sequence[_Raw | _Other], max_bytes: int) -> Iterator[Sequence[_Raw | _Other]]:
    """Split *placed* into pieces of at most *max_bytes*; a piece of one block may have more."""
    start = num_bytes = 0
    for i, each in enumerate(placed):
        if i > start and num_bytes + each.slot.num_bytes > max_bytes:
            yield placed[start:i]
            start, num_bytes = i, 0
        num_bytes += each.slot.num_bytes
    if placed:
        yield placed[start:]


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
