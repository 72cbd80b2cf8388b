"""A store that cannot be opened now, is opened late, or loses its folder: real processes, rests that the test ends."""

import errno
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtier.engine.stores.reopening_store import MAX_REST_S, WATCH_S, ReopeningStore, WhyClosed
from kvtier.store.blob_store import Blob, StoreUnavailable
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.owner_lock import FolderInUse
from kvtier.store.process.store_process import StoreDied
from kvtier.store.record import digest
from kvtier.store.store_settings import StoreSettings

CAPACITY_BYTES = 8 << 20
DEADLINE_S = 60.0  # for what takes milliseconds, or a start of the process: reached only when a test fails

# A store whose opening takes ten minutes once it has its folder.
SLOW_START = """
import time
from kvtier.store import owner_lock

acquire = owner_lock.OwnerLock.__init__

def acquire_and_wait(*arguments):
    acquire(*arguments)
    time.sleep(600)

owner_lock.OwnerLock.__init__ = acquire_and_wait
"""


class Rests:
    """Rests that end when the test says so, and are recorded."""

    def __init__(self) -> None:
        self.begun: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._over = threading.Semaphore(0)

    def __call__(self, closing: threading.Event, seconds: float) -> bool:
        self.begun.put(seconds)
        while not closing.is_set():
            if self._over.acquire(timeout=0.05):
                return False
        return True

    def next(self) -> float:
        """Wait until the next rest has begun; its length."""
        return self.begun.get(timeout=DEADLINE_S)

    def end(self) -> None:
        self._over.release()


@contextmanager
def reopening(folder: Path, rests: Rests) -> Iterator[ReopeningStore]:
    with ReopeningStore(StoreSettings(folder, CAPACITY_BYTES), rest=rests) as store:
        yield store


def blob_of(number: int) -> Blob:
    raw = bytes([number]) * 5000
    return Blob(key_of(number), digest(raw), memoryview(raw))


def key_of(number: int) -> bytes:
    return b"n" * 16 + number.to_bytes(32, "big")


def wait_for(holds: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


def test_a_store_that_another_has_open_is_opened_once_that_is_closed(tmp_path: Path) -> None:
    rests = Rests()
    with LmdbStore(tmp_path / "store", CAPACITY_BYTES) as other:
        other.put_many([blob_of(1)])
        with reopening(tmp_path / "store", rests) as store:
            is_open = store.wait_opened(DEADLINE_S)
            standing = store.standing()
            with pytest.raises(StoreUnavailable, match=r"not open: .*is open in process"):
                store.put_many([blob_of(2)])
            empty = store.statistics()
            rests.next()
            other.close()
            rests.end()
            rests.next()  # it is open, and watched

            assert (is_open, standing.not_open) == (False, WhyClosed.IN_USE)
            assert f"is open in process {os.getpid()}; stop it" in standing.why
            assert (empty.num_records, empty.capacity_bytes) == (0, CAPACITY_BYTES)
            assert store.opening() == 1
            assert store.standing().not_open is None
            assert list(store.keys()) == [key_of(1)]
            assert store.statistics().num_records == 1


def test_rests_between_attempts_double_up_to_a_minute(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file")
    rests, seen = Rests(), []

    with reopening(tmp_path / "store", rests) as store:
        while len(seen) < 8:
            seen.append(rests.next())
            rests.end()
        standing = store.standing()

    assert seen == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, MAX_REST_S]
    assert (standing.not_open, standing.num_ended) == (WhyClosed.FAILED, 0)
    assert "is not a folder" in standing.why


def test_a_folder_that_was_removed_is_made_anew_with_an_empty_store(tmp_path: Path) -> None:
    rests = Rests()
    with reopening(tmp_path / "store", rests) as store:
        assert store.wait_opened(DEADLINE_S)
        store.put_many([blob_of(1)])
        assert rests.next() == WATCH_S
        shutil.rmtree(tmp_path / "store")
        rests.end()
        rests.next()

        standing = store.standing()
        assert (standing.num_gone, standing.not_open, standing.num_ended) == (1, None, 0)
        assert store.opening() == 2
        assert list(store.keys()) == []
        store.put_many([blob_of(2)])
        assert store.contains(key_of(2))

    with LmdbStore(tmp_path / "store") as opened:
        assert list(opened.keys()) == [key_of(2)]


@pytest.mark.parametrize("is_moved", [True, False])
def test_a_folder_made_anew_by_another_gets_nothing_before_the_store_is_opened_in_it(
    tmp_path: Path, is_moved: bool
) -> None:
    folder, rests = tmp_path / "store", Rests()
    with reopening(folder, rests) as store:
        assert store.wait_opened(DEADLINE_S)
        store.put_many([blob_of(1)])
        rests.next()
        if is_moved:
            folder.rename(tmp_path / "elsewhere")
        else:
            shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
        (folder / "letter").write_text("not the store's")
        store.put_many([blob_of(2)])  # the store has not noticed yet

        assert [path.name for path in folder.iterdir()] == ["letter"]
        rests.end()
        rests.next()

        assert store.standing().num_gone == 1
        assert list(store.keys()) == []
        store.put_many([blob_of(3)])
        assert (folder / "letter").read_text() == "not the store's"

    assert (folder / "letter").read_text() == "not the store's"
    if is_moved:
        with LmdbStore(tmp_path / "elsewhere") as moved:
            assert moved.contains(key_of(1))
            assert not moved.contains(key_of(3))


def test_a_folder_that_was_emptied_counts_as_gone(tmp_path: Path) -> None:
    folder, rests = tmp_path / "store", Rests()
    with reopening(folder, rests) as store:
        assert store.wait_opened(DEADLINE_S)
        store.put_many([blob_of(1)])
        rests.next()
        for path in folder.iterdir():
            path.unlink()
        rests.end()
        rests.next()

        assert store.standing().num_gone == 1
        store.put_many([blob_of(2)])
        assert list(store.keys()) == [key_of(2)]


def test_a_store_that_hangs_while_opening_is_closed_at_once_and_gives_its_lock_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_START)
    lock = tmp_path / "store" / "owner.lock"
    with monkeypatch.context() as slow:
        slow.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        store = ReopeningStore(StoreSettings(tmp_path / "store", CAPACITY_BYTES))
        wait_for(lambda: lock.exists() and lock.read_text().strip() == str(os.getpid()))
    standing = store.standing()
    with pytest.raises(StoreUnavailable, match="still being opened"):
        store.touch([key_of(1)])
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(DEADLINE_S)

    assert not closing.is_alive()
    assert standing.not_open is WhyClosed.OPENING
    with LmdbStore(tmp_path / "store", CAPACITY_BYTES) as opened:
        assert list(opened.keys()) == []


def test_every_error_of_opening_has_a_reason() -> None:
    reasons = {
        WhyClosed.IN_USE: FolderInUse("open in process 1"),
        WhyClosed.DIED: StoreDied("its process ended"),
        WhyClosed.READ_ONLY: OSError(errno.EROFS, "Read-only file system"),
        WhyClosed.FORBIDDEN: PermissionError(errno.EACCES, "Permission denied"),
        WhyClosed.NO_SPACE: OSError(errno.ENOSPC, "No space left on device"),
        WhyClosed.FAILED: KeyError("a row of a damaged index"),
    }

    assert {reason: WhyClosed.of(error) for reason, error in reasons.items()} == {reason: reason for reason in reasons}
