"""Puts write payloads to reserved slots beside other puts, and only then enter them in the index."""

import errno
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from store_cases import blob_of, key_of, oldest_first
from waiting import DEADLINE_S, is_in, join, wait_for

from kvtier.store.blob_store import Blob, StoreFull
from kvtier.store.codec.seal import charged_bytes
from kvtier.store.disk_writes import DiskWrites
from kvtier.store.durability import Durability
from kvtier.store.lmdb.boot_mark import BootMark, FileState
from kvtier.store.lmdb.data_file import max_bytes
from kvtier.store.lmdb.files import MapUsers
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.record import Fault, digest
from kvtier.store.slab import PAGE_BYTES, Slabs, Slot, slot_bytes

CAPACITY_BYTES = 4 << 20
BLOCK_BYTES = 20_000


class HeldWrite:
    """Holds the writes of payloads that *is_held* names, until `let_go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_held: Callable[[Sequence[memoryview]], bool]) -> None:
        write = Slabs.write
        self.has_begun = threading.Event()
        self.let_go = threading.Event()

        def held(slabs: Slabs, slots: Sequence[Slot], values: Sequence[memoryview]) -> None:
            if is_held(values):
                self.has_begun.set()
                assert self.let_go.wait(DEADLINE_S)
            write(slabs, slots, values)

        monkeypatch.setattr(Slabs, "write", held)

    def wait(self) -> None:
        assert self.has_begun.wait(DEADLINE_S)


def has(number: int) -> Callable[[Sequence[memoryview]], bool]:
    raw = blob_of(number, BLOCK_BYTES).raw
    return lambda values: any(value[: len(raw)] == raw for value in values)


def beside(act: Callable[[], list[bytes]]) -> "Future[list[bytes]]":
    """Call *act* in another thread."""
    done: Future[list[bytes]] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done


def blobs(*numbers: int) -> list[Blob]:
    return [blob_of(number, BLOCK_BYTES) for number in numbers]


def is_whole(store: LmdbStore) -> bool:
    store.check()
    return all(fault is None for _, fault in store.verify())


@pytest.mark.parametrize("durability", list(Durability))
def test_a_put_is_done_while_another_still_writes(
    tmp_path: Path, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LmdbStore(tmp_path, CAPACITY_BYTES, durability=durability) as store:
        held = HeldWrite(monkeypatch, has(1))
        slow = beside(lambda: store.put_many(blobs(1, 2)))
        held.wait()

        store.put_many(blobs(3, 4))  # its slots come after those of the other
        assert oldest_first(store) == [key_of(3), key_of(4)]
        store.check()

        held.let_go.set()
        assert slow.result(DEADLINE_S) == []
        assert oldest_first(store) == [key_of(n) for n in (3, 4, 1, 2)]
        assert is_whole(store)


def test_puts_of_the_same_block_at_once_store_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        held = HeldWrite(monkeypatch, lambda values: threading.current_thread() is not threading.main_thread())
        slow = beside(lambda: store.put_many(blobs(1)))
        held.wait()

        store.put_many(blobs(1))
        held.let_go.set()
        slow.result(DEADLINE_S)

        assert store.statistics().num_records == 1
        assert is_whole(store)
        assert store.files.slabs.file_bytes() == slot_bytes(BLOCK_BYTES)  # the space of the other slot is released


def test_a_block_that_is_evicted_while_it_is_put_again_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        store.put_many(blobs(1))
        held = HeldWrite(monkeypatch, has(2))
        slow = beside(lambda: store.put_many(blobs(1, 2)))  # 1 is found, so that its payload is not written
        held.wait()
        store.delete([key_of(1)])
        held.let_go.set()
        slow.result(DEADLINE_S)

        assert oldest_first(store) == [key_of(1), key_of(2)]
        assert is_whole(store)


def test_the_slots_of_a_put_in_progress_keep_their_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        store.put_many(blobs(*range(10)))
        store.delete([key_of(n) for n in range(10)])
        held = HeldWrite(monkeypatch, has(20))
        slow = beside(lambda: store.put_many(blobs(20, 21, 22)))
        held.wait()

        store.files.give_back(0)
        store.put_many(blobs(30))  # in a hole
        held.let_go.set()
        slow.result(DEADLINE_S)

        assert oldest_first(store) == [key_of(n) for n in (30, 20, 21, 22)]
        assert is_whole(store)
        assert store.files.slabs.file_bytes() == 4 * slot_bytes(BLOCK_BYTES)


def test_a_put_that_fails_to_write_gives_its_slots_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:
        store.put_many(blobs(1))
        write = Slabs.write

        def write_and_fail(slabs: Slabs, slots: Sequence[Slot], values: Sequence[memoryview]) -> None:
            write(slabs, slots, values)
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as broken:
            broken.setattr(Slabs, "write", write_and_fail)
            with pytest.raises(OSError, match="Input/output"):
                store.put_many(blobs(2, 3))

        assert store.files.slabs.file_bytes() == slot_bytes(BLOCK_BYTES)
        store.put_many(blobs(4, 5))
        assert is_whole(store)
        assert store.files.slabs.file_bytes() == 3 * slot_bytes(BLOCK_BYTES)


def test_a_store_that_is_closed_while_a_put_writes_is_tidied_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LmdbStore(tmp_path, CAPACITY_BYTES)
    store.put_many(blobs(1))
    held = HeldWrite(monkeypatch, has(2))
    slow = beside(lambda: store.put_many(blobs(2)))
    held.wait()
    closing = threading.Thread(target=store.close)
    closing.start()
    wait_for(lambda: closing.ident is not None and is_in(closing.ident, MapUsers.close))  # it waits for the write

    held.let_go.set()
    with pytest.raises(ValueError, match="closed"):
        slow.result(DEADLINE_S)
    join(closing)

    with LmdbStore(tmp_path, CAPACITY_BYTES) as again:
        assert oldest_first(again) == [key_of(1)]
        assert again.files.slabs.file_bytes() == slot_bytes(BLOCK_BYTES)
        again.check()


def test_a_mark_never_says_that_all_is_tidy_while_a_put_has_slots(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path, CAPACITY_BYTES)
    places = store.files.reserve([slot_bytes(BLOCK_BYTES)] * 3, CAPACITY_BYTES)
    store.files.slabs.write([place.slot for place in places], [memoryview(bytes(BLOCK_BYTES))] * 3)
    store.close()
    mark = BootMark.read(tmp_path)
    assert mark is not None
    assert mark.state is FileState.COMMIT

    with LmdbStore(tmp_path, CAPACITY_BYTES) as again:
        assert again.files.slabs.file_bytes() == 0


def test_many_puts_at_once_stay_within_the_disk_space(tmp_path: Path) -> None:
    with LmdbStore(tmp_path, CAPACITY_BYTES) as store:

        def put_pairs(first: int) -> list[bytes]:
            return [key for n in range(first, first + 20) for key in store.put_many(blobs(n, n + 1))]

        others = [beside(partial(put_pairs, first)) for first in range(0, 600, 100)]
        for other in others:
            other.result(DEADLINE_S)
        assert is_whole(store)
        assert store.files.file_bytes() <= max_bytes(CAPACITY_BYTES)


# past the page cache, or through it


@pytest.fixture
def aligned() -> memoryview:
    memory = mmap.mmap(-1, 1 << 20)
    np.frombuffer(memory, np.uint8)[:] = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
    return memoryview(memory)


def is_cached(store: LmdbStore, number: int) -> bool:
    with store.files.reading() as txn:
        found = store.files.tables.located(txn, key_of(number))
    assert found is not None
    return store.files.slabs.is_cached(found[1])


def blob_in(memory: memoryview, number: int, num_bytes: int) -> Blob:
    raw = memory[number * num_bytes : (number + 1) * num_bytes]
    return Blob(key_of(number), digest(raw), raw)


def refuse_no_direct(folder: Path) -> None:
    try:
        os.close(os.open(folder / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of the temporary folder has no O_DIRECT")


@pytest.mark.parametrize("num_bytes", [16 * PAGE_BYTES, 9 * 512])
def test_direct_writes_leave_the_page_cache_alone_and_buffered_ones_fill_it(
    tmp_path: Path, aligned: memoryview, num_bytes: int
) -> None:
    """Also a payload that is no multiple of a page, where the device takes it."""
    refuse_no_direct(tmp_path)
    for writes in DiskWrites:
        with LmdbStore(tmp_path / writes, CAPACITY_BYTES, writes=writes) as store:
            store.put_many([blob_in(aligned, n, num_bytes) for n in range(4)])

            if num_bytes % PAGE_BYTES == 0:
                assert is_cached(store, 2) is (writes is DiskWrites.BUFFERED)
            out = memoryview(bytearray(num_bytes))
            assert store.read_many([key_of(3)], [out]) == [blob_in(aligned, 3, num_bytes).digest]
            assert out == aligned[3 * num_bytes : 4 * num_bytes]


def test_a_slot_in_the_page_cache_is_written_there(tmp_path: Path, aligned: memoryview) -> None:
    refuse_no_direct(tmp_path)
    num_bytes = 16 * PAGE_BYTES
    with LmdbStore(tmp_path / "store", CAPACITY_BYTES, writes=DiskWrites.BUFFERED) as store:
        store.put_many([blob_in(aligned, n, num_bytes) for n in range(4)])
        store.delete([key_of(n) for n in range(4)])
    with LmdbStore(tmp_path / "store", CAPACITY_BYTES, writes=DiskWrites.DIRECT) as store:
        store.put_many([blob_in(aligned, n, num_bytes) for n in range(4, 8)])

        assert is_cached(store, 5)
        assert is_whole(store)


def test_memory_that_is_not_aligned_is_stored_too(tmp_path: Path, aligned: memoryview) -> None:
    with LmdbStore(tmp_path, CAPACITY_BYTES, writes=DiskWrites.DIRECT) as store:
        raw = aligned[3 : 3 + 8 * PAGE_BYTES]
        store.put_many([Blob(key_of(1), digest(raw), raw)])
        assert is_whole(store)


def test_a_large_put_is_shared_by_threads_and_fails_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writers: set[int] = set()
    write = Slabs.write
    both = threading.Barrier(2)

    def fail_in_one(slabs: Slabs, slots: Sequence[Slot], values: Sequence[memoryview]) -> None:
        writers.add(threading.get_ident())
        if both.wait(DEADLINE_S) == 0:
            raise OSError(errno.EIO, "Input/output error")
        write(slabs, slots, values)

    large = [blob_of(n, 1 << 20) for n in range(4)]
    with LmdbStore(tmp_path, 256 << 20, writes=DiskWrites.BUFFERED) as store:
        with monkeypatch.context() as broken:
            broken.setattr(Slabs, "write", fail_in_one)
            with pytest.raises(OSError, match="Input/output"):
                store.put_many(large)
        assert len(writers) == 2
        assert list(store.keys()) == []
        assert store.files.slabs.file_bytes() == 0

        store.put_many(large)
        assert is_whole(store)


def test_one_call_writes_neighbouring_slots_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[list[int]] = []
    write = Slabs.write

    def note(slabs: Slabs, slots: Sequence[Slot], values: Sequence[memoryview]) -> None:
        shares.append([slot.number for slot in slots])
        write(slabs, slots, values)

    monkeypatch.setattr(Slabs, "write", note)
    with LmdbStore(tmp_path, 512 << 20, writes=DiskWrites.DIRECT) as store:
        store.put_many([blob_of(n, 1 << 20) for n in range(8)])
        assert shares == [list(range(8))]

        store.delete([key_of(n) for n in range(0, 8, 2)])
        shares.clear()
        store.put_many([blob_of(n, 1 << 20) for n in range(8, 12)])
        assert sorted(shares) == [[0, 2], [4, 6]]
        assert is_whole(store)


def test_new_slots_in_the_page_cache_have_disk_space_before_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    write = os.pwritev

    def note(file: int, buffers: Sequence[memoryview], offset: int) -> int:
        lengths.append(os.fstat(file).st_size)
        return write(file, buffers, offset)

    with LmdbStore(tmp_path, 256 << 20, writes=DiskWrites.BUFFERED) as store:
        monkeypatch.setattr(os, "pwritev", note)
        store.put_many([blob_of(n, 1 << 19) for n in range(4)])

        assert lengths == [2 << 20] * 2  # written a MiB at a time
        assert is_whole(store)


def test_a_put_that_fails_in_one_thread_waits_for_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Slabs.write
    has_begun, let_go = threading.Event(), threading.Event()
    putting: list[int] = []

    def fail_in_the_caller(slabs: Slabs, slots: Sequence[Slot], values: Sequence[memoryview]) -> None:
        if threading.get_ident() in putting:
            assert has_begun.wait(DEADLINE_S)
            raise OSError(errno.EIO, "Input/output error")
        has_begun.set()
        assert let_go.wait(DEADLINE_S)
        write(slabs, slots, values)

    def put() -> list[bytes]:
        putting.append(threading.get_ident())
        return store.put_many([blob_of(n, 1 << 20) for n in range(4)])

    with LmdbStore(tmp_path, 256 << 20, writes=DiskWrites.BUFFERED) as store:
        monkeypatch.setattr(Slabs, "write", fail_in_the_caller)
        slow = beside(put)
        wait_for(lambda: bool(putting) and is_in(putting[0], futures.wait))
        assert not slow.done()

        let_go.set()
        with pytest.raises(OSError, match="Input/output"):
            slow.result(DEADLINE_S)
        assert store.files.slabs.file_bytes() == 0


# a reserve of free disk space


class Disk:
    """A file system of which other programs leave *free_bytes*."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
        self.free_bytes = free_bytes
        statvfs = os.statvfs

        def found(path: "str | Path | int") -> os.statvfs_result:
            real = list(statvfs(path))
            real[1] = 1  # f_frsize
            real[4] = self.free_bytes  # f_bavail
            return os.statvfs_result(real)

        monkeypatch.setattr(os, "statvfs", found)


