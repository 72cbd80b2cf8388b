"""The process behind a `StoreProcess`: an `LmdbStore` and threads that answer for it. Started by `python -m`.

It ends at once, as if killed, when a socket does, or the process that started it: then the next one can have the store.
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
_ANSWER_S = 1.0  # for some items of a walk: to verify them may take long
_WATCH_S = 0.1


class Walks:
    """Iterations under way, by number. No socket is theirs: who walks may stop in between for as long as he likes."""

    def __init__(self, store: LmdbStore) -> None:
        self._store = store
        self._numbers = count()
        self._items: dict[int, Iterator[Any]] = {}

    def begin(self, method: str, ended: Iterable[int]) -> int:
        """The number of a new one; the *ended* are forgotten."""
        for number in ended:
            self._items.pop(number, None)
        number = next(self._numbers)
        self._items[number] = getattr(self._store, method)()
        return number

    def go_on(self, number: int) -> list[Any]:
        """Some more of its items; none at its end."""
        items: list[Any] = []
        stop_at = time.monotonic() + _ANSWER_S
        for item in self._items[number]:
            items.append(item)
            if len(items) == _ITEMS_PER_ANSWER or time.monotonic() > stop_at:
                break
        return items


class StoreServer:
    """Answers on one socket; one thread runs it."""

    def __init__(self, store: LmdbStore, mappings: Mappings, walks: Walks, end: socket.socket) -> None:
        self._store = store
        self._mappings = mappings
        self._walks = walks
        self._socket = end

    def serve(self) -> None:
        """Until nobody asks any more, or another start would have a better store."""
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
        except Exception as error:  # the asker's to handle
            return pickle.dumps((False, portable(error)))

    def _put_many(self, rows: Sequence[tuple[bytes, bytes, Bytes, bytes, bytes]]) -> list[bytes]:
        view = self._mappings.view
        return self._store.put_many([Blob(key, digest, view(raw), *origin) for key, digest, raw, *origin in rows])

    def _read_many(
        self, keys: Sequence[bytes], pieces: Sequence[Bytes | int]
    ) -> tuple[list[bytes | Fault], list[bytearray]]:
        """Digests or faults; and, in order, what was read into memory that is not shared."""
        outs = [memoryview(bytearray(p)) if isinstance(p, int) else self._mappings.view(p) for p in pieces]
        results = self._store.read_many(keys, outs)
        return results, [bytearray(out) for out, p in zip(outs, pieces, strict=True) if isinstance(p, int)]

    def _begin(self, method: str, ended: Sequence[int]) -> int:
        return self._walks.begin(method, ended)

    def _go_on(self, number: int) -> list[Any]:
        return self._walks.go_on(number)


def main() -> None:
    """Open the store that the first question tells of; answer until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the asker's to handle
    files, memories, num_writers, parent = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    sockets = [socket.socket(fileno=file) for file in files]
    try:
        number, question = receive(sockets[0])
    except (EOFError, OSError):  # interrupted before asking
        return
    try:
        _, (settings,) = pickle.loads(question)
        store: LmdbStore = settings.open()
    except Exception as error:  # the asker's to handle
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
    """End with the process that started this one: a child that it forked may keep its ends of the sockets open."""
    while os.getppid() == parent:  # PR_SET_PDEATHSIG would come when the thread ends that started this process
        time.sleep(_WATCH_S)
    os._exit(0)


def _serve(server: StoreServer, is_writer: bool) -> None:
    if is_writer:
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.nice(WRITER_NICENESS)  # of this thread, on Linux
    try:
        server.serve()
    finally:
        os._exit(0)  # closed or lost, or the asker died: what a killed process leaves is whole


if __name__ == "__main__":
    main()
