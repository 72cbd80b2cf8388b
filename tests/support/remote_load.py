"""`RemoteLoad`: threads that read from a remote store, put into it and ask it all the time, whatever happens to it."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from waiting import join, wait_for

from kvtier.store.blob_store import Blob
from kvtier.store.record import Fault
from kvtier.store.remote.sealed_remote import SealedRemote
from kvtier.store.remote_store import RemoteStore, RemoteUnavailable

NUM_READERS = 2


class RemoteLoad:
    """The load of *blobs*, which are all there when it begins. What it has seen may be read at any time."""

    def __init__(self, store: RemoteStore, blobs: Sequence[Blob]) -> None:
        self.wrong: list[object] = []  # errors but `RemoteUnavailable`, results that are neither right nor a miss
        self.num_calls = 0
        self.num_unavailable = 0  # calls of these
        self.num_incomplete = 0  # reads that have found some and not all
        self.longest_s = 0.0  # that a call took
        self.last_good = time.monotonic()  # that a read found everything
        self._store = SealedRemote(store)
        self._blobs = blobs
        self._keys = [blob.key for blob in blobs]
        self._good = [blob.digest for blob in blobs]
        self._is_over = threading.Event()
        reads: list[Callable[[], object]] = [self._read] * NUM_READERS
        calls = [*reads, lambda: self._store.exist_many(self._keys), lambda: self._store.put_many(blobs)]
        self._threads = [threading.Thread(target=self._play, args=(call,)) for call in calls]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        wait_for(lambda: self.num_calls > 4 * len(self._threads))
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        join(*self._threads)

    def back_after_s(self) -> float:
        """Seconds from now until a read has found everything; returns then."""
        now = time.monotonic()
        wait_for(lambda: self.last_good > now)
        return self.last_good - now

    def _play(self, call: Callable[[], object]) -> None:
        while not self._is_over.is_set():
            began = time.monotonic()
            try:
                call()
            except RemoteUnavailable:
                self.num_unavailable += 1
            except Exception as error:
                self.wrong.append(error)
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.num_calls += 1

    def _read(self) -> None:
        outs = [memoryview(bytearray(blob.raw.nbytes)) for blob in self._blobs]
        results = self._store.read_many(self._keys, outs)
        if results == self._good:
            self.last_good = time.monotonic()
        else:
            self.num_incomplete += 1
        allowed = (Fault.MISSING, Fault.IO_ERROR)
        self.wrong += [seen for seen, good in zip(results, self._good, strict=True) if seen not in (good, *allowed)]
