"""Mappings: the store's process finds all pages that it is to write a file from in its page table."""

import mmap
import os
import pickle
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvtier.store.blob_store import Blob
from kvtier.store.disk_writes import DiskWrites
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.process.channel import Mappings, receive, send
from kvtier.store.process.store_server import StoreServer, Walks
from kvtier.store.record import digest

PAGE = mmap.PAGESIZE


@contextmanager
def shared_pages(num_pages: int) -> Iterator[int]:
    """A file in memory, written by another mapping of it, as an asker does."""
    file = os.memfd_create("kvtier-test")
    os.ftruncate(file, num_pages * PAGE)
    os.pwrite(file, b"a" * num_pages * PAGE, 0)
    try:
        yield file
    finally:
        os.close(file)


def entered_pages(mappings: Mappings, num_pages: int) -> list[bool]:
    """For each page of the first memory whether this process has it in its page table; looking enters none."""
    address = np.frombuffer(mappings.view((0, 0, num_pages * PAGE)), np.uint8).__array_interface__["data"][0]
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(address // PAGE * 8)
        entries = np.frombuffer(file.read(num_pages * 8), np.uint64)
    return [bool(entry >> np.uint64(63)) for entry in entries]


def test_the_pages_of_a_piece_are_entered_and_no_others() -> None:
    with shared_pages(64) as file:
        mappings = Mappings([(file, 64 * PAGE, False)])
        assert not any(entered_pages(mappings, 64))

        mappings.enter((0, 9 * PAGE + 5, 2 * PAGE))

        entered = entered_pages(mappings, 64)
        assert all(entered[9:12])
        assert not any(entered[32:])  # Linux enters neighbours too, fifteen at most


def test_bytes_that_came_over_the_socket_have_no_pages_to_enter() -> None:
    Mappings([]).enter(b"abc")


def test_the_pages_of_blocks_are_entered_before_the_store_writes_them(tmp_path: Path) -> None:
    entered: list[bool] = []

    ours, theirs = socket.socketpair()
    with shared_pages(64) as file, LmdbStore(tmp_path / "store", 16 << 20, writes=DiskWrites.BUFFERED) as store, ours:
        put_many = store.put_many

        def watched_put(blobs: Sequence[Blob]) -> list[bytes]:
            entered.extend(entered_pages(mappings, 64))
            return put_many(blobs)

        store.put_many = watched_put
        mappings = Mappings([(file, 64 * PAGE, False)])
        key, block = b"k" * 32, (0, 0, 4 * PAGE)
        row = (key, digest(b"a" * 4 * PAGE), block, b"", b"")
        send(ours, 1, pickle.dumps(("put_many", ([row],))))
        ours.shutdown(socket.SHUT_WR)
        with theirs:
            StoreServer(store, mappings, Walks(store), theirs).serve()
        _, answer = receive(ours)

        assert pickle.loads(answer) == (True, [])
        assert all(entered[:4])
        assert store.contains(key)
