"""A disk below an engine's own memory: right bytes or none, jobs that end once, in order, whatever the disk does."""

import mmap
import os
import random
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import pytest
from chaos import FakeClock
from damaged_files import damage
from waiting import stop, wait_for

from kvtier.connectors.disk_below import loads
from kvtier.connectors.disk_below.disk_below import DiskBelow, InlineQueue
from kvtier.connectors.disk_below.open import open_disk_below
from kvtier.connectors.disk_below.row_index import BlockRow
from kvtier.connectors.disk_below.writes import Refusal
from kvtier.engine.config import DiskConfig, parse_bytes
from kvtier.store.blob_store import Blob, StoreFull
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.memory_store import MemoryStore
from kvtier.store.record import Fault
from kvtier.tiers.lower.breaker import REST_S
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.transfer.lane import Lane, Transfer
from kvtier.transfer.transfer_engine import Route

ROW_BYTES = 64 << 10
NAMESPACE = b"n" * 16
DEADLINE_S = 60.0  # for what takes milliseconds: reached only when a test fails


def name_of(number: int) -> BlockName:
    return BlockName(sha256(b"%d" % number).digest())


def bytes_of(number: int) -> bytes:
    return random.Random(number).randbytes(ROW_BYTES)


class HostRows:
    """An engine's host memory: a shared mapping, as vLLM's is, or ordinary memory."""

    def __init__(self, num_rows: int, *, is_shared: bool = True) -> None:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.truncate(num_rows * ROW_BYTES)
            shared = mmap.mmap(file.fileno(), num_rows * ROW_BYTES)
        self.memory = memoryview(shared if is_shared else bytearray(num_rows * ROW_BYTES))

    def row(self, place: int, number: int, *, filled: bool = False, parent: int | None = None) -> BlockRow:
        memory = self.memory[place * ROW_BYTES : (place + 1) * ROW_BYTES]
        memory[:] = bytes_of(number) if filled else bytes(ROW_BYTES)
        return BlockRow(name_of(number), memory, 0, None if parent is None else name_of(parent))

    def filled(self, numbers: Sequence[int]) -> list[BlockRow]:
        """Rows with a prefix of these blocks, one after the other."""
        return [
            self.row(place, number, filled=True, parent=numbers[place - 1] if place else None)
            for place, number in enumerate(numbers)
        ]

    def empty(self, numbers: Sequence[int]) -> list[BlockRow]:
        return [self.row(place, number) for place, number in enumerate(numbers)]


@contextmanager
def disk_at(folder: Path, rows: HostRows, capacity: str = "64MiB", read_timeout_s: float = 10.0) -> Iterator[DiskBelow]:
    config = DiskConfig(path=str(folder), capacity=parse_bytes(capacity), read_timeout_s=read_timeout_s)
    disk = open_disk_below(config, NAMESPACE, lambda group_id: ROW_BYTES, [rows.memory])
    try:
        yield disk
    finally:
        disk.close()


def is_right(rows: Sequence[BlockRow], numbers: Sequence[int]) -> list[bool]:
    return [bytes(row.memory) == bytes_of(number) for row, number in zip(rows, numbers, strict=True)]


@pytest.mark.parametrize("is_shared", [True, False], ids=["mapped from a file", "ordinary memory"])
def test_rows_come_back_right_in_this_process_and_in_the_next(tmp_path: Path, is_shared: bool) -> None:
    rows, numbers = HostRows(100, is_shared=is_shared), range(100)
    with disk_at(tmp_path / "store", rows) as disk:
        assert not any(disk.are_held([name_of(number) for number in numbers]))
        assert disk.store(rows.filled(numbers)).result(DEADLINE_S) == [True] * 100
        assert disk.num_held([name_of(number) for number in [*numbers, 100]]) == 100
        loaded = rows.empty(numbers)
        assert disk.load(loaded).result(DEADLINE_S) == [True] * 100
        assert all(is_right(loaded, numbers))
    with disk_at(tmp_path / "store", rows) as disk:
        assert disk.wait_indexed(DEADLINE_S)
        assert all(disk.are_held([name_of(number) for number in numbers]))
        loaded = rows.empty([99, 3, 50])
        assert disk.load(loaded).result(DEADLINE_S) == [True] * 3
        assert all(is_right(loaded, [99, 3, 50]))


