"""`StoreProcess`: a store in a process of its own, and that process's start, end and replacement."""

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
from kvtier.store.lmdb.data_file import MOST_CRASHES
from kvtier.store.process.channel import Channel, MemoryMap, NoAnswer, Place, SharedMemory
from kvtier.store.process.staging import Staging, copy
from kvtier.store.record import Fault
from kvtier.store.store_settings import StoreSettings

NUM_WRITERS = 2  # calls at a time that change something: one works, one gathers blocks behind it
NUM_READERS = 6
TIMEOUT_S = 60.0  # for one call; if it takes longer the process hangs, and is killed
# For `sys.setswitchinterval`, in a process that asks and also computes in Python: every answer waits that long for the
# interpreter's lock. With Python's default of 5 ms, reads of 8 MiB beside a busy thread have a tenth of their speed.
SWITCH_INTERVAL_S = 0.0005
_PLACE_BYTES = 32 << 20  # of staging: what one change of the store puts at most, and large blocks
_OPEN_TIMEOUT_S = 300.0  # to make the index smaller it is copied
_END_TIMEOUT_S = 5.0  # for a killed process to be gone: that takes milliseconds, or it hangs in the kernel, on its disk

_log = logging.getLogger(__name__)


class StoreDied(OSError):
    """The store's process has ended, or is still opening the store. After an end the next call starts another."""


