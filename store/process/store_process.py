"""`StoreProcess`: a store in a process of its own, and how that process is started, ended and replaced."""

import json
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import Any, Self

from kvtier.store.blob_store import Blob, Evicted, StoreStatistics
from kvtier.store.lmdb import crashes
from kvtier.store.lmdb.data_file import MAX_CRASHES
from kvtier.store.process.channel import Channel, MemoryMap, NoAnswer, Place, SharedMemory
from kvtier.store.process.staging import Staging, copy
from kvtier.store.record import Fault
from kvtier.store.store_settings import StoreSettings

NUM_WRITERS = 3  # concurrent calls that change something: two write, and one gathers the next blocks
NUM_READERS = 6
TIMEOUT_S = 60.0  # for one call; a process that takes longer counts as hanging and is killed
# For `sys.setswitchinterval` in a client process that also computes in Python: every response waits this long for the
# GIL. With Python's default of 5 ms, reads of 8 MiB next to a busy thread have a tenth of their speed.
SWITCH_INTERVAL_S = 0.0005
_PLACE_BYTES = 32 << 20  # size of a staging buffer: as much as one change of the store puts at most
_OPEN_TIMEOUT_S = 300.0  # opening may copy the index to shrink it
_END_TIMEOUT_S = 5.0  # for a killed process to exit: takes milliseconds, unless it hangs in the kernel, on its disk

_log = logging.getLogger(__name__)


class StoreDied(OSError):
    """Error raised if the store's process has ended or is still opening the store.

    If the process has ended, the next call starts another one.
    """


