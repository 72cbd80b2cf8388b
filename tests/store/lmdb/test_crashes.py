"""An index that ends its process, or of which the process says that it is damaged, does not do so for ever."""

import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest
from lmdb_pages import PAGE_BYTES
from store_cases import blob_of, key_of, kv_bytes, oldest_first
from waiting import has_ended, wait_for

from kvtier.store.lmdb import crashes
from kvtier.store.lmdb.boot_mark import BootMark, FileState, current_boot_id
from kvtier.store.lmdb.files import OpenFolder
from kvtier.store.lmdb.inspection import NextStart, standing
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.lmdb.tables import ascending
from kvtier.store.owner_lock import FolderInUse
from kvtier.store.process.channel import Mappings, receive, send
from kvtier.store.process.store_process import StoreProcess
from kvtier.store.process.store_server import StoreServer, Walks
from kvtier.store.record import Fault, digest
from kvtier.store.store_settings import StoreSettings

CAPACITY_BYTES = 4 << 20
BLOCK_BYTES = 8192


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with LmdbStore(tmp_path / "store", CAPACITY_BYTES) as store:
        for number in range(20):
            store.put_many([blob_of(number, BLOCK_BYTES)])
    return tmp_path / "store"


def opened(folder: Path) -> StoreProcess:
    return StoreProcess(StoreSettings(folder, CAPACITY_BYTES), timeout_s=60)


def put(store: StoreProcess, number: int) -> str:
    try:
        store.put_many([blob_of(number, BLOCK_BYTES)])
    except OSError as error:  # a put that waited while damage was found says that the index is damaged
        return type(error).__name__
    return "done"


def damage(folder: Path, key: bytes) -> None:
    """Have a row of the index that makes no sense."""
    with LmdbStore(folder, CAPACITY_BYTES) as store, store.files.tables.env.begin(write=True) as txn:
        txn.put(key, b"short", db=store.files.tables.records)


def num_crashes(folder: Path) -> int:
    mark = BootMark.read(folder)
    assert mark is not None
    return mark.num_crashes


def crash(store: StoreProcess, how: signal.Signals = signal.SIGSEGV) -> None:
    """Have the store's process end as a page that makes no sense would have it end."""
    assert store.pid is not None
    os.kill(store.pid, how)
    wait_for(lambda pid=store.pid: has_ended(pid))  # type: ignore[misc]


@pytest.mark.parametrize("how", [signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT])
def test_an_index_on_which_two_processes_in_a_row_crash_is_left(
    folder: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], how: signal.Signals
) -> None:
    caplog.set_level(logging.INFO)
    with opened(folder) as store:
        crash(store, how)
        assert len(oldest_first(store)) == 20

        crash(store, how)
        assert oldest_first(store) == []

        assert put(store, 100) == "done"
        assert oldest_first(store) == [key_of(100)]
        assert store.num_starts == 3
    said = [entry.getMessage() for entry in caplog.records if "in a row" in entry.getMessage()]
    assert len(said) == 2
    assert f"its process ended with {how.name}, 2 crashes in a row; after 2 the store starts empty" in said[1]
    assert capfd.readouterr().err.count("starts empty: 2 processes in a row crashed on it") == 1
    assert num_crashes(folder) == 0


def test_crashes_count_over_engines_that_live_for_one_write(folder: Path) -> None:
    found, next_starts = [], []
    for life in range(4):
        with opened(folder) as store:
            found.append(len(oldest_first(store)))
            assert put(store, 100 + life) == "done"
            if life < 2:
                crash(store)
        next_starts.append(standing(folder)[1])

    assert found == [20, 21, 0, 1]
    assert next_starts == [NextStart.WARM, NextStart.EMPTY, NextStart.WARM, NextStart.WARM]


def test_a_clean_end_forgets_a_crash(folder: Path) -> None:
    BootMark(current_boot_id(), FileState.PROCESS, num_crashes=1).write(folder)

    with opened(folder) as store:
        assert num_crashes(folder) == 1
        assert len(oldest_first(store)) == 20

    assert num_crashes(folder) == 0


def test_a_process_that_is_killed_from_outside_is_no_crash(folder: Path) -> None:
    with opened(folder) as store:
        for _ in range(4):
            crash(store, signal.SIGKILL)
            assert len(oldest_first(store)) == 20

        assert num_crashes(folder) == 0


def test_a_store_that_another_process_has_opened_since_is_not_marked(folder: Path) -> None:
    with LmdbStore(folder, CAPACITY_BYTES):
        before = BootMark.read(folder)

        with pytest.raises(FolderInUse):
            crashes.note(folder, os.getpid())

        assert BootMark.read(folder) == before


@pytest.fixture
def spinning() -> Iterator["subprocess.Popen[bytes]"]:
    child = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    yield child
    child.kill()
    child.wait()
    child.stdout.close()