class StoreProcess:
    """A `BlobStore`: an `LmdbStore` in a process of its own, which reads into and writes from *memories* directly.

    - Python code that computes in this process delays no read or write of the store, nor the reverse: beside a busy
      thread every call of LMDB's would wait up to 5 ms for the interpreter's lock, 64 puts 340 ms instead of 6.
    - A medium that fails under a mapped file ends the store's process, not this one: calls under way raise `StoreDied`
      (reads give `Fault.IO_ERROR`), and the next call starts another process. One that hangs is killed after
      *timeout_s* of silence, and one whose caller was interrupted (Ctrl-C) at once, as its answer has no reader.
    - Opening has a deadline of its own. Only the call that begins it waits for it; other calls raise `StoreDied` at
      once until the store is open, and `close` ends the process that opens.
    - A read returns only once the store's process can write to its memory no more. So after a kill it waits without a
      deadline: a process that the kernel cannot end, as its disk hangs, may still write.

    It belongs to the process that made it: in a forked child every call but `close`, which does nothing, is a
    ValueError. *memories* (host slabs) must outlive the store. Blocks in other memory are copied on their way. Nothing
    is opened before `open`, a `with` statement or the first call; these raise what opening raises.
    """

    def __init__(
        self, settings: StoreSettings, memories: Sequence[SharedMemory] = (), timeout_s: float = TIMEOUT_S
    ) -> None:
        self._pid = os.getpid()
        self.settings = replace(settings, owner=self._pid)
        self._staging = Staging(NUM_READERS + NUM_WRITERS, _PLACE_BYTES)  # a place for each call at a time
        self._memories = [*memories, self._staging.memory]
        self._timeout_s = timeout_s
        self._map = MemoryMap(self._memories)
        self._lock = threading.Lock()  # guards the seven below; held for moments only
        self._worker: _Worker | None = None  # the process that was started last
        self._opened: Future[_Worker] = Future()  # the result of the last opening
        self._opened.set_exception(StoreDied(f"store {settings.folder}: not opened yet"))
        self._may_open = True
        self._closed = False
        self._num_replaced, self._why_replaced = 0, ""
        self.num_starts = 0

    def open(self) -> None:
        """Open the store, however long that takes. Raises what opening raises.

        `StoreDied` if opening hangs, or is under way already.
        """
        self._ensure_running()

    def stop_opening(self) -> None:
        """Start no more processes, and end one that is still opening: for an owner that is about to close."""
        with self._lock:
            self._may_open = False
            worker = self._worker
        if worker is not None and not worker.is_open:
            worker.end("it was still opening")

    def kill(self) -> None:
        """Kill the process, whatever it is doing, and start no more. Finished puts are whole."""
        self.stop_opening()
        worker = self._worker
        if worker is not None:
            worker.is_open = False
            worker.end("it was told to")

    @property
    def pid(self) -> int | None:
        """Pid of the process that was started last, which may have ended; None before the first."""
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
        """Why the last of these processes ended; empty if none has."""
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
            raise ValueError(f"{len(keys)} keys for {len(outs)} places")
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

    def evict(self, num_bytes: int, most: int, tenant: bytes = b"") -> Evicted:
        return Evicted(*self._ask_writer("evict", num_bytes, most, tenant))

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
        wait([opened], _END_TIMEOUT_S)  # the thread that opens
        self._staging.close()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ensure_running(self) -> "_Worker":
        """The process, started if there is none that lives. The call that starts it waits until the store is open.

        `StoreDied` while another call waits for that.
        """
        if os.getpid() != self._pid:
            raise ValueError(
                f"store {self.settings.folder} is open in process {self._pid}, of which this one, {os.getpid()}, is a "
                "fork; use it there"
            )
        with self._lock:
            if self._closed:
                raise ValueError("store is closed")
            if self._worker is not None and self._worker.is_open and not self._worker.has_ended:
                return self._worker
            if not self._opened.done():
                raise StoreDied(f"store {self.settings.folder}: its process is still opening it")
            if not self._may_open:
                raise StoreDied(f"store {self.settings.folder}: its process has ended, and is not started again")
            opened: Future[_Worker] = Future()
            # In a thread, which Ctrl-C does not reach: so every opening ends with a result.
            threading.Thread(target=self._start, args=(opened,), name="kvtier-store-open", daemon=True).start()
            self._opened = opened
        return opened.result()

    def _start(self, opened: "Future[_Worker]") -> None:
        """Runs in the thread that opens: sets *opened* to the process, once it has the store open, or to the error."""
        with self._lock:
            if self._opened is not opened:  # the call was interrupted just after it had started this thread
                return
            before = self._worker
        worker = None
        try:
            if before is not None and not before.end(before.why_ended):
                raise StoreDied(f"store {self.settings.folder}: its process was killed, and has not ended yet")
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
                raise StoreDied(f"store {self.settings.folder}: closed before it was open")
            worker.open(self.settings)
            opened.set_result(worker)
        except BaseException as error:  # the thread's top: the call that waits for *opened* raises it
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
        """Give those of *views* room in *place* that have no piece, one after the other, and enter it in *pieces*.

        Returns how many of the views can be asked for at once, and the room and the view of each that got one. A view
        that is larger than the place is sent over the socket.
        """
        staged: list[tuple[memoryview, memoryview]] = []
        most_bytes = place.nbytes
        for i, view in enumerate(views):
            if pieces[i] is not None or view.nbytes > most_bytes:
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
                worker.end("its call was given up", timeout_s=None)  # until then it may write to the pieces
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
                    raise StoreDied(f"store {self.settings.folder}: its process ended, and {method} with it")
        finally:
            worker.ended_walks.add(number)  # the next walk tells: garbage collection may run this, and must not ask