class StoreProcess:
    """A `BlobStore` that runs an `LmdbStore` in a process of its own, for speed and to survive its crashes.

    - Speed: Python code that computes in this process does not delay the store, nor does the store delay that code.
      In one process, next to a busy thread, every LMDB call would wait up to 5 ms for the GIL: 64 puts took 340 ms
      instead of 6 ms.
    - Crashes: A disk that fails under a mapped file ends only the store's process. Calls in flight raise `StoreDied`
      (reads return `Fault.IO_ERROR`), and the next call starts another process.
    - Timeouts: A process that does not respond within *timeout_s* is killed. If Ctrl-C interrupts a call, the process
      is killed at once, because no call waits for the response any more.
    - Opening has its own deadline. Only the call that starts the process waits until the store is open. Other calls
      raise `StoreDied` meanwhile, and `close` ends a process that is still opening the store.
    - A read returns only once the store's process can no longer write to the caller's memory. A process that waits for
      a hanging disk cannot be killed, so the read then waits for it without a deadline.

    The store's process reads and writes *memories*, such as that of the host tier, directly, so they must outlive the
    store. Blocks in other memory are copied.

    The object belongs to the process that created it. In a forked child the store's operations raise ValueError, and
    `close` does nothing. The store is opened by `open`, a `with` statement or the first call. These raise the errors of
    opening.
    """

    def __init__(
        self, settings: StoreSettings, memories: Sequence[SharedMemory] = (), timeout_s: float = TIMEOUT_S
    ) -> None:
        self._pid = os.getpid()
        self.settings = replace(settings, owner=self._pid)
        self._staging = Staging(NUM_READERS + NUM_WRITERS, _PLACE_BYTES)  # one place per concurrent call
        self._memories = [*memories, self._staging.memory]
        self._timeout_s = timeout_s
        self._map = MemoryMap(self._memories)
        self._lock = threading.Lock()  # guards the seven below; held only briefly
        self._worker: _Worker | None = None  # the most recently started process
        self._opened: Future[_Worker] = Future()  # the result of the last opening
        self._opened.set_exception(StoreDied(f"store {settings.folder}: not opened yet"))
        self._may_open = True
        self._closed = False
        self._num_replaced, self._why_replaced = 0, ""
        self.num_starts = 0

    def open(self) -> None:
        """Open the store and wait until it is open. Raises the errors of opening an `LmdbStore`.

        Raises `StoreDied` if opening hangs or is already in progress.
        """
        self._ensure_running()

    def stop_opening(self) -> None:
        """Prepare for `close`: start no more processes, and end one that is still opening the store."""
        with self._lock:
            self._may_open = False
            worker = self._worker
        if worker is not None and not worker.is_open:
            worker.end("it was still opening")

    def kill(self) -> None:
        """Kill the process, whatever it is doing, and start no more. Completed puts stay stored."""
        self.stop_opening()
        worker = self._worker
        if worker is not None:
            worker.is_open = False
            worker.end("it was killed on request")

    @property
    def pid(self) -> int | None:
        """Pid of the most recently started process, which may have ended; None before the first start."""
        worker = self._worker
        return None if worker is None else worker.pid

    @property
    def num_ended(self) -> int:
        """Number of processes that had the store open and ended by themselves, or hung and were killed."""
        with self._lock:
            worker = self._worker
            return self._num_replaced + (worker is not None and worker.is_open and worker.has_ended)

    @property
    def why_ended(self) -> str:
        """Reason why the last of the processes counted in `num_ended` has ended; empty if none has."""
        with self._lock:
            worker = self._worker
            is_last = worker is not None and worker.is_open and worker.has_ended
            return worker.why_ended if worker is not None and is_last else self._why_replaced

    def contains(self, key: bytes) -> bool:
        return bool(self._ask_reader("contains", key))

    def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
        raws = [blob.raw for blob in blobs]
        pieces = [self._map.place(raw) for raw in raws]
        if None not in pieces:
            return self._put(blobs, pieces)
        with self._staging.place() as place:
            _, staged = self._stage(raws, pieces, place)
            for room, raw in staged:
                copy(raw, room)
            return self._put(blobs, pieces)

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes | Fault]:
        if len(keys) != len(outs):
            raise ValueError(f"{len(keys)} keys for {len(outs)} buffers; pass one buffer per key")
        pieces = [self._map.place(out) for out in outs]
        if None not in pieces:
            return self._read(keys, outs, pieces)
        results: list[bytes | Fault] = []
        with self._staging.place() as place:
            while keys:
                num, staged = self._stage(outs, pieces, place)
                results += self._read(keys[:num], outs[:num], pieces[:num])
                for room, out in staged:
                    copy(room, out)
                keys, outs, pieces = keys[num:], outs[num:], pieces[num:]
        return results

    def touch(self, keys: Sequence[bytes]) -> None:
        self._ask_writer("touch", keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        return int(self._ask_writer("delete", keys))

    def evict(self, num_bytes: int, limit: int, tenant: bytes = b"") -> Evicted:
        return Evicted(*self._ask_writer("evict", num_bytes, limit, tenant))

    def keys(self) -> Iterator[bytes]:
        self._ensure_running()
        return self._iterate("keys")

    def verify(self) -> Iterator[tuple[bytes, Fault | None]]:
        return self._iterate("verify")

    def sync(self) -> None:
        self._ask_writer("sync")

    def statistics(self) -> StoreStatistics:
        statistics: StoreStatistics = self._ask_reader("statistics")
        return statistics

    def check(self) -> None:
        self._ask_writer("check")

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            worker, opened = self._worker, self._opened
        if worker is not None and worker.is_open:
            worker.close()
        elif worker is not None:
            worker.end("it was still opening")
        if worker is not None:
            worker.note_crash()
        wait([opened], _END_TIMEOUT_S)  # for the thread that opens the store
        self._staging.close()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ensure_running(self) -> "_Worker":
        """Return the live process. If there is none, start one and wait until it has opened the store.

        Raises `StoreDied` if another call is already waiting for the store to open.
        """
        if os.getpid() != self._pid:
            raise ValueError(
                f"store {self.settings.folder} is open in process {self._pid}, from which process {os.getpid()} was "
                "forked; use it there"
            )
        with self._lock:
            if self._closed:
                raise ValueError("store is closed")
            if self._worker is not None and self._worker.is_open and not self._worker.has_ended:
                return self._worker
            if not self._opened.done():
                raise StoreDied(f"store {self.settings.folder}: its process is still opening it; try again later")
            if not self._may_open:
                raise StoreDied(f"store {self.settings.folder}: its process has ended, and the store is being closed")
            opened: Future[_Worker] = Future()
            # Ctrl-C does not interrupt this thread, so every opening ends with a result.
            threading.Thread(target=self._start, args=(opened,), name="kvtier-store-open", daemon=True).start()
            self._opened = opened
        return opened.result()

    def _start(self, opened: "Future[_Worker]") -> None:
        """Open the store, and set *opened* to the new process or to the error. Runs in a thread of its own."""
        with self._lock:
            if self._opened is not opened:  # the call was interrupted just after it started this thread
                return
            before = self._worker
        worker = None
        try:
            if before is not None and not before.end(before.why_ended):
                raise StoreDied(f"store {self.settings.folder}: its killed process has not exited yet; try again later")
            if before is not None:
                before.note_crash()
            worker = _Worker(self.settings, self._memories, self._timeout_s)
            with self._lock:
                if before is not None and before.is_open:
                    self._num_replaced, self._why_replaced = self._num_replaced + 1, before.why_ended
                self.num_starts += 1
                self._worker = worker
                may_open = self._may_open and not self._closed
            if not may_open:
                raise StoreDied(f"store {self.settings.folder}: the store was closed before it was open")
            worker.open(self.settings)
            opened.set_result(worker)
        except BaseException as error:  # raised in the call that waits for *opened*
            if worker is not None:
                worker.end("it did not open the store")
                worker.note_crash()
            opened.set_exception(error)

    def _put(self, blobs: Sequence[Blob], pieces: Sequence[Place | None]) -> list[bytes]:
        rows = [
            (blob.key, blob.digest, piece or bytes(blob.raw), blob.parent, blob.tenant)
            for blob, piece in zip(blobs, pieces, strict=True)
        ]
        evicted: list[bytes] = self._ask_writer("put_many", rows)
        return evicted

    def _read(
        self, keys: Sequence[bytes], outs: Sequence[memoryview], pieces: Sequence[Place | None]
    ) -> list[bytes | Fault]:
        try:
            results, others = self._fill(keys, [piece or out.nbytes for piece, out in zip(pieces, outs, strict=True)])
        except StoreDied:
            return [Fault.IO_ERROR] * len(keys)
        unshared = [out for piece, out in zip(pieces, outs, strict=True) if piece is None]
        for out, read in zip(unshared, others, strict=True):
            out[:] = read
        return list(results)

    def _stage(
        self, views: Sequence[memoryview], pieces: list[Place | None], place: memoryview
    ) -> tuple[int, list[tuple[memoryview, memoryview]]]:
        """Assign a byte range of the staging buffer *place* to each of *views* that is not in shared memory.

        *pieces* contains for each view its byte range in shared memory, or None. Each None is replaced by the assigned
        range. A view larger than *place* keeps None and is sent over the socket.

        Returns:
            The number of views (from the first on) that fit into one request, and pairs of assigned memory and view.
        """
        staged: list[tuple[memoryview, memoryview]] = []
        max_bytes = place.nbytes
        for i, view in enumerate(views):
            if pieces[i] is not None or view.nbytes > max_bytes:
                continue
            if view.nbytes > place.nbytes:
                return i, staged
            room, place = place[: view.nbytes], place[view.nbytes :]
            pieces[i] = self._map.place(room)
            staged.append((room, view))
        return len(views), staged

    def _ask_reader(self, method: str, *arguments: Any) -> Any:
        return self._ensure_running().ask_reader(method, *arguments)

    def _ask_writer(self, method: str, *arguments: Any) -> Any:
        return self._ensure_running().ask_writer(method, *arguments)

    def _fill(self, keys: Sequence[bytes], pieces: Sequence[Place | int]) -> Any:
        worker = self._ensure_running()
        try:
            return worker.ask_reader("read_many", keys, pieces)
        except BaseException:
            if worker.has_ended:
                worker.end("its call was abandoned", timeout_s=None)  # until it has exited, it may write to *pieces*
            raise

    def _iterate(self, method: str) -> Iterator[Any]:
        worker = self._ensure_running()
        ended = list(worker.ended_walks)
        number = worker.ask_reader("begin", method, ended)
        worker.ended_walks.difference_update(ended)
        try:
            while items := worker.ask_reader("go_on", number):
                yield from items
                if self._ensure_running() is not worker:
                    raise StoreDied(f"store {self.settings.folder}: its process ended during {method}; call it again")
        finally:
            worker.ended_walks.add(number)  # the next walk reports it, because garbage collection may run this line


class _Worker:
    """A process of the store, from its start to its end, and the channels to it."""

    def __init__(self, settings: StoreSettings, memories: Sequence[SharedMemory], timeout_s: float) -> None:
        self._folder = settings.folder
        self._timeout_s = timeout_s
        self._process, channels = _start_process(memories)
        self._writers = _queue_of(channels[:NUM_WRITERS])
        self._readers = _queue_of(channels[NUM_WRITERS:])
        self.is_open = False
        self._has_ended = False
        self._why_ended: str | None = None
        self._silence = ""  # describes the call that timed out while the process was computing, if one did
        self._is_crash_noted = False
        self._owner = settings.owner or os.getpid()
        self.ended_walks: set[int] = set()  # walks (iterations over the store) that the process may forget

    def open(self, settings: StoreSettings) -> None:
        """Send the first request, which makes the process open its store. Raises the errors of opening."""
        self._ask(self._writers, _OPEN_TIMEOUT_S, "open", settings)
        self.is_open = True

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def why_ended(self) -> str:
        """Reason why the process was killed, if it was, and its exit status. Empty while the process lives."""
        if self._why_ended is not None:
            return self._why_ended
        return _status(self._process.returncode) if self.has_ended else ""

    @property
    def has_ended(self) -> bool:
        """True if the process was killed or has ended by itself, so that no request may be sent to it."""
        return self._has_ended or self._process.poll() is not None

    def ask_reader(self, method: str, *arguments: Any) -> Any:
        """Call a read-only *method* of the store. Raises the method's errors, or `StoreDied` without a response."""
        return self._ask(self._readers, self._timeout_s, method, *arguments)

    def ask_writer(self, method: str, *arguments: Any) -> Any:
        """Call a *method* that changes the store. Raises the method's errors, or `StoreDied` without a response."""
        return self._ask(self._writers, self._timeout_s, method, *arguments)

    def end(self, why: str, timeout_s: float | None = _END_TIMEOUT_S) -> bool:
        """Kill the process and wait for it. Return whether it has exited, so that it no longer writes to memory.

        *why* is recorded as the reason, unless the process had already ended. Pass "" if it ended by itself.
        """
        is_first = not self.has_ended
        self._has_ended = True
        for free in (self._writers, self._readers):
            free.put(None)  # wakes a call that waits for a channel
        try:
            self._process.kill()
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        except BaseException:  # a second Ctrl-C
            self.end(why, timeout_s)
            raise
        finally:
            if is_first:
                self._why_ended = ", ".join(filter(None, (why, _status(self._process.returncode))))
        return True

    def note_crash(self) -> None:
        """If the process has crashed, count that in the boot mark, the file that records the state of the store.

        A second call does nothing.
        """
        how = self._silence or crashes.signal_of(self._process.returncode)
        if not how or self._is_crash_noted:
            return
        self._is_crash_noted = True
        try:
            num_crashes = crashes.note(self._folder, self._owner)
        except OSError as error:
            why = str(error)  # the error would keep this object, and its sockets open, in a handler that keeps records
            _log.warning(
                "store %s: its process ended with %s; the crash could not be counted: %s", self._folder, how, why
            )
            return
        _log.info(  # the engine logs `why_ended`, and the next start logs that it is empty
            "store %s: its process ended with %s, %d crashes in a row; after %d the store starts empty",
            *(self._folder, how, num_crashes, MAX_CRASHES),
        )

    def close(self) -> None:
        try:
            if not self.has_ended:
                self.ask_writer("close")
        except OSError as error:
            # The text, not the error: a handler that keeps log records would keep this object and its sockets open.
            _log.warning("store %s was not closed cleanly: %s", self._folder, str(error))
        finally:
            self.end("it was closed")

    def _ask(self, free: "queue.SimpleQueue[Channel | None]", timeout_s: float, method: str, *arguments: Any) -> Any:
        question = pickle.dumps((method, arguments))
        # Only a successful call returns its channel. After any other call, including one interrupted between two of
        # these lines, the channel may be lost, or a response may be in flight that no call waits for.
        try:
            channel = free.get(timeout=timeout_s)
            if channel is None:
                raise NoAnswer("the store's process ended")
            answer = channel.ask(question, timeout_s)
            free.put(channel)
        except (NoAnswer, queue.Empty) as error:
            is_silent = isinstance(error, queue.Empty) or isinstance(error.__cause__, TimeoutError)
            if is_silent and not self.has_ended and crashes.is_computing(self._process.pid):
                self._silence = f"no answer to {method} in {timeout_s:.0f} s while it was computing"
            why = str(error) or f"no free channel in {timeout_s:.0f} s"
            self.end(why if isinstance(error, queue.Empty) or error.is_no_reply else "")
            raise StoreDied(f"store {self._folder}: {method}: {why}, {_status(self._process.returncode)}") from error
        except BaseException:
            self.end("a call was interrupted")
            raise
        is_good, value = pickle.loads(answer)
        if not is_good:
            raise value
        return value


def _start_process(memories: Sequence[SharedMemory]) -> "tuple[subprocess.Popen[bytes], list[Channel]]":
    """Start a process that serves a store. Return it and its channels, first those for writes, then those for reads."""
    pairs = [socket.socketpair() for _ in range(NUM_WRITERS + NUM_READERS)]
    theirs = [there.fileno() for _, there in pairs]
    shared = [(memory.file, memory.num_bytes, memory.is_backed) for memory in memories]
    arguments = json.dumps([theirs, shared, NUM_WRITERS, os.getpid()])
    try:
        process = subprocess.Popen(
            # -P: the working directory must not be searched for modules
            [sys.executable, "-P", "-m", "kvtier.store.process.store_server", arguments],
            pass_fds=[*theirs, *(memory.file for memory in memories)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C in a terminal does not reach it
        )
    finally:
        for _, there in pairs:
            there.close()
    return process, [Channel(here) for here, _ in pairs]


def _queue_of(channels: Sequence[Channel]) -> "queue.SimpleQueue[Channel | None]":
    """Return a queue of *channels*, from which each call takes a free one.

    After the end of the process, None is put into the queue to wake a call that waits for a channel.
    """
    free: queue.SimpleQueue[Channel | None] = queue.SimpleQueue()
    for channel in channels:
        free.put(channel)
    return free


def _status(returncode: int | None) -> str:
    """Describe how a process has ended."""
    if returncode is None:
        return "not exited yet"
    return f"signal {signal.Signals(-returncode).name}" if returncode < 0 else f"exit status {returncode}"