def test_another_namespace_finds_nothing(tmp_path: Path) -> None:
    rows = HostRows(4)
    with disk_at(tmp_path / "store", rows) as disk:
        disk.store(rows.filled(range(4))).result(DEADLINE_S)
    config = DiskConfig(path=str(tmp_path / "store"), capacity=parse_bytes("64MiB"))
    disk = open_disk_below(config, b"m" * 16, lambda group_id: ROW_BYTES, [rows.memory])
    try:
        assert disk.wait_indexed(DEADLINE_S)
        assert disk.are_held([name_of(0)]) == [False]
        assert disk.load([rows.row(0, 0)]).result(DEADLINE_S) == [False]
    finally:
        disk.close()


def test_a_row_whose_bytes_are_damaged_is_not_had_not_held_and_can_be_stored_again(tmp_path: Path) -> None:
    rows, numbers = HostRows(10), range(10)
    with disk_at(tmp_path / "store", rows) as disk:
        disk.store(rows.filled(numbers)).result(DEADLINE_S)
    damage(tmp_path / "store", bytes_of(4))
    with disk_at(tmp_path / "store", rows) as disk:
        assert disk.wait_indexed(DEADLINE_S)
        loaded = rows.empty(numbers)
        expected = [number != 4 for number in numbers]
        assert disk.load(loaded).result(DEADLINE_S) == expected
        assert [right for right, number in zip(is_right(loaded, numbers), numbers, strict=True) if number != 4] == [
            True
        ] * 9
        assert disk.are_held([name_of(number) for number in numbers]) == expected
        statistics = disk.statistics()
        assert statistics.tier.corrupt == {Fault.CORRUPT.value: 1}
        assert (statistics.num_loaded, statistics.num_failed_loads) == (9, 1)
        assert disk.store(rows.filled(numbers)).result(DEADLINE_S) == [True] * 10
        loaded = rows.empty([4])
        assert disk.load(loaded).result(DEADLINE_S) == [True]
        assert is_right(loaded, [4]) == [True]


def test_a_prefix_leaves_from_its_end_and_the_folder_never_outgrows_its_capacity(tmp_path: Path) -> None:
    rows = HostRows(40)
    capacity = parse_bytes("16MiB")
    with disk_at(tmp_path / "store", rows, "16MiB") as disk:
        for first in range(0, 20 * 256, 40):
            numbers = range(first, first + 40)
            assert all(disk.store(rows.filled(numbers)).result(DEADLINE_S))
            taken = sum(file.stat().st_blocks * 512 for file in (tmp_path / "store").rglob("*"))
            assert taken <= capacity
        held = disk.are_held([name_of(number) for number in range(20 * 256)])
        assert 40 < sum(held) < 256
        for first in range(0, 20 * 256, 40):  # of each prefix there is a beginning, or nothing
            of_prefix = held[first : first + 40]
            assert of_prefix == sorted(of_prefix, reverse=True)
        kept = [number for number in range(20 * 256) if held[number]]
        for part in [kept[first : first + 40] for first in range(0, len(kept), 40)]:
            loaded = rows.empty(part)
            assert all(disk.load(loaded).result(DEADLINE_S))
            assert all(is_right(loaded, part))


def test_a_killed_store_ends_what_is_under_way_and_the_next_one_goes_on(tmp_path: Path) -> None:
    rows, numbers = HostRows(60), range(60)
    with disk_at(tmp_path / "store", rows) as disk:
        disk.store(rows.filled(numbers)).result(DEADLINE_S)
        stop(store_pid())
        loaded = rows.empty(numbers)
        job = disk.load(loaded)
        os.kill(store_pid(), signal.SIGKILL)
        outcome = job.result(DEADLINE_S)
        right = is_right(loaded, numbers)
        # What the killed store was asked for has failed. Beside busy cores it may not have been: then the next one is.
        assert all(right[place] for place, good in enumerate(outcome) if good)
        wait_for(lambda: all(disk.store(rows.filled(numbers)).result(DEADLINE_S)))
        wait_for(lambda: all(disk.are_held([name_of(number) for number in numbers])))  # reading rested for a second
        loaded = rows.empty(numbers)
        assert all(disk.load(loaded).result(DEADLINE_S))
        assert all(is_right(loaded, numbers))