class _Worker:
    """One process of the store, from its start to its end, and the channels to it."""

    def __init__(self, settings: StoreSettings, memories: Sequence[SharedMemory], timeout_s: float) -> None:
        self._folder = settings.folder
        self._timeout_s = timeout_s
        self._process, channels = _start_process(memories)
        self._writers = _queue_of(channels[:NUM_WRITERS])
        self._readers = _queue_of(channels[NUM_WRITERS:])
        self.is_open = False
        self._has_ended = False
        self._why_ended: str | None = None
        self._silence = ""  # if it was killed for its silence: which call it did not answer
        self._is_crash_noted = False
        self._owner = settings.owner or os.getpid()
        self.ended_walks: set[int] = set()  # walks that the process may forget

    def open(self, settings: StoreSettings) -> None:
        """Have the process open its store, by the first question. Raises what opening raises."""
        self._ask(self._writers, _OPEN_TIMEOUT_S, "open", settings)
        self.is_open = True

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def why_ended(self) -> str:
        """Why the process was killed, if it was, and its exit status; empty while it lives."""
        if self._why_ended is not None:
            return self._why_ended
        return _status(self._process.returncode) if self.has_ended else ""

    @property
    def has_ended(self) -> bool:
        """Whether it was killed or has ended by itself, so that it must not be asked any more."""
        return self._has_ended or self._process.poll() is not None

    def ask_reader(self, method: str, *arguments: Any) -> Any:
        """Call the store's *method*, which changes nothing: returns or raises as it does. `StoreDied` if unanswered."""
        return self._ask(self._readers, self._timeout_s, method, *arguments)

    def ask_writer(self, method: str, *arguments: Any) -> Any:
        """Call the store's *method*, which changes it: returns or raises as it does. `StoreDied` if unanswered."""
        return self._ask(self._writers, self._timeout_s, method, *arguments)

    def end(self, why: str, timeout_s: float | None = _END_TIMEOUT_S) -> bool:
        """Kill the process, and return whether it is gone: then it writes to memory no more.

        *why* is kept, unless the process had ended before; empty if it ended by itself.
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
        except BaseException:  # Ctrl-C once more
            self.end(why, timeout_s)
            raise
        finally:
            if is_first:
                self._why_ended = ", ".join(filter(None, (why, _status(self._process.returncode))))
        return True

    def note_crash(self) -> None:
        """Count it in the boot mark if the process, which has ended, crashed. A second call does nothing."""
        how = self._silence or crashes.signal_of(self._process.returncode)
        if not how or self._is_crash_noted:
            return
        self._is_crash_noted = True
        try:
            num_crashes = crashes.note(self._folder, self._owner)
        except OSError as error:
            why = str(error)  # the error would keep this object, and its sockets open, in a handler that keeps records
            _log.warning("store %s: its process ended with %s, which cannot be counted: %s", self._folder, how, why)
            return
        _log.info(  # the engine logs `why_ended`, and the next start logs that it is empty
            "store %s: its process ended with %s, %d in a row; after %d it starts empty",
            *(self._folder, how, num_crashes, MOST_CRASHES),
        )

    def close(self) -> None:
        """Close the store, and end the process."""
        try:
            if not self.has_ended:
                self.ask_writer("close")
        except OSError as error:
            # Not the error itself: a handler that keeps records would keep this object, and its sockets open.
            _log.warning("store %s: not closed properly: %s", self._folder, str(error))
        finally:
            self.end("it was closed")

    def _ask(self, free: "queue.SimpleQueue[Channel | None]", timeout_s: float, method: str, *arguments: Any) -> Any:
        question = pickle.dumps((method, arguments))
        # Only a call that went well gives its channel back. After any other, an interruption between two of these lines
        # included, the channel may be lost, or an answer be on its way that no call waits for.
        try:
            channel = free.get(timeout=timeout_s)
            if channel is None:
                raise NoAnswer("its process ended")
            answer = channel.ask(question, timeout_s)
            free.put(channel)
        except (NoAnswer, queue.Empty) as error:
            is_silent = isinstance(error, queue.Empty) or isinstance(error.__cause__, TimeoutError)
            if is_silent and not self.has_ended and crashes.is_computing(self._process.pid):
                self._silence = f"no answer to {method} in {timeout_s:.0f} s, while it computed"
            why = str(error) or f"no channel free in {timeout_s:.0f} s"
            self.end(why if isinstance(error, queue.Empty) or error.is_silence else "")
            raise StoreDied(f"store {self._folder}: {method}: {why}, {_status(self._process.returncode)}") from error
        except BaseException:
            self.end("a call was interrupted")
            raise
        is_good, value = pickle.loads(answer)
        if not is_good:
            raise value
        return value


def _start_process(memories: Sequence[SharedMemory]) -> "tuple[subprocess.Popen[bytes], list[Channel]]":
    """Start a process that serves a store; returns it with the channels to it, those of writers first."""
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
    """A queue of the free *channels*. After the end of the process it gets None, for a call that waits."""
    free: queue.SimpleQueue[Channel | None] = queue.SimpleQueue()
    for channel in channels:
        free.put(channel)
    return free


def _status(returncode: int | None) -> str:
    """How a process has ended, in words."""
    if returncode is None:
        return "not gone yet"
    return f"signal {signal.Signals(-returncode).name}" if returncode < 0 else f"exit status {returncode}"
