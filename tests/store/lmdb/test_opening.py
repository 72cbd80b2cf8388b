"""Opening a store, and what the process or machine that had it before may have left: marks, room, broken files."""

import errno
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import lmdb
import pytest
from panicking_lmdb import PanickingLmdb
from store_cases import blob_of, key_of, oldest_first

from kvtier.store import slab
from kvtier.store.durability import Durability
from kvtier.store.lmdb import data_file
from kvtier.store.lmdb.boot_mark import BootMark, FileState
from kvtier.store.lmdb.change import Change
from kvtier.store.lmdb.data_file import max_bytes
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.record import Fault
from kvtier.store.slab import Slabs, Slot

CAPACITY_BYTES = 10 << 20
BLOCK_BYTES = 20_000
NEVER_S = 3600.0


def run_and_kill(act: Callable[[], object]) -> None:
    """Have another process do it, which is killed at its end if not before."""
    child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(9)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 9


def die_instead_of(monkeypatch: pytest.MonkeyPatch, where: object, name: str) -> None:
    monkeypatch.setattr(where, name, lambda *_: os._exit(9))


def crash(folder: Path) -> None:
    """The machine goes down. Of the files everything is there: it is the mark that must not promise too much."""
    mark = BootMark.read(folder)
    assert mark is not None
    BootMark("earlier-boot", mark.state).write(folder)


def excess_bytes(store: LmdbStore) -> int:
    """Bytes of the slabs that belong to no slot, without a block per file where ext4 lists the pieces of the file.

    It does so if they are more than four, which depends on the free space of the disk.
    """
    num_files = len(list(store.files.here.glob("slab-*")))
    with store.files.reading() as txn:
        return store.files.slabs.file_bytes() - store.files.tables.counters(txn).slab_bytes - 4096 * num_files


def state_in(folder: Path) -> FileState | None:
    mark = BootMark.read(folder)
    return None if mark is None else mark.state


def break_a_row(folder: Path, key: bytes) -> None:
    with LmdbStore(folder) as store, store.files.tables.env.begin(write=True) as txn:
        txn.put(key, b"short", db=store.files.tables.records)