def test_who_goes_round_in_a_circle_computes_and_who_was_stopped_does_not(
    spinning: "subprocess.Popen[bytes]",
) -> None:
    while_running = crashes.is_computing(spinning.pid)
    os.kill(spinning.pid, signal.SIGSTOP)
    os.waitpid(spinning.pid, os.WUNTRACED)

    assert (while_running, crashes.is_computing(spinning.pid)) == (True, False)


def test_a_process_that_finds_its_index_damaged_is_started_again_without_it(folder: Path) -> None:
    damage(folder, key_of(5))
    out = bytearray(BLOCK_BYTES)

    with opened(folder) as store:
        (first,) = store.read_many([key_of(5)], [memoryview(out)])
        wait_for(lambda: put(store, 100) == "done")  # a call under way ends with the process
        (second,) = store.read_many([key_of(100)], [memoryview(out)])

        assert first is Fault.IO_ERROR
        assert second == digest(kv_bytes(100, BLOCK_BYTES))
        assert oldest_first(store) == [key_of(100)]


def test_a_question_that_comes_after_damage_was_found_gets_no_answer(folder: Path) -> None:
    damage(folder, key_of(5))
    ours, theirs = socket.socketpair()
    with LmdbStore(folder, CAPACITY_BYTES) as store, ours:
        assert store.read_many([key_of(5)], [memoryview(bytearray(BLOCK_BYTES))]) == [Fault.IO_ERROR]
        send(ours, 1, pickle.dumps(("contains", (key_of(4),))))
        with theirs:
            StoreServer(store, Mappings([]), Walks(store), theirs).serve()

        with pytest.raises((EOFError, ConnectionResetError)):
            receive(ours)


def test_a_store_is_lost_only_once_its_next_start_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(folder, key_of(5))
    with LmdbStore(folder, CAPACITY_BYTES) as store:
        marked: list[tuple[FileState, bool]] = []
        mark = OpenFolder.mark

        def mark_and_note(opened: OpenFolder, state: FileState, num_crashes: int = 0) -> None:
            marked.append((state, store.is_lost))  # a thread that is told it is lost ends the process here
            mark(opened, state, num_crashes)

        monkeypatch.setattr(OpenFolder, "mark", mark_and_note)
        assert store.read_many([key_of(5)], [memoryview(bytearray(BLOCK_BYTES))]) == [Fault.IO_ERROR]

        assert marked == [(FileState.DAMAGED, False)]
        assert store.is_lost


def test_a_root_that_points_beyond_the_file_makes_no_larger_file(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = (folder / "data.mdb").stat().st_size
    with (folder / "data.mdb").open("r+b") as file:
        for root in (0, PAGE_BYTES):
            file.seek(root + 16 + 24 + 2 * 48)
            file.write(struct.pack("<Q", 1 << 28))  # the last page: a terabyte

    with LmdbStore(folder, CAPACITY_BYTES) as store:
        store.put_many([blob_of(1)])
        assert (folder / "data.mdb").stat().st_size <= before
    assert "starts empty: a root of its index makes no sense" in caplog.text


def test_the_trees_of_a_transaction_that_never_was_cost_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What LMDB leaves where the write of a root has failed: the older root with its own number and last page."""
    last_page = struct.Struct("<QQ")
    with (folder / "data.mdb").open("r+b") as file:
        head = file.read(2 * PAGE_BYTES)
        older = min((0, PAGE_BYTES), key=lambda root: last_page.unpack_from(head, root + 16 + 24 + 2 * 48)[1])
        file.seek(older + 16 + 24 + 40)  # of the list of free pages
        file.write(struct.pack("<Q", last_page.unpack_from(head, older + 16 + 24 + 2 * 48)[0] + 4))

    with LmdbStore(folder, CAPACITY_BYTES) as store:
        store.put_many([blob_of(20)])
        store.put_many([blob_of(21)])
        assert len(list(store.keys())) == 22
    assert "starts empty" not in caplog.text


@pytest.mark.parametrize("keys", [[b"a", b"a"], [b"b", b"a"], [b"a", b"b", b"a", b"b"]])
def test_rows_that_come_again_end_with_an_error(keys: list[bytes]) -> None:
    with pytest.raises(lmdb.CorruptedError, match="out of order"):
        list(ascending((key, b"") for key in keys))


def test_a_list_of_keys_with_another_key_in_it_ends_with_an_error(folder: Path) -> None:
    with LmdbStore(folder, CAPACITY_BYTES) as store:
        tables = store.files.tables
        with tables.env.begin(write=True) as txn, txn.cursor(db=tables.order) as cursor:
            assert cursor.first()
            owned = bytearray(cursor.value())
            owned[20] ^= 1
            txn.put(cursor.key(), bytes(owned), db=tables.order)

        with pytest.raises(OSError, match="its checksum is wrong"):
            list(store.keys())
