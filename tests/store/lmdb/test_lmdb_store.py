"""Tests of what only a store on disk can get wrong: reopening, other processes, kills, crashes, full disks."""

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest
import store_cases
from panicking_lmdb import PanickingLmdb
from store_cases import blob_of, key_of, kv_bytes, oldest_first
from waiting import DEADLINE_S, is_in, join, wait_for

from kvtier.store.blob_store import Blob, StoreFull
from kvtier.store.codec.seal import charged_bytes
from kvtier.store.durability import Durability
from kvtier.store.lmdb import data_file, lmdb_store
from kvtier.store.lmdb import files as lmdb_files
from kvtier.store.lmdb import reader as lmdb_reader
from kvtier.store.lmdb import writer as lmdb_writer
from kvtier.store.lmdb.boot_mark import BootMark, FileState, current_boot_id
from kvtier.store.lmdb.files import LmdbFiles, MapUsers
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.lmdb.tables import MIN_REMOVAL_BYTES
from kvtier.store.owner_lock import FolderInUse
from kvtier.store.record import Fault, digest, plain_digest
from kvtier.store.slab import Slabs, Slot

CAPACITY_BYTES = 10 << 20


# Stores blocks 0, 1, 2, ... of changing size in calls of six, and says each call's last number when it is done.
WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from store_cases import blob_of
from kvtier.store.lmdb.lmdb_store import LmdbStore

with LmdbStore(Path(sys.argv[1]), 3 << 20) as store:
    number = int(sys.argv[2])
    while True:
        store.put_many([blob_of(n, 4000 + n % 7 * 50_000) for n in range(number, number + 6)])
        number += 6
        print(number - 1, flush=True)
"""

HOLDER = """
import sys
from pathlib import Path
from kvtier.store.lmdb.lmdb_store import LmdbStore

with LmdbStore(Path(sys.argv[1]), 1 << 20):
    print("open", flush=True)
    sys.stdin.read()
