"""Rows that pass through shared ones, on a disk that begins with a job when its outcome is asked for: what fails, what
is tried after it, and when shared rows are free again."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256

import numpy as np
import pytest
from chaos import FakeClock
from lmcache_bed import Lane

from kvtier.connectors import staged_disk
from kvtier.connectors.disk_below.disk_below import DiskBelow, InlineQueue
from kvtier.connectors.disk_below.job import Outcomes
from kvtier.connectors.disk_below.row_index import BlockRow
from kvtier.connectors.staged_disk import NUM_PARTS, Rows, StagedDisk
from kvtier.engine.config import ByteSize, DiskConfig
from kvtier.store.blob_store import Blob
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.transfer.lane import Lane as AnyLane
from kvtier.transfer.transfer_engine import Route

ROW_BYTES = 4096
PART_ROWS = 2
NAMESPACE = b"n" * 16


def names(numbers: Sequence[int]) -> list[BlockName]:
    return [BlockName(sha256(b"%d" % number).digest()) for number in numbers]


def row_of(number: int) -> bytes:
    return random.Random(number).randbytes(ROW_BYTES)


class Waited:
    """Outcomes of a job: the lanes work when somebody waits for it."""

    def __init__(self, outcomes: Outcomes, work: Callable[[], None]) -> None:
        self._outcomes = outcomes
        self._work = work

    def result(self) -> list[bool]:
        self._work()
        return self._outcomes.result(0)


class FullStore(MemoryStore):
    """A store in memory, whose writes fail for keys that it has no room for."""

    refused: Sequence[bytes] = ()

    def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
        if any(blob.key in self.refused for blob in blobs):
            raise OSError("no room on the device")
        return super().put_many(blobs)


class Disk(DiskBelow):
    """A disk below on a store in memory, that waits for its lanes."""

    def __init__(self, capacity_bytes: int) -> None:
        self.content = FullStore(capacity_bytes)
        self.tier = DiskTier(self.content, NAMESPACE, FakeClock())
        super().__init__(self.tier, self._make_lanes, 2, 1 << 30, lambda group_id: ROW_BYTES, lambda: None, FakeClock())
        self.work()  # the index

    def _make_lanes(self, finished: InlineQueue) -> Mapping[Route, AnyLane]:
        self.lanes = {Route.DISK_TO_HOST: Lane(finished), Route.HOST_TO_DISK: Lane(finished)}
        return dict(self.lanes)

    def work(self) -> None:
        for lane in self.lanes.values():
            lane.work()

    def load(self, rows: Sequence[BlockRow]) -> Outcomes:
        return Waited(super().load(rows), self.work)  # type: ignore[return-value]

    def store(self, rows: Sequence[BlockRow]) -> Outcomes:
        return Waited(super().store(rows), self.work)  # type: ignore[return-value]


class Bed:
    """A staged disk whose parts have two rows, and an engine that fills and takes rows."""

    def __init__(self, capacity_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.disk = Disk(capacity_bytes)
        monkeypatch.setattr(staged_disk, "PART_BYTES", PART_ROWS * ROW_BYTES)
        monkeypatch.setattr(staged_disk, "open_disk_below", lambda *_, **__: self.disk)
        self.staged = StagedDisk(DiskConfig(path="-", capacity=ByteSize(capacity_bytes)), NAMESPACE, [ROW_BYTES])
        self.asked: list[int] = []
        self.taken: dict[int, bytes] = {}

    def store(self, numbers: Sequence[int], parent: BlockName | None = None, fails_at: int | None = None) -> list[bool]:
        """Store these rows; the copy of the one at *fails_at* fails."""
        self.asked.clear()

        def fill(places: range, rows: Rows) -> None:
            for place, row in zip(places, rows, strict=True):
                if place == fails_at:
                    raise MemoryError
                self.asked.append(place)
                row[:] = np.frombuffer(row_of(numbers[place]), np.uint8)

        return self.staged.store(names(numbers), parent, fill)

    def load(self, numbers: Sequence[int]) -> int:
        self.taken.clear()

        def take(places: range, rows: Rows) -> None:
            self.taken |= {place: row.tobytes() for place, row in zip(places, rows, strict=True)}

        num_loaded = self.staged.load(names(numbers), take)
        assert self.taken == {place: row_of(numbers[place]) for place in range(num_loaded)}
        return num_loaded

    def key(self, number: int) -> bytes:
        return self.disk.tier.key(0, names([number])[0])


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    bed = Bed(1 << 20, monkeypatch)
    yield bed
    bed.staged.close()


def test_a_copy_that_fails_is_raised_when_the_disk_has_ended_with_the_shared_rows(bed: Bed) -> None:
    """As other rows pass there next."""
    for parts in range(1, NUM_PARTS + 2):
        with pytest.raises(MemoryError):
            bed.store(range(10 * parts, 10 * parts + 2 * PART_ROWS), fails_at=PART_ROWS)

        assert bed.disk.drain(0.0)
        assert bed.load(range(10 * parts, 10 * parts + 2 * PART_ROWS)) == PART_ROWS


def test_nothing_is_filled_or_tried_after_a_row_that_could_not_be_stored(bed: Bed) -> None:
    bed.disk.content.refused = [bed.key(1)]

    stored = bed.store(range(4 * PART_ROWS))

    assert bed.asked == list(range(2 * PART_ROWS)), "two parts are under way at a time"
    assert stored == [False, False, True, True, *[False] * (2 * PART_ROWS)]
    assert bed.disk.are_held(names(range(4 * PART_ROWS))) == stored


def test_nothing_is_read_after_a_row_that_cannot_be_had(bed: Bed) -> None:
    assert all(bed.store(range(4 * PART_ROWS)))
    bed.disk.content.delete([bed.key(1)])

    assert bed.load(range(4 * PART_ROWS)) == 1

    statistics = bed.disk.statistics()
    assert statistics.num_loaded + statistics.num_failed_loads == 2 * PART_ROWS, "two parts are under way at a time"


def test_each_row_is_stored_behind_the_one_before_it(bed: Bed) -> None:
    (before,) = names([100])

    assert all(bed.store(range(5), parent=before))

    parents = [bed.disk.content.rows[bed.key(number)].parent for number in range(5)]
    assert parents == [bed.disk.tier.key(0, before), *map(bed.key, range(4))]


def test_what_was_loaded_leaves_later(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = Bed(5 * ROW_BYTES // 2, monkeypatch)
    for number in (1, 2):
        assert all(bed.store([number]))

    assert bed.load([1]) == 1
    bed.disk.work()
    assert all(bed.store([3]))

    assert bed.disk.are_held(names([1, 2, 3])) == [True, False, True]
    bed.staged.close()
