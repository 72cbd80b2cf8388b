"""What a crash of the machine leaves, at each level of durability. `crash` makes one from the file's pages."""

import logging
import os
import random
import shutil
from pathlib import Path

import pytest
from store_cases import blob_of, key_of, kv_bytes, oldest_first
from waiting import wait_for

from kvtier.store.durability import Durability
from kvtier.store.lmdb.boot_mark import BootMark, FileState
from kvtier.store.lmdb.checkpoint import Checkpoint
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.record import digest
from kvtier.store.slab import slot_bytes

CAPACITY_BYTES = 4 << 20
PAGE_BYTES = 4096
NUM_BYTES = 30_000
NEVER_S = 3600.0


def crash(synced: Path, now: Path, after: Path, rng: random.Random) -> None:
    """The folder *after* a crash: each page of the files is as it was synced, as it is now, or, torn, some of both."""
    after.mkdir()
    shutil.copy(now / "boot_mark", after)
    if (now / "checkpoint").exists():
        shutil.copy(now / "checkpoint", after)
    mark = BootMark.read(after)
    assert mark is not None
    BootMark("earlier-boot", mark.state).write(after)
    for file in [now / "data.mdb", *now.glob("slab-*")]:
        kept = synced / file.name
        old, new = kept.read_bytes() if kept.exists() else b"", file.read_bytes()
        old = old.ljust(len(new), b"\0")
        pages = bytearray(new)
        for start in range(0, len(new), PAGE_BYTES):
            end = min(start + PAGE_BYTES, len(new))
            if old[start:end] != new[start:end]:
                cut = rng.choice([start, end, end, rng.randrange(start, end, 512)])
                pages[cut:end] = old[cut:end]
        (after / file.name).write_bytes(pages)


def state_of(store: LmdbStore) -> list[tuple[bytes, bytes]]:
    """Keys, oldest first, with the bytes they have; all verified."""
    state = []
    for key in oldest_first(store):
        out = bytearray(NUM_BYTES)
        assert store.read_many([key], [memoryview(out)]) == [digest(out)]
        assert out == kv_bytes(int.from_bytes(key[16:], "big"), NUM_BYTES)
        state.append((key, digest(out)))
    return state


def churn(store: LmdbStore, rng: random.Random, num_calls: int) -> None:
    for _ in range(num_calls):
        store.put_many([blob_of(n, NUM_BYTES) for n in rng.sample(range(400), 6)])
        store.touch([key_of(rng.randrange(400)) for _ in range(5)])
        store.delete([key_of(rng.randrange(400))])


@pytest.mark.long
@pytest.mark.parametrize("round_", range(4))
def test_interval_goes_back_to_its_last_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, round_: int
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    folder, synced = tmp_path / "store", tmp_path / "synced"
    synced.mkdir()
    expected: list[tuple[bytes, bytes]] = []
    take = Checkpoint.take

    def take_and_note(checkpoint: Checkpoint) -> None:  # also when the map is full, which it will be
        take(checkpoint)
        for file in [folder / "data.mdb", *folder.glob("slab-*")]:
            shutil.copy(file, synced)
        expected[:] = state_of(store)

    with LmdbStore(folder, CAPACITY_BYTES, durability=Durability.INTERVAL, interval_s=NEVER_S) as store:
        monkeypatch.setattr(Checkpoint, "take", take_and_note)
        churn(store, rng, 60)  # well past the capacity
        store.sync()
        churn(store, rng, round_ * 15)
        crash(synced, folder, tmp_path / "after", rng)
        monkeypatch.undo()

    with LmdbStore(tmp_path / "after", CAPACITY_BYTES, durability=Durability.INTERVAL, interval_s=NEVER_S) as store:
        assert state_of(store) == expected
        store.check()
        churn(store, rng, 10)
        store.check()
    assert sum("is restored to its last checkpoint" in entry.getMessage() for entry in caplog.records) == 1