"""


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]


def test_reopening_keeps_records_recency_and_totals(tmp_path: Path) -> None:
    with LmdbStore(tmp_path, 4 * charged_bytes(20_000)) as store:
        store.put_many([blob_of(n) for n in range(6)])
        store.touch([key_of(3)])
        before = store.statistics()

    with LmdbStore(tmp_path, 4 * charged_bytes(20_000)) as store:
        assert store.statistics() == before
        assert (before.num_records, before.evicted_total, before.written_bytes_total) == (4, 2, 120_000)
        assert oldest_first(store) == [key_of(n) for n in (2, 3, 4, 5)]
        assert all(fault is None for _, fault in store.verify())
        assert store.put_many([blob_of(7), blob_of(8)]) == [key_of(2), key_of(4)]
        store.check()


def test_a_smaller_capacity_evicts_the_oldest_at_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmdb_files, "MAX_EVICTED", 2)
    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        store.put_many([blob_of(n) for n in range(9)])

    with LmdbStore(tmp_path, 2 * charged_bytes(20_000)) as store:
        assert oldest_first(store) == [key_of(7), key_of(8)]
        store.check()


def test_a_second_process_is_refused_and_told_who_has_the_store(tmp_path: Path) -> None:
    with start(HOLDER, tmp_path) as holder:
        assert read_line(holder) == "open"

        with pytest.raises(FolderInUse, match=f"open in process {holder.pid};"):
            LmdbStore(tmp_path, CAPACITY_BYTES)

        holder.communicate()  # end of input: the holder closes
    LmdbStore(tmp_path, CAPACITY_BYTES).close()


def test_the_same_process_is_refused_too_and_may_open_again_after_closing(tmp_path: Path) -> None:
    with (
        LmdbStore(tmp_path, CAPACITY_BYTES),
        pytest.raises(FolderInUse, match=f"process {os.getpid()};"),
    ):
        LmdbStore(tmp_path, CAPACITY_BYTES)

    LmdbStore(tmp_path, CAPACITY_BYTES).close()


@pytest.mark.long
def test_a_store_killed_while_writing_opens_whole(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    next_number = 0
    for _ in range(6):
        with start(WRITER, tmp_path, next_number, Path(store_cases.__file__).parent) as writer:
            for _ in range(rng.randint(1, 60)):
                last_number = int(read_line(writer))
            writer.send_signal(signal.SIGKILL)
            while line := read_line(writer):  # what it said until the kill
                last_number = int(line)

        with LmdbStore(tmp_path, 3 << 20) as store:
            store.check()
            keys = oldest_first(store)
            assert key_of(last_number) in keys[-12:]  # said to be stored: at most one more call was
            for key in keys:
                number = int.from_bytes(key[16:], "big")
                out = bytearray(4000 + number % 7 * 50_000)
                assert store.read_many([key], [memoryview(out)]) == [digest(out)]
                assert out == kv_bytes(number, len(out))
            next_number = int.from_bytes(keys[-1][16:], "big") + 1


def test_a_machine_that_went_down_with_the_store_open_leaves_it_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        store.put_many([blob_of(1)])
        assert BootMark.read(tmp_path) == BootMark(current_boot_id(), FileState.PROCESS)
    BootMark("earlier-boot", FileState.PROCESS).write(tmp_path)

    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        assert oldest_first(store) == []
        assert store.statistics().num_records == 0
    assert [text.partition("starts empty: ")[2] for text in warnings_in(caplog)] == [
        "the machine went down while it was open"
    ]


def test_a_store_closed_before_a_reboot_is_kept(tmp_path: Path) -> None:
    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        store.put_many([blob_of(1)])
    mark = BootMark.read(tmp_path)
    assert mark == BootMark(current_boot_id(), FileState.CLEAN)
    BootMark("earlier-boot", FileState.CLEAN).write(tmp_path)

    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        assert store.contains(key_of(1))


@pytest.mark.parametrize("damage", ["no mark", "other layout", "not LMDB", "cut short"])
def test_a_file_that_cannot_be_vouched_for_is_replaced_by_an_empty_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        store.put_many([blob_of(1)])
    if damage == "no mark":
        (tmp_path / "boot_mark").unlink()
    elif damage == "other layout":
        BootMark(current_boot_id(), FileState.CLEAN, layout="kvtier-store-0").write(tmp_path)
    elif damage == "not LMDB":
        (tmp_path / "data.mdb").write_bytes(b"something else " * 5000)
    else:
        os.truncate(tmp_path / "data.mdb", 8192)

    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        assert oldest_first(store) == []
        assert store.put_many([blob_of(2)]) == []
        store.check()
    assert len(warnings_in(caplog)) == 1
    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        assert oldest_first(store) == [key_of(2)]


def test_a_full_disk_is_an_error_that_leaves_the_store_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with LmdbStore(tmp_path, 200 << 20) as store:
        store.put_many([blob_of(1)])
        with monkeypatch.context() as full:
            full.setattr(os, "pwritev", refuse)

            with pytest.raises(OSError, match="No space left"):
                store.put_many([blob_of(2, 16 << 20)])

            assert oldest_first(store) == [key_of(1)]
            assert store.delete([key_of(1)]) == 1  # room is made without asking for room
            store.check()

        store.put_many([blob_of(3)])
        assert oldest_first(store) == [key_of(3)]


@pytest.mark.parametrize("given", [1801911927, None])  # the first filled the very last page; without one, a fresh one
def test_a_map_too_small_for_its_capacity_costs_blocks_but_never_the_state(
    given: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(1 << 32) if given is None else given
    print(f"seed {seed}")
    monkeypatch.setattr(data_file, "slab_bytes", lambda capacity_bytes: 5 << 19)
    free_pages = LmdbFiles.free_pages
    rooms: list[int] = []

    def count_room(files: LmdbFiles, limit_bytes: int) -> None:
        rooms.append(limit_bytes)
        free_pages(files, limit_bytes)

    monkeypatch.setattr(LmdbFiles, "free_pages", count_room)
    rng = random.Random(seed)
    num_refused = 0
    present: set[bytes] = set()
    with LmdbStore(tmp_path, 3 << 20) as store:
        for _ in range(150):
            blobs = [blob_of(n, 4000 + n % 9 * 20_000) for n in rng.sample(range(60), 6)]
            try:
                evicted = store.put_many(blobs)
                present = (present | {blob.key for blob in blobs}) - set(evicted)
            except StoreFull:
                num_refused += 1
                present = set(store.keys())
            store.check()
            assert set(store.keys()) == present
        assert all(fault is None for _, fault in store.verify())

    assert rooms  # the map did get full
    assert num_refused < len(rooms) / 4  # and making room helped: 0 in 400 seeds


@pytest.mark.parametrize("durability", [Durability.PROCESS, Durability.COMMIT])
def test_an_index_that_fills_its_map_is_no_damage_and_can_be_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, durability: Durability
) -> None:
    monkeypatch.setattr(data_file, "index_bytes", lambda capacity_bytes: 640 << 10)
    num_refused = 0
    with LmdbStore(tmp_path, 64 << 20, durability=durability) as store:
        for first in range(0, 6000, 20):
            numbers = range(first, first + 20)
            try:
                store.put_many([blob_of(n, 200) for n in numbers])
            except StoreFull:
                num_refused += 1
            store.touch([key_of(n) for n in numbers])
        store.check()
        num_records = store.statistics().num_records

        gone = store.evict(64 << 20, 6000)

        assert len(gone.keys) == num_records > 500
        store.check()
    assert num_refused < 10  # room was made for the others
    assert not warnings_in(caplog)


def test_a_change_on_a_full_disk_passes_over_no_more_records_than_it_has_pages_for(tmp_path: Path) -> None:
    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        store.put_many([blob_of(n) for n in range(12)])
        store.touch([key_of(n) for n in range(12)])

        evicted = []
        for _ in range(4):
            with store.files.changing(removal_bytes=MIN_REMOVAL_BYTES) as change:
                evicted.append(change.evict(0, 3))

        assert evicted == [[], [], [], [key_of(n) for n in range(3)]]


def num_changes(store: LmdbStore) -> int:
    with store.files.reading() as txn:
        return store.files.tables.counters(txn).num_changes


def test_one_change_evicts_a_limited_number_of_all_tenants_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdb_writer, "MAX_EVICTED", 2)
    tenants, charge = (b"a" * 8, b"b" * 8), charged_bytes(1000)
    with LmdbStore(tmp_path, CAPACITY_BYTES, quotas=dict.fromkeys(tenants, 10 * charge)) as store:
        store.put_many([replace(blob_of(n, 1000), tenant=tenants[n % 2]) for n in range(20)])
        before = num_changes(store)

        evicted = store.put_many([replace(blob_of(100 + n, 10_000), tenant=tenant) for n, tenant in enumerate(tenants)])

        assert 4 < len(evicted) == len(set(evicted))
        assert num_changes(store) > before + 1


def test_evicting_one_record_passes_over_many_in_one_change(tmp_path: Path) -> None:
    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        store.put_many([blob_of(n, 100) for n in range(100)])
        store.touch([key_of(n) for n in range(100)])
        before = num_changes(store)

        assert store.evict(1, 1).keys == [key_of(0)]

        assert num_changes(store) == before + 1


def test_a_record_whose_slot_is_cut_off_is_corrupt_and_gone(tmp_path: Path) -> None:
    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        store.put_many([blob_of(1), blob_of(2)])
        os.truncate(tmp_path / f"slab-{5 * 4096}", 5 * 4096)

        assert store.read_many([key_of(1)], [memoryview(bytearray(20_000))]) == [blob_of(1).digest]
        assert store.read_many([key_of(2)], [memoryview(bytearray(20_000))]) == [Fault.CORRUPT]

        assert not store.contains(key_of(2))
        store.check()


def test_closing_waits_for_a_read_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LmdbStore(tmp_path, CAPACITY_BYTES)
    store.put_many([blob_of(1)])
    closer = threading.Thread(target=store.close)
    read = Slabs.read

    def read_while_closing(slabs: Slabs, slots: list[Slot], outs: list[memoryview]) -> None:
        closer.start()
        wait_for(lambda: is_in(closer.ident or 0, MapUsers.close) or not closer.is_alive())
        assert closer.is_alive()  # else the files are no longer open
        read(slabs, slots, outs)

    monkeypatch.setattr(Slabs, "read", read_while_closing)

    assert store.read_many([key_of(1)], [memoryview(bytearray(20_000))]) == [blob_of(1).digest]
    join(closer)


def test_a_broken_tree_is_an_error_now_and_an_empty_store_next_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = LmdbStore(tmp_path, CAPACITY_BYTES)
    store.put_many([blob_of(n, 1000) for n in range(200)])
    store.close()
    store = LmdbStore(tmp_path, CAPACITY_BYTES)
    size = (tmp_path / "data.mdb").stat().st_size
    used = store.files.tables.file.used_bytes()
    with (tmp_path / "data.mdb").open("r+b") as file:  # all tree pages behind the two meta pages
        file.seek(8192)
        file.write(bytes(used - 8192))
    assert (tmp_path / "data.mdb").stat().st_size == size

    with pytest.raises(OSError, match="store"):
        store.put_many([blob_of(500)])
    store.close()

    assert BootMark.read(tmp_path) == BootMark(current_boot_id(), FileState.DAMAGED)
    assert sum("is damaged" in text for text in warnings_in(caplog)) == 1
    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        assert oldest_first(store) == []
        store.put_many([blob_of(1)])
        store.check()


def test_a_boot_mark_that_cannot_be_read_is_an_error_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> str:
        raise OSError(errno.EIO, "Input/output error", str(path))

    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        store.put_many([blob_of(1)])
    with monkeypatch.context() as broken:
        broken.setattr(Path, "read_text", fail)

        with pytest.raises(OSError, match="Input/output error") as error:
            LmdbStore(tmp_path, CAPACITY_BYTES)

    assert "\n" not in str(error.value)
    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        assert oldest_first(store) == [key_of(1)]


def test_what_was_evicted_by_a_call_that_failed_is_told_by_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[int] = []
    write = Slabs.write

    def fail_the_second(slabs: Slabs, slots: list[Slot], values: list[memoryview]) -> None:
        writes.append(len(slots))
        if len(writes) == 2:
            raise OSError(errno.EIO, "Input/output error")
        write(slabs, slots, values)

    with LmdbStore(tmp_path, 4 << 20) as store:
        first = [blob_of(n, 500_000) for n in range(8)]
        store.put_many(first)
        monkeypatch.setattr(Slabs, "write", fail_the_second)

        with pytest.raises(StoreFull, match="Input/output error") as raised:
            store.put_many([blob_of(n, 500_000) for n in range(10, 14)])  # two parts or more
        gone = {blob.key for blob in first} - set(store.keys())
        assert gone

        assert set(raised.value.evicted) == gone
        assert raised.value.errno == errno.EIO
        assert gone.isdisjoint(store.put_many([blob_of(20)]))


@pytest.mark.parametrize("durability", list(Durability))
def test_an_index_that_lmdb_gave_up_is_opened_again_and_nothing_is_lost(
    tmp_path: Path, durability: Durability, panicking: PanickingLmdb
) -> None:
    with LmdbStore(tmp_path, CAPACITY_BYTES, durability=durability) as store:
        store.put_many([blob_of(1)])
        store.sync()
        for act in (
            lambda: oldest_first(store),
            store.statistics,
            lambda: store.put_many([blob_of(2)]),
            store.sync,
            lambda: list(store.verify()),
        ):
            num_opened = len(panicking.opened)
            panicking.give_up()
            with pytest.raises(OSError, match="MDB_PANIC"):
                store.contains(key_of(1))

            act()

            assert len(panicking.opened) == num_opened + 1
        assert store.read_many([key_of(1)], [memoryview(bytearray(20_000))]) == [blob_of(1).digest]
        store.sync()
        store.check()

    with LmdbStore(tmp_path, CAPACITY_BYTES, durability=durability) as store:
        assert oldest_first(store) == [key_of(1), key_of(2)]


def test_an_index_that_cannot_be_opened_again_yet_is_an_error_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, panicking: PanickingLmdb
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        store.put_many([blob_of(1)])
        with monkeypatch.context() as broken:
            broken.setattr(data_file, "reopen", fail)
            panicking.give_up()
            for _ in range(2):
                assert store.read_many([key_of(1)], [memoryview(bytearray(20_000))]) == [Fault.IO_ERROR]
                for act in (store.keys, store.statistics, store.check, lambda: store.delete([key_of(1)])):
                    with pytest.raises(OSError, match="Input/output error"):
                        act()

        assert store.read_many([key_of(1)], [memoryview(bytearray(20_000))]) == [blob_of(1).digest]
        store.check()


def test_reads_beside_an_index_that_is_opened_again_and_again_wait_for_nobody_forever(
    tmp_path: Path, panicking: PanickingLmdb
) -> None:
    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        store.put_many([blob_of(n) for n in range(8)])
        stop = threading.Event()
        problems: list[object] = []

        def read() -> None:
            while not stop.is_set():
                (result,) = store.read_many([key_of(3)], [memoryview(bytearray(20_000))])
                if result not in (blob_of(3).digest, Fault.IO_ERROR):
                    problems.append(result)
                with suppress(OSError):
                    if len(list(store.verify())) < 8:
                        problems.append("a walk that ended too soon")

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for number in range(50):
            panicking.give_up()
            with suppress(OSError):  # unless a reader has met it before
                store.statistics()
            store.put_many([blob_of(10 + number)])
        stop.set()
        join(*readers)

        assert problems == []
        assert len(panicking.opened) > 50
        store.check()


@pytest.fixture
def panicking(monkeypatch: pytest.MonkeyPatch) -> PanickingLmdb:
    """LMDB as this process opens it."""
    panicking = PanickingLmdb()
    monkeypatch.setattr(lmdb, "open", panicking.open)
    return panicking


@pytest.mark.long
@pytest.mark.parametrize("durability", list(Durability))
def test_all_that_is_there_can_be_deleted_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability
) -> None:
    def refuse(file: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with LmdbStore(tmp_path, 64 << 20, durability=durability, interval_s=3600.0) as store:
        for first in range(0, 6000, 100):
            store.put_many([blob_of(n, 1000) for n in range(first, first + 100)])
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        file = store.files.tables.file
        file.reserved_bytes = file.used_bytes() + (2 << 20)  # no more ahead than at worst

        keys = list(store.keys())
        random.Random(1).shuffle(keys)
        assert store.delete(keys) == len(keys) == 6000

        assert file.used_bytes() <= file.reserved_bytes
        assert oldest_first(store) == []
        store.check()


def test_what_was_written_lately_fades_while_the_store_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LmdbStore(tmp_path, 10 << 20) as store:
        store.put_many([blob_of(1)])
        assert store.statistics().recent_written_bytes == 20_000
    later = time.time() + 30 * 86_400

    with LmdbStore(tmp_path) as store:
        monkeypatch.setattr(lmdb_store.time, "time", lambda: later)
        assert store.statistics().recent_written_bytes == 0


def is_held(lock: Any) -> bool:
    """Whether another thread has the *lock*."""
    if lock.acquire(blocking=False):
        lock.release()
        return False
    return True


def test_closing_beside_a_large_read_of_bad_records_ends_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LmdbStore(tmp_path, 64 << 20)
    keys = [key_of(n) for n in range(16)]
    store.put_many([blob_of(n, 1 << 20) for n in range(16)])
    for key in keys:
        path, offset, _ = store.place(key) or (tmp_path, 0, 0)
        with path.open("r+b") as slab:
            slab.seek(offset)
            slab.write(b"damage")
    reading_on, go_on = threading.Event(), threading.Event()

    def read_later(*arguments: Any) -> bytes | None:
        reading_on.set()
        go_on.wait(DEADLINE_S)
        return plain_digest(*arguments)

    monkeypatch.setattr(lmdb_reader, "plain_digest", read_later)
    outcomes: list[object] = []

    def read_all() -> None:
        try:
            outcomes.append(store.read_many(keys, [memoryview(bytearray(1 << 20)) for _ in keys]))
        except ValueError as error:
            outcomes.append(error)

    reading = threading.Thread(target=read_all, daemon=True)
    reading.start()
    assert reading_on.wait(DEADLINE_S)
    closing = threading.Thread(target=store.close, daemon=True)
    closing.start()
    wait_for(lambda: is_in(closing.ident or 0, LmdbFiles.close) and is_held(store.files.writer))
    go_on.set()
    join(closing, reading)

    assert isinstance(outcomes[0], ValueError)


class NoProcessor:
    """A pool of threads that never begin."""

    def __init__(self, *arguments: object) -> None:
        pass

    def submit(self, work: object) -> "Future[None]":
        return Future()

    def shutdown(self) -> None:
        pass


def large_store(folder: Path) -> tuple[LmdbStore, list[Blob], list[memoryview]]:
    """A store with blocks whose read several threads share, the blocks, and memory to read them into."""
    store, blobs = LmdbStore(folder, 64 << 20), [blob_of(number, 1 << 20) for number in range(24)]
    store.put_many(blobs)
    return store, blobs, [memoryview(bytearray(1 << 20)) for _ in blobs]


def test_a_large_read_does_not_wait_for_threads_that_get_no_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdb_reader, "ThreadPoolExecutor", NoProcessor)
    store, blobs, outs = large_store(tmp_path)
    results: list[bytes | Fault] = []

    reading = threading.Thread(
        target=lambda: results.extend(store.read_many([blob.key for blob in blobs], outs)), daemon=True
    )
    reading.start()
    join(reading)

    assert results == [blob.digest for blob in blobs]
    assert outs == [blob.raw for blob in blobs]
    store.close()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="one thread reads everything")
def test_a_large_read_that_fails_returns_when_no_thread_writes_to_its_memory_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, blobs, outs = large_store(tmp_path)
    read_slots = Slabs.read
    helping, go_on = threading.Event(), threading.Event()
    ended: list[str] = []

    def read_later_or_fail(slabs: Slabs, slots: Sequence[Slot], outs: Sequence[memoryview]) -> None:
        if threading.current_thread() is reading:
            helping.wait(DEADLINE_S)
            raise ValueError("broken")
        helping.set()
        go_on.wait(DEADLINE_S)
        ended.append("helper")
        read_slots(slabs, slots, outs)

    def read() -> None:
        with suppress(ValueError):
            store.read_many([blob.key for blob in blobs], outs)
        ended.append("read")

    monkeypatch.setattr(Slabs, "read", read_later_or_fail)
    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    wait_for(lambda: not reading.is_alive() or is_in(reading.ident or 0, futures.wait))
    go_on.set()
    join(reading)

    assert ended[-1] == "read"
    assert ended[0] == "helper"
    store.close()