def test_a_store_that_hangs_fails_its_jobs_by_its_deadline(tmp_path: Path) -> None:
    rows, numbers = HostRows(8), range(8)
    with disk_at(tmp_path / "store", rows, read_timeout_s=0.5) as disk:
        disk.store(rows.filled(numbers)).result(DEADLINE_S)
        stop(store_pid())
        load, store = disk.load(rows.empty(numbers[:4])), disk.store([rows.row(7, 100, filled=True)])
        assert load.result(DEADLINE_S) == [False] * 4
        assert store.result(DEADLINE_S) == [False]
        assert disk.drain(DEADLINE_S)
        assert disk.are_held([name_of(number) for number in numbers[:4]]) == [False] * 4


def store_pid() -> int:
    """Pid of the store's process, which is the last child of this one."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    others = [child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()]
    stores = [pid for pid in {*children, *others} if b"store_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    (pid,) = [int(pid) for pid in stores if Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"]
    return pid


def test_a_folder_in_use_is_no_error_and_joins_when_it_is_free(tmp_path: Path) -> None:
    rows = HostRows(4)
    other = LmdbStore(tmp_path / "store", 8 << 20)
    with disk_at(tmp_path / "store", rows) as disk:
        assert disk.store(rows.filled(range(4))).result(DEADLINE_S) == [False] * 4
        assert disk.statistics().refused == {Refusal.DISK: 4}
        assert not disk.statistics().disk.is_open
        other.close()
        assert disk.wait_indexed(DEADLINE_S)
        assert disk.store(rows.filled(range(4))).result(DEADLINE_S) == [True] * 4


def test_closing_ends_every_job_once(tmp_path: Path) -> None:
    rows = HostRows(200)
    told: list[int] = []
    with disk_at(tmp_path / "store", rows) as disk:
        disk.store(rows.filled(range(200))).result(DEADLINE_S)
        jobs = [disk.load(rows.empty(range(200))) for _ in range(20)]
        jobs += [disk.store(rows.filled(range(300, 500))) for _ in range(5)]
        for number, job in enumerate(jobs):
            job.add_done_callback(lambda _, number=number: told.append(number))  # type: ignore[misc]
        disk.close()
        assert sorted(told) == list(range(25))
        assert disk.store(rows.filled([1])).result(0) == [False]
        assert disk.load(rows.empty([1])).result(0) == [False]


def test_threads_beside_each_other_never_see_a_wrong_byte(tmp_path: Path) -> None:
    """Eight threads, more blocks than there is room for, rows of their own; and a byte that is damaged now and then."""
    regions = [HostRows(8) for _ in range(8)]
    wrong: list[str] = []
    num_loaded = [0] * 8
    config = DiskConfig(path=str(tmp_path / "store"), capacity=parse_bytes("16MiB"))
    disk = open_disk_below(config, NAMESPACE, lambda group_id: ROW_BYTES, [rows.memory for rows in regions])

    def work(thread: int) -> None:
        chance, rows = random.Random(thread), regions[thread]
        for _ in range(60):
            numbers = [chance.randrange(400) for _ in range(chance.randrange(1, 9))]
            numbers = list(dict.fromkeys(numbers))
            if chance.random() < 0.5:
                disk.store(rows.filled(numbers)).result(DEADLINE_S)
                continue
            loaded = rows.empty(numbers)
            outcome = disk.load(loaded).result(DEADLINE_S)
            num_loaded[thread] += sum(outcome)
            right = is_right(loaded, numbers)
            wrong.extend(f"{numbers[i]}" for i, good in enumerate(outcome) if good and not right[i])

    try:
        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(2 * DEADLINE_S)
        assert not any(each.is_alive() for each in threads)
        assert not wrong
        assert all(num_loaded)
        assert disk.statistics().tier.num_evicted > 0
    finally:
        disk.close()


@dataclass(eq=False)
class HeldLane:
    """A lane that begins nothing by itself; `work` does the first so many of what it has."""

    finished: InlineQueue
    held: list[Transfer] = field(default_factory=list)
    submitted: list[int] = field(default_factory=list)  # blocks of each

    @property
    def num_pending(self) -> int:
        return len(self.held)

    def submit(self, transfer: Transfer) -> bool:
        self.held.append(transfer)
        self.submitted.append(transfer.num_blocks)
        return True

    def work(self, limit: int = 1000) -> None:
        while self.held and limit:
            limit -= 1
            transfer = self.held.pop(0)
            transfer.run()
            self.finished.put(transfer)

    def close(self) -> bool:
        self.work()
        return True


class FaultyStore(MemoryStore):
    """A store in memory whose reads and writes fail while it is told to, or that evicts in vain."""

    fails = False
    is_full = False
    num_reads = 0

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes | Fault]:
        self.num_reads += 1
        return [Fault.IO_ERROR] * len(keys) if self.fails else super().read_many(keys, outs)

    def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
        if self.fails:
            raise OSError("no room on the device")
        if self.is_full:
            full = StoreFull("no room on the device")
            full.evicted = self.evict(2 * ROW_BYTES, 2).keys
            raise full
        return super().put_many(blobs)


class Bed:
    """A `DiskBelow` on a store in memory, whose lanes and time the test moves."""

    def __init__(self, max_queued_bytes: int = 1 << 30, written_bytes_per_day: int | None = None) -> None:
        self.store = FaultyStore(64 << 20)
        self.clock = FakeClock()
        tier = DiskTier(self.store, NAMESPACE, self.clock, written_bytes_per_day=written_bytes_per_day)
        self.disk = DiskBelow(
            tier, self._lanes, 2, max_queued_bytes, lambda group_id: ROW_BYTES, lambda: None, self.clock
        )
        self.reads.work()  # the index

    def _lanes(self, finished: InlineQueue) -> Mapping[Route, Lane]:
        self.reads, self.writes = HeldLane(finished), HeldLane(finished)
        return {Route.DISK_TO_HOST: self.reads, Route.HOST_TO_DISK: self.writes}

    def stored(self, rows: HostRows, numbers: Sequence[int]) -> None:
        job = self.disk.store(rows.filled(numbers))
        self.writes.work()
        assert all(job.result(0))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many rows a part has at most, for tests of jobs of several parts."""
    monkeypatch.setattr(loads, "MAX_PART_ROWS", 64)
    return 64