def test_checkpoints_are_taken_by_the_clock(tmp_path: Path) -> None:
    with LmdbStore(tmp_path, CAPACITY_BYTES, durability=Durability.INTERVAL, interval_s=0.02) as store:
        first = (tmp_path / "checkpoint").read_bytes()
        store.put_many([blob_of(1)])
        wait_for(lambda: (tmp_path / "checkpoint").read_bytes() != first)


def test_a_full_map_takes_a_checkpoint_early(tmp_path: Path) -> None:
    with LmdbStore(tmp_path, CAPACITY_BYTES, durability=Durability.INTERVAL, interval_s=NEVER_S) as store:
        first = (tmp_path / "checkpoint").read_bytes()
        for number in range(0, 2000, 8):  # 60 MB through a map of 29
            store.put_many([blob_of(n, NUM_BYTES) for n in range(number, number + 8)])
        store.check()
        assert (tmp_path / "checkpoint").read_bytes() != first
        assert store.contains(key_of(1999))


def test_slots_that_were_freed_after_the_checkpoint_keep_their_bytes(tmp_path: Path) -> None:
    folder, after = tmp_path / "store", tmp_path / "after"
    with LmdbStore(folder, CAPACITY_BYTES, durability=Durability.INTERVAL, interval_s=NEVER_S) as store:
        store.put_many([blob_of(n, NUM_BYTES) for n in range(20)])
        store.sync()
        expected = state_of(store)
        store.delete([key_of(n) for n in range(20)])

        with store.files.changing() as change:
            store.files.slabs.punch(*change.give_back(0))
        crash(folder, folder, after, random.Random(1))

    with LmdbStore(after, CAPACITY_BYTES, durability=Durability.INTERVAL, interval_s=NEVER_S) as store:
        assert state_of(store) == expected
        store.check()


def test_slots_that_were_freed_before_the_checkpoint_are_given_back(tmp_path: Path) -> None:
    with LmdbStore(tmp_path, CAPACITY_BYTES, durability=Durability.INTERVAL, interval_s=NEVER_S) as store:
        store.put_many([blob_of(n, NUM_BYTES) for n in range(20)])
        store.delete([key_of(n) for n in range(20)])
        store.sync()

        with store.files.changing() as change:
            assert len(change.give_back(0)) == 20


def evict_and_fail(store: LmdbStore, key: bytes) -> None:
    """Begin a change that forgets a record, write three payloads beside it, and fail."""
    with store.files.changing() as change:
        assert change.forget(key)
        places = store.files.reserve([slot_bytes(NUM_BYTES)] * 3, CAPACITY_BYTES)
        store.files.slabs.write([place.slot for place in places], [memoryview(bytes(NUM_BYTES))] * 3)
        store.files.release(places)
        raise ZeroDivisionError


@pytest.mark.parametrize("durability", list(Durability))
def test_a_change_that_is_undone_has_written_to_no_slot_of_a_record(tmp_path: Path, durability: Durability) -> None:
    """It may evict a record and then fail: the record is there again, and so are its bytes."""
    with LmdbStore(tmp_path, CAPACITY_BYTES, durability=durability, interval_s=NEVER_S) as store:
        store.put_many([blob_of(n, NUM_BYTES) for n in range(20)])
        expected = state_of(store)

        with pytest.raises(ZeroDivisionError):
            evict_and_fail(store, key_of(7))

        assert state_of(store) == expected
        store.check()


def test_the_name_of_a_new_slab_is_on_the_medium_once_the_store_has_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its name a file's pages are lost in a crash, synced or not."""
    folder = tmp_path / "store"
    with LmdbStore(folder, CAPACITY_BYTES) as store:
        store.put_many([blob_of(1, NUM_BYTES)])
        store.sync()
        synced: list[Path] = []
        fsync = os.fsync

        def noted(handle: int) -> None:
            synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
            fsync(handle)

        monkeypatch.setattr(os, "fsync", noted)
        store.sync()
        assert folder not in synced, "it has no new name"
        store.put_many([blob_of(2, 3 * NUM_BYTES)])
        store.sync()

        assert folder in synced


