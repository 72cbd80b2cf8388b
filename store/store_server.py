"""The process behind a `StoreProcess`: an `LmdbStore` and threads that answer for it. Started by `python -m`.

Whoever asks is gone when a connection ends without a `close`: then this process ends at once, as if killed, so that
the next one can have the store.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

from kvtier.store.blob_store import Blob
from kvtier.store.channel import Bytes, Mappings
from kvtier.store.lmdb_store import LmdbStore
from kvtier.store.record import Fault
from kvtier.store.store_settings import StoreSettings

WRITER_NICENESS = 10  # writing goes behind computing: nobody waits for it
_ITEMS_PER_ANSWER = 4096


class StoreServer:
    """Answers on one connection; one thread runs it."""

    def __init__(self, store: LmdbStore, mappings: Mappings, connection: "Connection[Any, Any]") -> None:
        self._store = store
        self._mappings = mappings
        self._connection = connection
        self._items: Iterator[Any] = iter(())

    def serve(self) -> None:
        """Until nobody asks any more."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                method, arguments = self._connection.recv()
                self._connection.send(self._answer(method, arguments))

    def _answer(self, method: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        try:
            act: Callable[..., Any] = getattr(self, f"_{method}", None) or getattr(self._store, method)
            return True, act(*arguments)
        except Exception as error:  # the asker's to handle
            return False, error

    def _put_many(self, rows: Sequence[tuple[bytes, bytes, Bytes, bytes, bytes]]) -> list[bytes]:
        view = self._mappings.view
        return self._store.put_many([Blob(key, digest, view(raw), *ties) for key, digest, raw, *ties in rows])

    def _read_many(
        self, keys: Sequence[bytes], pieces: Sequence[Bytes | int]
    ) -> tuple[list[bytes | Fault], list[bytearray]]:
        """Digests or faults; and, in order, what was read into memory that is not shared."""
        outs = [memoryview(bytearray(p)) if isinstance(p, int) else self._mappings.view(p) for p in pieces]
        results = self._store.read_many(keys, outs)
        return results, [bytearray(out) for out, p in zip(outs, pieces, strict=True) if isinstance(p, int)]

    def _begin(self, method: str) -> None:
        """Start an iteration on this connection."""
        self._items = getattr(self._store, method)()

    def _next(self) -> list[Any]:
        """Some more of its items; none at its end."""
        return list(islice(self._items, _ITEMS_PER_ANSWER))


def main() -> None:
    """Open the store that the arguments tell of; answer until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the asker's to handle
    files, memories, num_writers = json.loads(sys.argv[1])
    connections = [Connection(file) for file in files]
    settings: StoreSettings = connections[0].recv()
    try:
        store = settings.open()
    except Exception as error:  # the asker's to handle
        connections[0].send((False, error))
        return
    connections[0].send((True, None))
    mappings = Mappings(memories)
    threads = [
        threading.Thread(target=_serve, args=(StoreServer(store, mappings, connection), number < num_writers))
        for number, connection in enumerate(connections)
    ]
    for thread in threads:
        thread.start()
    mappings.warm()
    for thread in threads:
        thread.join()


def _serve(server: StoreServer, is_writer: bool) -> None:
    if is_writer:
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)
    try:
        server.serve()
    finally:
        os._exit(0)  # closed, or the asker died: what a killed process leaves is whole


if __name__ == "__main__":
    main()