def test_loads_go_in_the_order_in_which_they_came_a_few_parts_at_a_time(small_parts: int) -> None:
    rows, bed = HostRows(400), Bed()
    bed.stored(rows, range(400))
    first, second = bed.disk.load(rows.empty(range(300))), bed.disk.load(rows.empty(range(300, 302)))
    assert bed.reads.num_pending == 4  # of two readers
    while not first.done():
        assert not second.done()
        bed.reads.work(1)
    bed.reads.work()
    assert all(first.result(0))
    assert all(second.result(0))
    assert len([blocks for blocks in bed.reads.submitted if blocks]) == 300 // small_parts + 1 + 1


def test_a_row_that_is_not_there_fails_at_once_and_without_the_disk() -> None:
    rows, bed = HostRows(3), Bed()
    bed.stored(rows, [0, 2])
    job = bed.disk.load(rows.empty([0, 1, 2]))
    bed.reads.work()
    assert job.result(0) == [True, False, True]
    assert bed.disk.load(rows.empty([1])).result(0) == [False]


def test_what_would_wait_too_long_to_be_written_is_refused_and_may_be_offered_again() -> None:
    rows, bed = HostRows(10), Bed(max_queued_bytes=4 * ROW_BYTES)
    job = bed.disk.store(rows.filled(range(10)))
    assert not job.done()
    bed.writes.work()
    assert job.result(0) == [True] * 4 + [False] * 6
    assert bed.disk.statistics().refused == {Refusal.BUSY: 6}
    assert bed.disk.statistics().queued_bytes == 0
    again = bed.disk.store(rows.filled(range(10)))
    bed.writes.work()
    assert again.result(0) == [True] * 8 + [False] * 2