def test_new_slots_leave_the_reserve_free_and_old_ones_are_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, 1 << 40)
    with LmdbStore(tmp_path, CAPACITY_BYTES, reserve_bytes=1 << 30) as store:
        store.put_many(blobs(*range(40)))
        disk.free_bytes = 1 << 30  # others have taken the rest

        evicted = store.put_many(blobs(50, 51))

        assert evicted  # the new blocks are in the place of old ones
        assert {key_of(50), key_of(51)} <= set(store.keys())
        assert store.files.slabs.file_bytes() == 40 * slot_bytes(BLOCK_BYTES)
        store.put_many([blob_of(52, 3 * BLOCK_BYTES)])  # of another size
        assert store.files.slabs.file_bytes() <= 40 * slot_bytes(BLOCK_BYTES)

        disk.free_bytes = 1 << 40
        store.put_many(blobs(*range(60, 90)))
        assert store.files.slabs.file_bytes() > 40 * slot_bytes(BLOCK_BYTES)
        assert is_whole(store)


def test_an_empty_store_on_a_disk_without_the_reserve_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(monkeypatch, 1000)
    with LmdbStore(tmp_path, CAPACITY_BYTES, reserve_bytes=1 << 30) as store:
        with pytest.raises(OSError, match="free space on the disk") as raised:
            store.put_many(blobs(1))
        assert raised.value.errno == errno.ENOSPC
        assert store.read_many([key_of(1)], [memoryview(bytearray(BLOCK_BYTES))]) == [Fault.MISSING]


def test_a_put_larger_than_all_slots_is_refused_and_the_store_stays_usable(tmp_path: Path) -> None:
    """A block of another size finds room once evicted slots of the first size are given back."""
    capacity = 40 * charged_bytes(BLOCK_BYTES)
    with LmdbStore(tmp_path, capacity) as store:
        for number in range(80):
            store.put_many(blobs(number))
        try:
            store.put_many([blob_of(200, 400_000)])
        except StoreFull:
            pytest.fail("there is room for a block of half the capacity")
        assert is_whole(store)