def break_the_index(folder: Path) -> None:
    """One bit that says that there is a sub-database."""
    data = bytearray((folder / "data.mdb").read_bytes())
    place, num_broken = 0, 0
    while (place := data.find(b"\x02\0\x05\0order", place)) >= 0:
        data[place] = 0
        place, num_broken = place + 1, num_broken + 1
    assert num_broken
    (folder / "data.mdb").write_bytes(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a closed store with ten blocks."""
    with LmdbStore(tmp_path / "store", CAPACITY_BYTES) as store:
        store.put_many([blob_of(n) for n in range(10)])
    return tmp_path / "store"


# broken files


def test_without_a_capacity_a_broken_index_is_an_error_and_stays_as_it_is(folder: Path) -> None:
    break_the_index(folder)
    files = [folder / name for name in ("data.mdb", "slab-20480", "boot_mark")]
    before = [path.read_bytes() for path in files]

    with pytest.raises(OSError, match="INCOMPATIBLE"):
        LmdbStore(folder)

    assert [path.read_bytes() for path in files] == before
    with LmdbStore(folder, CAPACITY_BYTES) as store:  # as an engine does
        assert oldest_first(store) == []


def test_a_damaged_store_refuses_changes_and_what_can_be_read_is(folder: Path) -> None:
    break_a_row(folder, key_of(5))
    out = memoryview(bytearray(BLOCK_BYTES))
    with LmdbStore(folder, CAPACITY_BYTES) as store:
        assert store.read_many([key_of(5)], [out]) == [Fault.IO_ERROR]

        for change in (
            lambda: store.put_many([blob_of(100)]),
            lambda: store.delete([key_of(1)]),
            lambda: store.touch([key_of(1)]),
        ):
            with pytest.raises(OSError, match="is damaged: a row makes no sense") as error:
                change()
            assert error.value.errno == errno.EIO
        assert store.read_many([key_of(4)], [out]) == [blob_of(4).digest]

    assert state_in(folder) is FileState.DAMAGED
    with LmdbStore(folder, CAPACITY_BYTES) as store:
        assert oldest_first(store) == []


@pytest.mark.parametrize("error", [struct.error("no"), IndexError("no"), OverflowError("no")])
def test_an_error_that_is_not_the_indexs_is_no_damage(folder: Path, error: Exception) -> None:
    with LmdbStore(folder, CAPACITY_BYTES) as store:
        with pytest.raises(type(error), match="no"), store.files.changing():
            raise error

        store.put_many([blob_of(100)])
    assert state_in(folder) is FileState.CLEAN


def test_an_index_that_could_not_be_synced_is_not_clean(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    panicking = PanickingLmdb()
    monkeypatch.setattr(lmdb, "open", panicking.open)

    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    store = LmdbStore(folder, CAPACITY_BYTES)
    store.put_many([blob_of(100)])
    with monkeypatch.context() as broken:
        broken.setattr(data_file, "reopen", fail)
        panicking.give_up()
        for reason in ("MDB_PANIC", "Too many open files"):
            with pytest.raises(OSError, match=reason):
                store.contains(key_of(1))
        store.close()

    assert state_in(folder) is FileState.PROCESS


# what a level promises while a store is opened


@pytest.mark.parametrize("after", [Durability.INTERVAL, Durability.COMMIT])
@pytest.mark.parametrize("before", [Durability.INTERVAL, Durability.COMMIT])
def test_a_machine_that_goes_down_while_a_store_is_opened_costs_no_more_than_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch, before: Durability, after: Durability
) -> None:
    run_and_kill(lambda: LmdbStore(folder, CAPACITY_BYTES, durability=before, interval_s=NEVER_S).sync())
    with monkeypatch.context() as killed:
        die_instead_of(killed, Slabs, "sync")
        run_and_kill(lambda: LmdbStore(folder, CAPACITY_BYTES, durability=after, interval_s=NEVER_S))

    assert state_in(folder) is FileState(before.value)
    crash(folder)
    with LmdbStore(folder, CAPACITY_BYTES, durability=after) as store:
        assert len(oldest_first(store)) == 10


@pytest.mark.parametrize("level", list(Durability))
@pytest.mark.parametrize("capacity_bytes", [CAPACITY_BYTES, 5 * BLOCK_BYTES])
def test_nothing_is_written_before_the_mark_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, level: Durability, capacity_bytes: int
) -> None:
    before = (folder / "data.mdb").read_bytes()
    seen: list[bool] = []
    write = BootMark.write

    def compare(mark: BootMark, folder: Path) -> None:
        seen.append((folder / "data.mdb").read_bytes() == before)
        write(mark, folder)

    monkeypatch.setattr(BootMark, "write", compare)
    with LmdbStore(folder, capacity_bytes, durability=level):
        assert seen[0]


@pytest.mark.long
@pytest.mark.parametrize("level", [Durability.INTERVAL, Durability.COMMIT])
@pytest.mark.parametrize("step", ["copy", "replace", "reopen"])
def test_a_machine_that_goes_down_while_an_index_is_compacted_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: Durability, step: str
) -> None:
    with LmdbStore(tmp_path, 400 << 20, durability=level) as store:
        store.put_many([blob_of(n, 2 << 20) for n in range(20)])
        store.files.tables.file.reserve(32 << 20)
    replace = Path.replace

    def replace_and_die(path: Path, target: Path) -> Path:
        if path.parent.name != "compact":
            return replace(path, target)
        if step == "reopen":
            replace(path, target)
        os._exit(9)

    with monkeypatch.context() as killed:
        if step == "copy":
            die_instead_of(killed, os, "fchmod")
        killed.setattr(Path, "replace", replace_and_die)
        run_and_kill(lambda: LmdbStore(tmp_path, 50 << 20, durability=level, interval_s=NEVER_S))
    crash(tmp_path)

    with LmdbStore(tmp_path, 50 << 20, durability=level, interval_s=NEVER_S) as store:
        assert len(oldest_first(store)) == 20
        store.check()
        assert not (tmp_path / "compact").exists()
        assert state_in(tmp_path) is FileState(level.value)


def test_an_index_that_cannot_be_copied_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with LmdbStore(tmp_path, 400 << 20) as store:
        store.put_many([blob_of(n) for n in range(20)])
        store.files.tables.file.reserve(32 << 20)
    monkeypatch.setattr(os, "fchmod", fail)

    with LmdbStore(tmp_path, 50 << 20, durability=Durability.INTERVAL) as store:
        assert len(oldest_first(store)) == 20
        store.put_many([blob_of(100)])
        assert not (tmp_path / "compact").exists()


def test_a_sync_that_failed_is_followed_by_one_that_writes_every_page(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FailsOnce:
        """The environment, but for its first sync."""

        def __init__(self, env: lmdb.Environment) -> None:
            self._env = env
            self._failed = False

        def sync(self, force: bool) -> None:
            if not self._failed:
                self._failed = True
                raise lmdb.DiskError("mdb_env_sync: Input/output error")
            self._env.sync(force)

        def __getattr__(self, name: str) -> object:
            return getattr(self._env, name)

    written: list[int] = []
    pwrite = os.pwrite

    def note(file: int, data: bytes, offset: int) -> int:
        written.append(len(data))
        return pwrite(file, data, offset)

    with LmdbStore(folder, CAPACITY_BYTES, durability=Durability.INTERVAL, interval_s=NEVER_S) as store:
        tables = store.files.tables
        store.put_many([blob_of(100)])
        first = (folder / "checkpoint").read_bytes()
        monkeypatch.setattr(tables.file, "env", FailsOnce(tables.file.env))

        with pytest.raises(OSError, match="Input/output error"):
            store.sync()
        assert (folder / "checkpoint").read_bytes() == first
        monkeypatch.setattr(os, "pwrite", note)
        store.sync()

        assert sum(written) >= tables.file.used_bytes()
        assert (folder / "checkpoint").read_bytes() != first
        store.check()


@pytest.mark.parametrize("level", [Durability.INTERVAL, Durability.COMMIT])
def test_a_new_slab_is_synced_with_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch, level: Durability) -> None:
    synced: list[set[str]] = []

    def note(of: Path) -> None:
        synced.append({path.name for path in of.glob("slab-*")})

    with LmdbStore(folder, CAPACITY_BYTES, durability=level, interval_s=NEVER_S) as store:
        monkeypatch.setattr(slab, "sync_folder", note)
        store.put_many([blob_of(50), blob_of(51)])
        store.sync()
        assert synced == []

        store.put_many([blob_of(100, 4096)])
        store.sync()

    assert synced == [{"slab-4096", "slab-20480"}]


# room that nobody has


def test_what_killed_processes_wrote_to_slots_that_were_not_theirs_yet_is_given_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Slabs.write

    def write_and_die(slabs: Slabs, slots: list[Slot], values: list[memoryview]) -> None:
        write(slabs, slots, values)
        os._exit(9)

    def put(num_bytes: int) -> None:
        store = LmdbStore(folder, CAPACITY_BYTES)
        monkeypatch.setattr(Slabs, "write", write_and_die)
        store.put_many([blob_of(100 + n, num_bytes) for n in range(5)])

    for num_bytes in (4096, 20_000, 50_000, 100_000):
        run_and_kill(lambda num_bytes=num_bytes: put(num_bytes))  # type: ignore[misc]
    assert sum(path.stat().st_blocks * 512 for path in folder.glob("slab-*")) > 15 * 40_000

    with LmdbStore(folder, CAPACITY_BYTES) as store:
        assert excess_bytes(store) <= 0
        assert len(oldest_first(store)) == 10
        assert all(fault is None for _, fault in store.verify())
        store.check()


def test_what_a_killed_process_wrote_into_holes_is_given_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Slabs.write

    def write_and_die(slabs: Slabs, slots: list[Slot], values: list[memoryview]) -> None:
        write(slabs, slots, values)
        os._exit(9)

    with LmdbStore(folder, CAPACITY_BYTES) as store:
        store.delete([key_of(n) for n in range(5)])
        store.files.give_back(0)
        assert excess_bytes(store) <= 0
    store = LmdbStore(folder, CAPACITY_BYTES)
    with monkeypatch.context() as killed:
        killed.setattr(Slabs, "write", write_and_die)
        store.close()
        run_and_kill(lambda: LmdbStore(folder, CAPACITY_BYTES).put_many([blob_of(100 + n) for n in range(4)]))

    with LmdbStore(folder, CAPACITY_BYTES) as store:
        assert excess_bytes(store) <= 0
        assert oldest_first(store) == [key_of(n) for n in range(5, 10)]
        store.put_many([blob_of(100 + n) for n in range(8)])
        assert all(fault is None for _, fault in store.verify())
        store.check()


def test_what_was_put_after_the_checkpoint_takes_no_room_any_more(folder: Path) -> None:
    def put(first: int, num_bytes: int) -> None:
        store = LmdbStore(folder, CAPACITY_BYTES, durability=Durability.INTERVAL, interval_s=NEVER_S)
        for n in range(first, first + 20):
            store.put_many([blob_of(n, num_bytes)])

    for number, num_bytes in enumerate((20_000, 50_000, 100_000)):
        run_and_kill(lambda first=100 * number, size=num_bytes: put(first, size))  # type: ignore[misc]
        crash(folder)

    with LmdbStore(folder, CAPACITY_BYTES, durability=Durability.INTERVAL, interval_s=NEVER_S) as store:
        assert len(oldest_first(store)) == 10
        assert excess_bytes(store) <= 0
        store.check()


@pytest.mark.parametrize("way", ["removed", "killed while starting empty"])
def test_without_an_index_the_slabs_go_too(folder: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    (folder / "slab-notes").write_text("not ours")
    if way == "removed":
        (folder / "data.mdb").unlink()
    else:
        crash(folder)
        BootMark("earlier-boot", FileState.PROCESS).write(folder)
        with monkeypatch.context() as killed:
            die_instead_of(killed, Slabs, "remove")
            run_and_kill(lambda: LmdbStore(folder, CAPACITY_BYTES))
        assert not (folder / "data.mdb").exists()
    assert (folder / "slab-20480").exists()

    with LmdbStore(folder, CAPACITY_BYTES) as store:
        assert not (folder / "slab-20480").exists()
        assert oldest_first(store) == []
        store.check()
    assert (folder / "slab-notes").read_text() == "not ours"


@pytest.mark.parametrize("into_holes", [False, True])
@pytest.mark.parametrize("fails", ["write", "change"])
def test_what_a_change_that_failed_has_written_is_given_back_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fails: str, into_holes: bool
) -> None:
    num_left = [3]
    pwritev = os.pwritev

    def write_some(file: int, buffers: list[memoryview], offset: int) -> int:
        if not num_left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        num_left[0] -= 1
        return pwritev(file, buffers[:2], offset)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with LmdbStore(folder, CAPACITY_BYTES) as store:
        if into_holes:
            store.delete([key_of(n) for n in range(5)])
            store.files.give_back(0)
        before = excess_bytes(store)
        with monkeypatch.context() as full:
            full.setattr(*(os, "pwritev", write_some) if fails == "write" else (Change, "add", fail))

            with pytest.raises(OSError, match="No space left"):
                store.put_many([blob_of(100 + n, BLOCK_BYTES + n // 4 * 50_000) for n in range(8)])

        assert excess_bytes(store) <= before
        store.put_many([blob_of(100 + n) for n in range(8)])
        assert all(fault is None for _, fault in store.verify())
        store.check()


def test_room_that_cannot_be_given_back_is_given_back_at_the_next_opening(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with LmdbStore(folder, CAPACITY_BYTES) as store, monkeypatch.context() as broken:
        broken.setattr(Change, "add", fail)
        broken.setattr(Slabs, "punch", fail)
        broken.setattr(Slabs, "cut", fail)
        with pytest.raises(OSError, match="Input/output error"):
            store.put_many([blob_of(100 + n) for n in range(8)])
        store.close()
        assert state_in(folder) is FileState.COMMIT  # whole after a crash, but not as it should be
        LmdbStore(folder, CAPACITY_BYTES).close()
        assert "takes too much disk space" in caplog.text

    with LmdbStore(folder, CAPACITY_BYTES) as store:
        assert excess_bytes(store) <= 0


def test_a_lowered_capacity_takes_small_changes_and_few_punches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_blocks = 4000
    with LmdbStore(tmp_path, 40 << 20) as store:
        for first in range(0, num_blocks, 200):
            store.put_many([blob_of(n, 4096) for n in range(first, first + 200)])
    taken: list[int] = []
    punched: list[int] = []
    give_back, punch = Change.give_back, slab.SlabFile.punch

    def note(change: Change, limit_bytes: int, limit: int = 128) -> list[Slot]:
        slots = give_back(change, limit_bytes, limit)
        taken.append(len(slots))
        return slots

    def note_punch(of: "slab.SlabFile", first: int, num_slots: int) -> None:
        punched.append(num_slots)
        punch(of, first, num_slots)

    monkeypatch.setattr(Change, "give_back", note)
    monkeypatch.setattr(slab.SlabFile, "punch", note_punch)
    with LmdbStore(tmp_path, 1 << 20) as store:
        store.check()

    assert sum(punched) == sum(taken) > num_blocks * 3 // 4
    assert max(taken) <= 512
    assert len(punched) < num_blocks / 50


def test_a_store_of_small_blocks_takes_large_ones_and_the_other_way_round(tmp_path: Path) -> None:
    with LmdbStore(tmp_path, 6 << 20) as store:
        number = 0
        for num_bytes in (4096, 500_000, 4096, 100_000):
            for _ in range(8 << 20 >> 19):
                count = (1 << 19) // num_bytes
                store.put_many([blob_of(n, num_bytes) for n in range(number, number + count)])
                number += count
            store.check()
            assert store.contains(key_of(number - 1))
        assert store.statistics().file_bytes <= max_bytes(6 << 20)


# a process forked from one that has a store open


@pytest.mark.parametrize("level", list(Durability))
def test_a_forked_process_can_neither_use_nor_close_its_parents_store(folder: Path, level: Durability) -> None:
    with LmdbStore(folder, CAPACITY_BYTES, durability=level, interval_s=NEVER_S) as store:
        readers = store.files.tables.env.readers()
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                num_refused = 0
                for act in (
                    lambda: store.contains(key_of(1)),
                    lambda: store.put_many([blob_of(100)]),
                    lambda: store.read_many([key_of(1)], [memoryview(bytearray(BLOCK_BYTES))]),
                    store.sync,
                    store.keys,
                ):
                    try:
                        act()
                    except ValueError as error:
                        num_refused += "was forked" in str(error)
                store.close()
                os._exit(num_refused)
            os._exit(99)
        _, status = os.waitpid(child, 0)

        assert os.waitstatus_to_exitcode(status) == 5
        assert state_in(folder) is FileState(level.value)
        assert store.files.tables.env.readers() == readers
        store.put_many([blob_of(100)])
        store.check()


def test_the_end_of_a_forked_process_frees_nothing_of_its_parents(folder: Path) -> None:
    script = f"""
import os, sys
from pathlib import Path
from kvtier.store.durability import Durability
from kvtier.store.lmdb.lmdb_store import LmdbStore
with LmdbStore(Path({str(folder)!r}), {CAPACITY_BYTES}, durability=Durability.INTERVAL, interval_s=3600) as store:
    before = store.files.tables.env.readers()
    if os.fork() == 0:
        sys.exit(0)  # frees all there is
    os.wait()
    assert store.files.tables.env.readers() == before, before
    print(store.statistics().num_records)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stdout.split()) == (0, ["10"]), done.stderr


# what else may be there


def test_files_that_are_not_slabs_are_left_alone(folder: Path) -> None:
    for name in ("slab-4096~", "slab-", "slab-old"):
        (folder / name).write_text("not ours")

    with LmdbStore(folder, CAPACITY_BYTES) as store:
        assert len(oldest_first(store)) == 10
        store.check()


def test_folder_and_files_are_their_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with LmdbStore(tmp_path / "a" / "store", 400 << 20, durability=Durability.INTERVAL) as store:
            store.put_many([blob_of(1)])
            store.files.tables.file.reserve(32 << 20)
        LmdbStore(tmp_path / "a" / "store", 1 << 20).close()  # which copies the index
    finally:
        os.umask(before)

    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    assert mode(tmp_path / "a" / "store") == 0o700
    others = {path.name for path in (tmp_path / "a" / "store").iterdir() if mode(path) != 0o600}
    assert others <= {"owner.lock"}