def test_one_row_larger_than_the_queue_is_taken_while_nothing_waits() -> None:
    rows, bed = HostRows(2), Bed(max_queued_bytes=ROW_BYTES // 2)
    job = bed.disk.store(rows.filled(range(2)))
    bed.writes.work()
    assert job.result(0) == [True, False]


def test_a_budget_of_writes_holds_across_rows_that_wait() -> None:
    rows, bed = HostRows(10), Bed(written_bytes_per_day=5 * ROW_BYTES)
    job = bed.disk.store(rows.filled(range(10)))
    bed.writes.work()
    assert job.result(0) == [True] * 5 + [False] * 5
    assert bed.disk.statistics().refused == {Refusal.BUDGET: 5}


def test_a_disk_that_fails_is_left_alone_until_a_row_that_no_engine_waits_for_can_be_read() -> None:
    rows, bed = HostRows(100), Bed()
    bed.stored(rows, range(100))
    bed.store.fails = True
    for number in range(3):
        job = bed.disk.load(rows.empty([number]))
        bed.reads.work()
        assert job.result(0) == [False]
    asked = bed.store.num_reads
    assert bed.disk.are_held([name_of(50)]) == [False]
    assert bed.disk.load(rows.empty([50])).result(0) == [False]  # at once
    bed.reads.work()
    assert bed.store.num_reads == asked
    bed.store.fails = False
    bed.clock.now += REST_S + 0.1
    assert bed.disk.are_held([name_of(50)]) == [False]  # this begins the probe
    bed.reads.work()
    assert bed.disk.are_held([name_of(50)]) == [True]
    loaded = rows.empty([50])
    job = bed.disk.load(loaded)
    bed.reads.work()
    assert job.result(0) == [True]
    assert is_right(loaded, [50]) == [True]


@pytest.mark.usefixtures("small_parts")
def test_what_is_queued_fails_when_the_disk_is_left_alone() -> None:
    rows, bed = HostRows(400), Bed()
    bed.stored(rows, range(400))
    bed.store.fails = True
    job = bed.disk.load(rows.empty(range(400)))
    bed.reads.work(3)
    assert job.done() is False  # one part is still under way
    bed.reads.work()
    assert job.result(0) == [False] * 400


def test_a_write_that_fails_is_a_refusal_and_three_are_a_rest() -> None:
    rows, bed = HostRows(4), Bed()
    bed.store.fails = True
    for number in range(3):
        job = bed.disk.store([rows.row(0, number, filled=True)])
        bed.writes.work()
        assert job.result(0) == [False]
    assert bed.disk.store([rows.row(0, 9, filled=True)]).result(0) == [False]
    assert bed.disk.statistics().refused == {Refusal.FAILED: 3, Refusal.DISK: 1}
    bed.store.fails = False
    bed.clock.now += REST_S + 0.1
    job = bed.disk.store([rows.row(0, 9, filled=True)])
    bed.writes.work()
    assert job.result(0) == [True]


def test_rows_that_were_evicted_for_a_write_without_room_are_not_held() -> None:
    rows, bed = HostRows(5), Bed()
    bed.stored(rows, range(4))
    bed.store.is_full = True

    job = bed.disk.store([rows.row(4, 4, filled=True)])
    bed.writes.work()

    assert job.result(0) == [False]
    held = bed.disk.are_held([name_of(number) for number in range(5)])
    assert held == [True, True, False, False, False]
    assert bed.disk.statistics().disk.known_blocks == 2


def test_what_a_caller_does_with_the_outcome_may_use_the_disk_again() -> None:
    rows, bed = HostRows(2), Bed()
    chained: list[Callable[[], list[bool]]] = []
    job = bed.disk.store(rows.filled([0, 1]))
    job.add_done_callback(lambda _: chained.append(bed.disk.load(rows.empty([0, 1])).result))
    bed.writes.work()
    bed.reads.work()
    (result,) = chained
    assert result() == [True, True]


def test_cleared_rows_are_gone(tmp_path: Path) -> None:
    rows = HostRows(4)
    with disk_at(tmp_path / "store", rows) as disk:
        disk.store(rows.filled(range(4))).result(DEADLINE_S)
        assert disk.clear(DEADLINE_S)
        assert not any(disk.are_held([name_of(number) for number in range(4)]))
        assert all(disk.store(rows.filled(range(4))).result(DEADLINE_S))


def test_a_capacity_for_next_to_nothing_is_refused_with_what_to_do(tmp_path: Path) -> None:
    config = DiskConfig(path=str(tmp_path / "store"), capacity=parse_bytes("256KiB"))
    with pytest.raises(ValueError, match=r"use \d+ or more"):
        open_disk_below(config, NAMESPACE, lambda group_id: ROW_BYTES)


def test_the_process_of_a_store_is_no_orphan(tmp_path: Path) -> None:
    rows = HostRows(1)
    with disk_at(tmp_path / "store", rows):
        pid = store_pid()
    assert not Path(f"/proc/{pid}").exists()