def test_commit_keeps_everything(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(3)
    folder = tmp_path / "store"
    with LmdbStore(folder, CAPACITY_BYTES, durability=Durability.COMMIT) as store:
        churn(store, rng, 60)
        expected = state_of(store)
        mark = BootMark.read(folder)
        assert mark is not None
        assert mark.state is FileState.COMMIT
        crash(folder, folder, tmp_path / "after", rng)

    with LmdbStore(tmp_path / "after", CAPACITY_BYTES, durability=Durability.COMMIT) as store:
        assert state_of(store) == expected
        store.check()
    assert not [entry for entry in caplog.records if entry.levelno >= logging.WARNING]


@pytest.mark.parametrize("level", [Durability.INTERVAL, Durability.COMMIT])
def test_a_level_is_promised_only_once_what_came_before_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: Durability
) -> None:
    with LmdbStore(tmp_path / "store", CAPACITY_BYTES) as store:
        store.put_many([blob_of(1)])
        shutil.copytree(tmp_path / "store", tmp_path / "killed")
    seen: list[FileState] = []
    write = BootMark.write

    def note(mark: BootMark, folder: Path) -> None:
        seen.append(mark.state)
        write(mark, folder)

    monkeypatch.setattr(BootMark, "write", note)
    with LmdbStore(tmp_path / "killed", CAPACITY_BYTES, durability=level) as store:
        assert store.contains(key_of(1))
    assert seen == [FileState(level.value), FileState.CLEAN]


@pytest.mark.long
@pytest.mark.parametrize("before", list(Durability))
@pytest.mark.parametrize("after", list(Durability))
def test_a_store_changes_its_level_when_it_is_opened(tmp_path: Path, before: Durability, after: Durability) -> None:
    with LmdbStore(tmp_path, CAPACITY_BYTES, durability=before) as store:
        churn(store, random.Random(1), 30)
        expected = state_of(store)
    with LmdbStore(tmp_path, CAPACITY_BYTES, durability=after) as store:
        assert state_of(store) == expected
        store.check()


@pytest.mark.parametrize(("num_damaged", "num_left"), [(1, 1), (2, 0)])
def test_a_checkpoint_is_kept_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_damaged: int, num_left: int
) -> None:
    folder, after = tmp_path / "store", tmp_path / "after"
    with LmdbStore(folder, CAPACITY_BYTES, durability=Durability.INTERVAL, interval_s=NEVER_S) as store:
        store.put_many([blob_of(1)])
        store.sync()
        crash(folder, folder, after, random.Random(1))
    kept = bytearray((after / "checkpoint").read_bytes())
    for copy in range(num_damaged):
        kept[100 + copy * len(kept) // 2] ^= 1
    (after / "checkpoint").write_bytes(kept)

    with LmdbStore(after, CAPACITY_BYTES, durability=Durability.INTERVAL, interval_s=NEVER_S) as store:
        assert len(oldest_first(store)) == num_left
    assert any("starts empty" in entry.getMessage() for entry in caplog.records) == (num_left == 0)


def test_a_lowered_capacity_gives_its_space_back(tmp_path: Path) -> None:
    with LmdbStore(tmp_path, 100 << 20) as store:
        for number in range(0, 100, 10):
            store.put_many([blob_of(n, 1 << 19) for n in range(number, number + 10)])
        before = store.statistics().file_bytes

    with LmdbStore(tmp_path, 5 << 20) as store:
        store.check()
        assert store.statistics().file_bytes < 25 << 20 < before
        assert [key_of(n) for n in range(91, 100)] == oldest_first(store)
        out = bytearray(1 << 19)
        assert store.read_many([key_of(95)], [memoryview(out)]) == [digest(out)]


def test_the_capacity_is_remembered(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no store in"):
        LmdbStore(tmp_path)
    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        store.put_many([blob_of(1)])
    with LmdbStore(tmp_path) as store:
        assert store.statistics().capacity_bytes == CAPACITY_BYTES
        assert store.contains(key_of(1))
