"""The process behind a `StoreProcess`: an `LmdbStore` and the threads that serve it. Started by `python -m`.

The process ends at once, as if killed, when a socket is closed or its parent ends. Then the next process can open the
store. It ignores SIGTERM, SIGHUP and SIGINT, because its parent flushes blocks to the store after such a signal.
"""

import contextlib
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

from kvtier.store.blob_store import Blob
from kvtier.store.disk_writes import DiskWrites
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.process.channel import Bytes, Mappings, portable, receive, send
from kvtier.store.record import Fault
from kvtier.store.store_settings import StoreSettings

_ITEMS_PER_ANSWER = 4096
_ANSWER_S = 1.0  # time limit for the items of one response to a walk, because verifying them may take long
_WATCH_S = 0.1


class Walks:
    """The iterations over the store that the client has begun, each with a number.

    Each request returns the next items of one iteration. Between requests the client may pause for any time, because an
    iteration occupies no socket.
    """

    def __init__(self, store: LmdbStore) -> None:
        self._store = store
        self._numbers = count()
        self._items: dict[int, Iterator[Any]] = {}

    def begin(self, method: str, ended: Iterable[int]) -> int:
        """Begin an iteration by *method* and return its number. Forget the iterations that have *ended*."""
        for number in ended:
            self._items.pop(number, None)
        number = next(self._numbers)
        self._items[number] = getattr(self._store, method)()
        return number

    def go_on(self, number: int) -> list[Any]:
        """Return the next items of iteration *number*, or an empty list at the end of the iteration."""
        items: list[Any] = []
        stop_at = time.monotonic() + _ANSWER_S
        for item in self._items[number]:
            items.append(item)
            if len(items) == _ITEMS_PER_ANSWER or time.monotonic() > stop_at:
                break
        return items


class StoreServer:
    """The server for the requests of one socket, in one thread."""

    def __init__(self, store: LmdbStore, mappings: Mappings, walks: Walks, end: socket.socket) -> None:
        self._store = store
        self._mappings = mappings
        self._walks = walks
        self._socket = end

    def serve(self) -> None:
        """Answer requests until the socket is closed or the index is found damaged.

        After damage the process must end. The next process then starts with an empty store.
        """
        with contextlib.suppress(EOFError, OSError):
            while not self._store.is_lost:
                number, question = receive(self._socket)
                if not self._store.is_lost:  # otherwise another thread is ending the process
                    send(self._socket, number, self._answer(question))

    def _answer(self, question: memoryview) -> bytes:
        try:
            method, arguments = pickle.loads(question)
            act: Callable[..., Any] = getattr(self, f"_{method}", None) or getattr(self._store, method)
            return pickle.dumps((True, act(*arguments)))
        except Exception as error:  # raised in the client
            return pickle.dumps((False, portable(error)))

    def _put_many(self, rows: Sequence[tuple[bytes, bytes, Bytes, bytes, bytes]]) -> list[bytes]:
        if self._store.writes is DiskWrites.BUFFERED:
            for _, _, raw, *_ in rows:
                self._mappings.enter(raw)
        view = self._mappings.view
        return self._store.put_many([Blob(key, digest, view(raw), *origin) for key, digest, raw, *origin in rows])

    def _read_many(
        self, keys: Sequence[bytes], pieces: Sequence[Bytes | int]
    ) -> tuple[list[bytes | Fault], list[bytearray]]:
        """Read the blocks of *keys* into *pieces*. An int in *pieces* is the length of a block outside shared memory.

        Returns the digest or fault of each key, and the blocks outside shared memory.
        """
        outs = [memoryview(bytearray(p)) if isinstance(p, int) else self._mappings.view(p) for p in pieces]
        results = self._store.read_many(keys, outs)
        return results, [bytearray(out) for out, p in zip(outs, pieces, strict=True) if isinstance(p, int)]

    def _begin(self, method: str, ended: Sequence[int]) -> int:
        return self._walks.begin(method, ended)

    def _go_on(self, number: int) -> list[Any]:
        return self._walks.go_on(number)


def main() -> None:
    """Open the store that the first request describes, and serve it until it is closed."""
    # A service manager or a terminal may send these to all processes at once. The client may still write after them.
    for ignored in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(ignored, signal.SIG_IGN)
    files, memories, num_writers, parent = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    sockets = [socket.socket(fileno=file) for file in files]
    try:
        number, question = receive(sockets[0])
    except (EOFError, OSError):  # the client was interrupted before its first request
        return
    try:
        settings: StoreSettings
        _, (settings,) = pickle.loads(question)
        store = settings.open()
    except Exception as error:  # raised in the client
        send(sockets[0], number, pickle.dumps((False, portable(error))))
        return
    send(sockets[0], number, pickle.dumps((True, None)))
    mappings, walks = Mappings(memories), Walks(store)
    threads = [
        threading.Thread(
            target=_serve,
            args=(StoreServer(store, mappings, walks, end), settings.writer_niceness if i < num_writers else 0),
        )
        for i, end in enumerate(sockets)
    ]
    for thread in threads:
        thread.start()
    mappings.warm()
    for thread in threads:
        thread.join()


def _end_with_parent(parent: int) -> None:
    """End this process when the process *parent* ends.

    A closed socket is not a reliable sign, because a child forked from *parent* may keep the socket open.
    """
    while os.getppid() == parent:  # not PR_SET_PDEATHSIG, which fires when the thread that started this process ends
        time.sleep(_WATCH_S)
    os._exit(0)


def _serve(server: StoreServer, niceness: int) -> None:
    if niceness:
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.nice(niceness)  # on Linux, of this thread and those that it starts
    try:
        server.serve()
    finally:
        os._exit(0)  # closed, damaged, or the client ended: a process killed at any point leaves an intact store


if __name__ == "__main__":
    main()
