"""The process behind a `StoreProcess`: an `LmdbStore` and threads that answer for it. Started by `python -m`.

It ends at once, as if killed, when a socket is closed or the process that started it ends: then the next process can
open the store.
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
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.process.channel import Bytes, Mappings, portable, receive, send
from kvtier.store.record import Fault

# Added to the niceness of the process: writing goes behind computing, as no request waits for it.
WRITER_NICENESS = 10
_ITEMS_PER_ANSWER = 4096
_ANSWER_S = 1.0  # for the items of one answer to a walk: verifying them may take long
_WATCH_S = 0.1


class Walks:
    """Iterations over the store, by number. They occupy no socket, so the asker may pause for any time in between."""

    def __init__(self, store: LmdbStore) -> None:
        self._store = store
        self._numbers = count()
        self._items: dict[int, Iterator[Any]] = {}

    def begin(self, method: str, ended: Iterable[int]) -> int:
        """Begin an iteration by *method* and return its number; forget those that have *ended*."""
        for number in ended:
            self._items.pop(number, None)
        number = next(self._numbers)
        self._items[number] = getattr(self._store, method)()
        return number

    def go_on(self, number: int) -> list[Any]:
        """The next items of iteration *number*; none at its end."""
        items: list[Any] = []
        stop_at = time.monotonic() + _ANSWER_S
        for item in self._items[number]:
            items.append(item)
            if len(items) == _ITEMS_PER_ANSWER or time.monotonic() > stop_at:
                break
        return items


class StoreServer:
    """Answers the questions that come over one socket, in one thread."""

    def __init__(self, store: LmdbStore, mappings: Mappings, walks: Walks, end: socket.socket) -> None:
        self._store = store
        self._mappings = mappings
        self._walks = walks
        self._socket = end

    def serve(self) -> None:
        """Answer until the socket is closed, or the index is found damaged: the next start is then empty, and works."""
        with contextlib.suppress(EOFError, OSError):
            while not self._store.is_lost:
                number, question = receive(self._socket)
                if not self._store.is_lost:  # else another thread is ending the process
                    send(self._socket, number, self._answer(question))

    def _answer(self, question: memoryview) -> bytes:
        try:
            method, arguments = pickle.loads(question)
            act: Callable[..., Any] = getattr(self, f"_{method}", None) or getattr(self._store, method)
            return pickle.dumps((True, act(*arguments)))
        except Exception as error:  # raised in the asker
            return pickle.dumps((False, portable(error)))

    def _put_many(self, rows: Sequence[tuple[bytes, bytes, Bytes, bytes, bytes]]) -> list[bytes]:
        for _, _, raw, *_ in rows:
            self._mappings.enter(raw)
        view = self._mappings.view
        return self._store.put_many([Blob(key, digest, view(raw), *origin) for key, digest, raw, *origin in rows])

    def _read_many(
        self, keys: Sequence[bytes], pieces: Sequence[Bytes | int]
    ) -> tuple[list[bytes | Fault], list[bytearray]]:
        """Digests or faults; and, in order, the blocks that were read into memory that is not shared."""
        outs = [memoryview(bytearray(p)) if isinstance(p, int) else self._mappings.view(p) for p in pieces]
        results = self._store.read_many(keys, outs)
        return results, [bytearray(out) for out, p in zip(outs, pieces, strict=True) if isinstance(p, int)]

    def _begin(self, method: str, ended: Sequence[int]) -> int:
        return self._walks.begin(method, ended)

    def _go_on(self, number: int) -> list[Any]:
        return self._walks.go_on(number)


def main() -> None:
    """Open the store that the first question describes, and answer until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the asker handles Ctrl-C
    files, memories, num_writers, parent = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    sockets = [socket.socket(fileno=file) for file in files]
    try:
        number, question = receive(sockets[0])
    except (EOFError, OSError):  # the asker was interrupted before it asked
        return
    try:
        _, (settings,) = pickle.loads(question)
        store: LmdbStore = settings.open()
    except Exception as error:  # raised in the asker
        send(sockets[0], number, pickle.dumps((False, portable(error))))
        return
    send(sockets[0], number, pickle.dumps((True, None)))
    mappings, walks = Mappings(memories), Walks(store)
    threads = [
        threading.Thread(target=_serve, args=(StoreServer(store, mappings, walks, end), i < num_writers))
        for i, end in enumerate(sockets)
    ]
    for thread in threads:
        thread.start()
    mappings.warm()
    for thread in threads:
        thread.join()


def _end_with_parent(parent: int) -> None:
    """End this process when *parent* ends: a child that *parent* forked may keep its ends of the sockets open."""
    while os.getppid() == parent:  # PR_SET_PDEATHSIG comes when the thread ends that started this process
        time.sleep(_WATCH_S)
    os._exit(0)


def _serve(server: StoreServer, is_writer: bool) -> None:
    if is_writer:
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.nice(WRITER_NICENESS)  # of this thread, on Linux
    try:
        server.serve()
    finally:
        os._exit(0)  # closed, damaged, or the asker ended: a process killed at any point leaves a whole store


if __name__ == "__main__":
    main()
