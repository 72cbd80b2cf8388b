"""A store seen from outside: what is in it, how it was left, and that its owner does not notice."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import store_cases
from store_cases import blob_of, key_of, kv_bytes

from kvtier.store.blob_store import Blob
from kvtier.store.codec.seal import charged_bytes
from kvtier.store.durability import Durability
from kvtier.store.lmdb import files as lmdb_files
from kvtier.store.lmdb import inspection
from kvtier.store.lmdb.boot_mark import BootMark, FileState, current_boot_id
from kvtier.store.lmdb.inspection import Condition, NamespaceUse, NextStart, StoreLost, inspect
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.record import digest

CAPACITY_BYTES = 10 << 20
A, B, C = b"namespace number", b"namespace-number", b"namespace_number"  # in the order of their bytes

# Keeps the store open and changes it: a block for every line it gets.
OWNER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from store_cases import blob_of
from kvtier.store.durability import Durability
from kvtier.store.lmdb.lmdb_store import LmdbStore

with LmdbStore(Path(sys.argv[1]), 10 << 20, durability=Durability(sys.argv[2])) as store:
    print("open", flush=True)
    for number, _ in enumerate(sys.stdin):
        store.put_many([blob_of(number)])
        print(number, flush=True)
"""

# Inspects the store, and says when it comes to the named function, where it waits for a line.
INSPECTOR = """
import sys
from pathlib import Path
from kvtier.store.lmdb import inspection

def wait(*arguments):
    print("waiting", flush=True)
    sys.stdin.readline()
    setattr(where, name, act)
    return act(*arguments)

where = {"RecordRow": inspection.RecordRow, "inspection": inspection}[sys.argv[2]]
name = sys.argv[3]
act = getattr(where, name)
setattr(where, name, wait)
print(inspection.inspect(Path(sys.argv[1])).content.num_records, flush=True)
"""


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def start_owner(folder: Path, durability: Durability) -> subprocess.Popen[str]:
    return start(OWNER, folder, durability, Path(store_cases.__file__).parent)


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def say(process: subprocess.Popen[str], line: str = "") -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def readers_of(store: LmdbStore, pid: int) -> list[str]:
    """The transactions that *pid* has a slot for; "-" for one that is not under way."""
    lines = [line.split() for line in store.files.tables.env.readers().splitlines()[1:]]
    return [txn for reader, _, txn in lines if int(reader) == pid]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LmdbStore]:
    with LmdbStore(tmp_path, CAPACITY_BYTES) as opened:
        yield opened


@pytest.mark.parametrize("rows_per_look", [1, 2, 3, 4096])
def test_it_counts_records_and_bytes_by_namespace_however_many_it_looks_at_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_per_look: int
) -> None:
    monkeypatch.setattr(inspection, "_ROWS_PER_LOOK", rows_per_look)
    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        store.put_many([blob_of(n, 5000, C) for n in range(4)])
        store.put_many([blob_of(n, 9000, A) for n in range(3)])
        store.put_many([blob_of(7, 100, B)])

    content = inspect(tmp_path).content

    assert content is not None
    assert content.namespaces == (
        NamespaceUse(A, 3, 3 * charged_bytes(9000)),
        NamespaceUse(B, 1, charged_bytes(100)),
        NamespaceUse(C, 4, 4 * charged_bytes(5000)),
    )
    assert content.num_records == 8
    assert content.stored_bytes == sum(use.stored_bytes for use in content.namespaces)


def test_the_longest_keys_are_counted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "_ROWS_PER_LOOK", 1)
    raw = kv_bytes(1, 1000)
    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        store.put_many([Blob(A + bytes([n]) * 495, digest(raw), memoryview(raw)) for n in (1, 255)])

    content = inspect(tmp_path).content

    assert content is not None
    assert [use.num_records for use in content.namespaces] == [2]


def test_totals_are_those_of_the_stores_own_statistics(tmp_path: Path) -> None:
    with LmdbStore(tmp_path, 4 * charged_bytes(20_000)) as store:
        store.put_many([blob_of(n) for n in range(6)])
        known = store.statistics()

    seen = inspect(tmp_path)

    assert seen.content is not None
    assert (seen.content.num_records, seen.content.stored_bytes) == (known.num_records, known.stored_bytes)
    assert seen.content.capacity_bytes == known.capacity_bytes
    assert (seen.content.written_bytes_total, seen.content.evicted_total) == (120_000, 2)
    assert 0 <= seen.file_bytes - known.file_bytes < 100_000  # marks and locks


def test_an_empty_store_has_no_namespaces(tmp_path: Path) -> None:
    LmdbStore(tmp_path, CAPACITY_BYTES).close()

    content = inspect(tmp_path).content

    assert content is not None
    assert (content.num_records, content.namespaces) == (0, ())


def test_a_folder_without_a_store_is_an_error_and_stays_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no store in"):
        inspect(tmp_path)
    with pytest.raises(FileNotFoundError, match="no store in"):
        inspect(tmp_path / "missing")

    assert list(tmp_path.iterdir()) == []


def test_a_closed_store_is_clean_and_nobodys(tmp_path: Path) -> None:
    LmdbStore(tmp_path, CAPACITY_BYTES).close()

    seen = inspect(tmp_path)

    assert (seen.state, seen.next_start) == (Condition.CLEAN, NextStart.WARM)
    assert (seen.owner, seen.durability) == (None, None)


