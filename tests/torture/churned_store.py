"""A store whose content is replaced again and again, and figures that would show a leak; run by `fork_server.py`."""

import gc
import itertools
import os
import random
import re
import threading
import time
from pathlib import Path
from typing import Any

from fork_server import DEADLINE_S, Say
from lmdb_pages import used_bytes
from torture_blocks import CHAIN_BLOCKS, KINDS, blob_of, chain, key_of, number_of, numbers_in, open_store, read_numbers

from kvtier.store.codec.codec import CODECS
from kvtier.store.codec.seal import seal
from kvtier.store.lmdb import files as lmdb_files
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.record import Fault

_CODECS = ("none", "zstd-plane-2")


def run(
    say: Say,
    folder: str,
    capacity_bytes: int,
    durability: str,
    seed: int,
    num_turnovers: int,
    turnovers_per_opening: int,
    check_readers_s: float = 10.0,
    with_syncs: bool = False,
    pause_at: int = -1,
    go_on: str = "",
) -> None:
    """Fill the store *num_turnovers* times over, say after each how things stand, and now and then open it anew.

    After turnover *pause_at* it waits until there is a file *go_on*.
    """
    lmdb_files.CHECK_READERS_S = check_readers_s
    churn = Churn(Path(folder), capacity_bytes, durability, random.Random(seed))
    unopened = held()
    say(unopened=unopened)
    for first in range(0, num_turnovers, turnovers_per_opening):
        codec = _CODECS[first // turnovers_per_opening % 2]
        with open_store(folder, capacity_bytes, codec, durability) as store:
            for place in range(first, min(first + turnovers_per_opening, num_turnovers)):
                churn.turn_over(store, codec)
                if with_syncs:  # among the levels of durability one keeps all pages until then
                    store.sync()
                if place % 5 == 4:
                    churn.assert_books_agree(store)
                say(turnover=place, **churn.footprint(store))
                while place == pause_at and not Path(go_on).exists():
                    time.sleep(0.01)
            churn.assert_books_agree(store)
    give_up_at = time.monotonic() + DEADLINE_S
    while held() != unopened and time.monotonic() < give_up_at:  # a thread that was joined is listed a moment longer
        time.sleep(0.01)
    say(closed=held())


def held() -> dict[str, int]:
    """Kernel resources that the process holds."""
    links = [_link(name) for name in os.listdir("/proc/self/fd")]
    num_slabs = sum("/slab-" in link for link in links)
    num_threads = len(os.listdir("/proc/self/task"))
    return {"num_files": len(links) - num_slabs, "num_slabs": num_slabs, "num_threads": num_threads}


def _link(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:  # the descriptor that listed them
        return ""


def file_bytes(folder: Path) -> int:
    """Bytes that index and payloads take on the medium."""
    return sum(file.stat().st_blocks * 512 for file in [folder / "data.mdb", *folder.glob("slab-*")])


class Churn:
    """Knows which blocks the store has, and the charge of each, which depends on the codec that wrote it."""

    def __init__(self, folder: Path, capacity_bytes: int, durability: str, rng: random.Random) -> None:
        self._folder = folder
        self._capacity_bytes = capacity_bytes
        self._rng = rng
        self._charges: dict[int, int] = {}
        self._chain_ids = itertools.count()

    def turn_over(self, store: LmdbStore, codec: str) -> None:
        """Put as many bytes as the capacity, with touches, deletions, and threads that start, read and end."""
        problems: list[str] = []
        readers = [threading.Thread(target=self._read, args=(store, n, problems)) for n in range(3)]
        for reader in readers:
            reader.start()
        try:
            num_bytes = 0
            while num_bytes < self._capacity_bytes:
                num_bytes += self._change(store, codec)
        finally:
            for reader in readers:
                reader.join()
        assert problems == []

    def _change(self, store: LmdbStore, codec: str) -> int:
        """Put blocks, and perhaps touch and delete some; bytes that were put."""
        if self._rng.random() < 0.2:
            store.touch([key_of(number) for number in self._some()])
        if self._rng.random() < 0.05:
            numbers = self._some()
            assert store.delete([key_of(number) for number in numbers]) == len(numbers)
            for number in numbers:
                del self._charges[number]
        return self._put(store, codec)

    def assert_books_agree(self, store: LmdbStore) -> None:
        """Raise AssertionError unless the store's figures are those of a full scan and of this book."""
        store.check()
        found = numbers_in(store)
        # The kernel may write back pages meanwhile, and then allocate blocks of its own for a file's extents.
        before = file_bytes(self._folder)
        statistics = store.statistics()
        after = file_bytes(self._folder)
        assert min(before, after) <= statistics.file_bytes <= max(before, after)
        assert sorted(found) == sorted(self._charges), "the store holds other blocks than it said"
        assert statistics.num_records == len(found)
        assert statistics.stored_bytes == sum(self._charges.values())
        assert statistics.faults == {}
        for first in range(0, len(found), 16):  # not all at once: the heap is being watched
            some = found[first : first + 16]
            assert read_numbers(store, some) == (some, {})

    def footprint(self, store: LmdbStore) -> dict[str, Any]:
        """Figures that must not grow from turnover to turnover."""
        gc.collect()
        status = Path("/proc/self/status").read_text()
        return {
            **held(),
            "num_objects": len(gc.get_objects()),
            "heap_bytes": 1024 * int(re.findall(r"RssAnon:\s+(\d+)", status)[0]),
            "num_sizes": len(list(self._folder.glob("slab-*"))),
            "file_bytes": file_bytes(self._folder),
            "used_bytes": used_bytes(self._folder),
            "num_records": store.statistics().num_records,
        }

    def _put(self, store: LmdbStore, codec: str) -> int:
        numbers = chain(self._rng.choice(KINDS), next(self._chain_ids))[: self._rng.randint(1, CHAIN_BLOCKS)]
        blobs = [blob_of(number) for number in numbers[::-1]]
        evicted = store.put_many(blobs)
        charges = {number_of(blob.key): seal(blob, CODECS[codec]).charged_bytes for blob in blobs}
        self._charges |= charges
        for key in evicted:
            del self._charges[number_of(key)]
        return sum(charges.values())

    def _read(self, store: LmdbStore, reader_id: int, problems: list[str]) -> None:
        rng = random.Random(reader_id)
        for _ in range(20):
            try:
                some = rng.sample(list(self._charges), min(8, len(self._charges)))
                _, faults = read_numbers(store, some)
                if not set(faults.values()) <= {Fault.MISSING}:
                    problems.append(f"bad records: {faults}")
            except RuntimeError:  # the thread that owns the book has just changed it
                continue
            except AssertionError as error:
                problems.append(str(error))

    def _some(self) -> list[int]:
        numbers = list(self._charges)
        return self._rng.sample(numbers, min(len(numbers), self._rng.randint(1, 8)))
