"""A store in a process of its own."""

import contextlib
import json
import logging
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Self

from kvtier.store.blob_store import Blob, StoreStatistics
from kvtier.store.channel import Channel, MemoryMap, SharedMemory
from kvtier.store.record import Fault
from kvtier.store.store_settings import StoreSettings

NUM_WRITERS = 2  # calls at a time that change something: one at work, one that gathers behind it
NUM_READERS = 6
TIMEOUT_S = 60.0  # for one call; what takes longer hangs, and the process is ended
# For `sys.setswitchinterval`, in a process that asks and also computes in Python: every answer waits that long for the
# interpreter's lock. With Python's own 5 ms, reads of 8 MiB beside a busy thread come at a tenth of their speed.
SWITCH_INTERVAL_S = 0.0005
_OPEN_TIMEOUT_S = 300.0  # making a file smaller copies it

_log = logging.getLogger(__name__)


class StoreDied(OSError):
    """The store's process has ended; the next call starts another."""


class StoreProcess:
    """See `BlobStore`: an `LmdbStore` in a process of its own, which reads into and writes from *memories* directly.

    - Python code that computes here holds up no read or write there, nor they it: beside a busy thread every call of
      LMDB's would wait up to 5 ms for the interpreter's lock, 64 puts 340 ms instead of 6.
    - What ends a process that maps a file, a medium that fails under it, ends that one: calls under way raise
      `StoreDied` (reads give `Fault.IO_ERROR`), and the next call starts it again. So with one that hangs: it is killed
      after *timeout_s*. A call returns only once nothing is written to its memory any more.

    *memories* (host slabs) must outlive the store. Other memory works too, with copies. Raises what opening raises.
    """

    def __init__(
        self, settings: StoreSettings, memories: Sequence[SharedMemory] = (), timeout_s: float = TIMEOUT_S
    ) -> None:
        self._settings = replace(settings, owner=os.getpid())
        self._memories = memories
        self._timeout_s = timeout_s
        self._map = MemoryMap(memories)
        self._lock = threading.Lock()  # guards the three below
        self._worker: _Worker | None = None
        self._closed = False
        self.num_starts = 0
        self._running()

    def contains(self, key: bytes) -> bool:
        return bool(self._ask_reader("contains", key))

    def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
        rows = [
            (blob.key, blob.digest, self._map.place(blob.raw) or bytes(blob.raw), blob.parent, blob.tenant)
            for blob in blobs
        ]
        evicted: list[bytes] = self._ask_writer("put_many", rows)
        return evicted

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes | Fault]:
        if len(keys) != len(outs):
            raise ValueError(f"{len(keys)} keys for {len(outs)} places")
        places = [self._map.place(out) for out in outs]
        pieces = [out.nbytes if place is None else place for place, out in zip(places, outs, strict=True)]
        try:
            results, others = self._ask_reader("read_many", keys, pieces)
        except StoreDied as error:
            _log.warning("%s", error)
            return [Fault.IO_ERROR] * len(keys)
        unshared = [out for place, out in zip(places, outs, strict=True) if place is None]
        for out, read in zip(unshared, others, strict=True):
            out[:] = read
        return list(results)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._ask_writer("touch", keys)

    def delete(self, keys: Sequence[bytes]) -> int:
        return int(self._ask_writer("delete", keys))

    def keys(self) -> Iterator[bytes]:
        self._running()
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
        with self._lock:
            if self._closed:
                return
            self._closed = True
            worker = self._worker
        if worker is not None:
            worker.close(self._timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _running(self) -> "_Worker":
        """The process, started if need be."""
        with self._lock:
            if self._closed:
                raise ValueError("store is closed")
            if self._worker is None or self._worker.has_ended:
                self._worker = _Worker(self._settings, self._memories)
                self.num_starts += 1
            return self._worker

    def _ask_reader(self, method: str, *arguments: Any) -> Any:
        worker = self._running()
        with worker.reader() as channel:
            return worker.ask(channel, self._timeout_s, method, *arguments)

    def _ask_writer(self, method: str, *arguments: Any) -> Any:
        worker = self._running()
        with worker.writer() as channel:
            return worker.ask(channel, self._timeout_s, method, *arguments)

    def _iterate(self, method: str) -> Iterator[Any]:
        worker = self._running()
        with worker.reader() as channel:
            worker.ask(channel, self._timeout_s, "begin", method)
            while items := worker.ask(channel, self._timeout_s, "next"):
                yield from items


class _Worker:
    """One life of the process."""

    def __init__(self, settings: StoreSettings, memories: Sequence[SharedMemory]) -> None:
        pairs = [socket.socketpair() for _ in range(NUM_WRITERS + NUM_READERS)]
        theirs = [there.fileno() for _, there in pairs]
        shared = [(memory.file, memory.num_bytes) for memory in memories]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvtier.store.store_server", json.dumps([theirs, shared, NUM_WRITERS])],
            pass_fds=[*theirs, *(memory.file for memory in memories)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is not for it
        )
        for _, there in pairs:
            there.close()
        connections: list[Connection[Any, Any]] = [Connection(here.detach()) for here, _ in pairs]
        self._channels = [Channel(connection) for connection in connections]
        self._writers: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self._readers: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self.has_ended = False
        try:
            connections[0].send(settings)
            if not connections[0].poll(_OPEN_TIMEOUT_S):
                raise StoreDied(f"store {settings.folder}: does not open in {_OPEN_TIMEOUT_S:.0f} s")
            is_open, error = connections[0].recv()
        except (EOFError, OSError) as why:
            self._end()
            raise StoreDied(f"store {settings.folder}: its process ended while opening it") from why
        if not is_open:
            self._end()
            raise error
        for number, channel in enumerate(self._channels):
            (self._writers if number < NUM_WRITERS else self._readers).put(channel)

    @contextlib.contextmanager
    def writer(self) -> Iterator[Channel]:
        """A channel for a call that changes something; waits for one."""
        channel = self._writers.get()
        try:
            yield channel
        finally:
            self._writers.put(channel)

    @contextlib.contextmanager
    def reader(self) -> Iterator[Channel]:
        """A channel for a call that changes nothing; waits for one."""
        channel = self._readers.get()
        try:
            yield channel
        finally:
            self._readers.put(channel)

    def ask(self, channel: Channel, timeout_s: float, method: str, *arguments: Any) -> Any:
        """What the store's *method* gives or raises; `StoreDied` if the process ends, or has to be ended, over it."""
        try:
            return channel.ask(timeout_s, method, *arguments)
        except TimeoutError as error:
            if error.errno is not None:  # the store's own
                raise
            self._process.kill()
            channel.wait_hung_up()
            raise self._died(str(error)) from error
        except (EOFError, ConnectionError) as error:
            raise self._died(f"its process ended, status {self._process.wait()}") from error

    def close(self, timeout_s: float) -> None:
        """Have the store closed, and wait for the process; a store that hangs is left to the kernel."""
        try:
            with self.writer() as channel:
                self.ask(channel, timeout_s, "close")
        except (EOFError, OSError) as error:
            _log.warning("store: not closed properly: %s", error)
        self._end()

    def _died(self, why: str) -> StoreDied:
        self.has_ended = True
        return StoreDied(f"store: {why}")

    def _end(self) -> None:
        self.has_ended = True
        for channel in self._channels:
            channel.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