@pytest.mark.parametrize("durability", list(Durability))
def test_a_store_that_is_in_use_is_seen_with_its_owner_as_it_changes(tmp_path: Path, durability: Durability) -> None:
    with start_owner(tmp_path, durability) as owner:
        assert read_line(owner) == "open"
        for number in range(3):
            say(owner)
            assert read_line(owner) == str(number)

            seen = inspect(tmp_path)

            assert (seen.state, seen.next_start) == (Condition.OPEN, NextStart.WARM)
            assert (seen.owner, seen.durability) == (owner.pid, durability)
            assert seen.content is not None
            assert seen.content.num_records == number + 1
            assert sum(use.num_records for use in seen.content.namespaces) == number + 1
        owner.communicate()
        assert owner.returncode == 0


def test_a_killed_owner_leaves_its_store_open_and_whole(tmp_path: Path) -> None:
    with start_owner(tmp_path, Durability.PROCESS) as owner:
        assert read_line(owner) == "open"
        say(owner)
        assert read_line(owner) == "0"
        owner.kill()

    seen = inspect(tmp_path)

    assert (seen.state, seen.next_start) == (Condition.LEFT_OPEN, NextStart.WARM)
    assert (seen.owner, seen.durability) == (None, Durability.PROCESS)
    assert seen.content is not None
    assert seen.content.num_records == 1


def test_a_process_that_is_gone_is_no_owner_whatever_else_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_owner(tmp_path, Durability.PROCESS) as owner:
        assert read_line(owner) == "open"
        lock = (tmp_path / "owner.lock").stat()
        major, minor = os.major(lock.st_dev), os.minor(lock.st_dev)
        owner.kill()
    here = f"{major:02x}:{minor:02x}:{lock.st_ino}"
    elsewhere = f"{major:02x}:{minor + 1:02x}:{lock.st_ino}"
    read_text = Path.read_text
    listed = ""
    monkeypatch.setattr(Path, "read_text", lambda path: listed if path == Path("/proc/locks") else read_text(path))

    for pid, place, expected in ((owner.pid, here, None), (os.getpid(), elsewhere, None), (os.getpid(), here, 1)):
        (tmp_path / "owner.lock").write_text(f"{pid}\n")
        listed = f"1: FLOCK  ADVISORY  WRITE {pid} {place} 0 EOF\n"
        assert inspect(tmp_path).owner == (expected and pid)


@pytest.mark.parametrize(
    ("left", "next_start"),
    [
        (FileState.PROCESS, NextStart.EMPTY),
        (FileState.INTERVAL, NextStart.CHECKPOINT),
        (FileState.COMMIT, NextStart.WARM),
        (FileState.CLEAN, NextStart.WARM),
    ],
)
def test_after_a_crash_of_the_machine_it_says_what_the_next_start_will_find(
    tmp_path: Path, left: FileState, next_start: NextStart
) -> None:
    with LmdbStore(tmp_path, CAPACITY_BYTES, durability=Durability.INTERVAL) as store:
        store.put_many([blob_of(1)])
    BootMark("earlier-boot", left).write(tmp_path)

    seen = inspect(tmp_path)

    assert seen.state is (Condition.CLEAN if left is FileState.CLEAN else Condition.MACHINE_DOWN)
    assert seen.next_start is next_start
    assert (seen.content is None) == (next_start is not NextStart.WARM)
    assert BootMark.read(tmp_path) == BootMark("earlier-boot", left)


def test_files_that_nobody_can_vouch_for_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"no LMDB file")

    states = [inspect(tmp_path).state]
    BootMark(current_boot_id(), FileState.CLEAN, layout="kvtier-store-0").write(tmp_path)
    states.append(inspect(tmp_path).state)
    BootMark(current_boot_id(), FileState.DAMAGED).write(tmp_path)
    states.append(inspect(tmp_path).state)

    assert states == [Condition.UNKNOWN, Condition.OTHER_LAYOUT, Condition.DAMAGED]
    assert inspect(tmp_path).content is None
    assert inspect(tmp_path).next_start is NextStart.EMPTY


def test_a_broken_tree_is_a_store_that_is_lost(tmp_path: Path) -> None:
    LmdbStore(tmp_path, CAPACITY_BYTES).close()
    (tmp_path / "data.mdb").write_bytes(b"no LMDB file " * 1000)

    with pytest.raises(StoreLost, match="is damaged"):
        inspect(tmp_path)


def test_it_holds_no_transaction_while_it_counts(store: LmdbStore, tmp_path: Path) -> None:
    store.put_many([blob_of(n, 1000) for n in range(20)])
    with start(INSPECTOR, tmp_path, "RecordRow", "unpack") as inspector:
        assert read_line(inspector) == "waiting"

        assert set(readers_of(store, inspector.pid)) == {"-"}

        say(inspector)
        assert read_line(inspector) == "20"


def test_one_killed_in_a_transaction_holds_nothing_back_for_long(
    store: LmdbStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdb_files, "CHECK_READERS_S", 0.0)
    store.put_many([blob_of(n, 1000) for n in range(20)])
    with start(INSPECTOR, tmp_path, "inspection", "islice") as inspector:
        assert read_line(inspector) == "waiting"
        (txn,) = readers_of(store, inspector.pid)
        assert txn != "-"
        inspector.kill()

    store.put_many([blob_of(100)])

    assert readers_of(store, inspector.pid) == []


def test_the_owner_may_close_and_another_open_while_one_inspects(tmp_path: Path) -> None:
    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        store.put_many([blob_of(n, 1000) for n in range(20)])
    with start(INSPECTOR, tmp_path, "RecordRow", "unpack") as inspector:
        assert read_line(inspector) == "waiting"

        with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
            assert store.delete([key_of(n) for n in range(20)]) == 20

        say(inspector)
        assert read_line(inspector) == "20"
    assert inspect(tmp_path).owner is None
    assert os.getpid() == int((tmp_path / "owner.lock").read_text())
