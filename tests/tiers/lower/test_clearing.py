"""Clearing: what is on disk and in no index any more is deleted, and nothing else."""

from collections.abc import Sequence

import pytest
from chaos import NAMESPACE, FakeClock
from lmcache_bed import Lane

from kvtier.store.blob_store import Blob
from kvtier.store.memory_store import MemoryStore
from kvtier.store.record import digest
from kvtier.tiers.lower import disk_tier
from kvtier.tiers.lower.clearing import REST_S, RecordDeletion
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.transfer.lane import Finished
from kvtier.transfer.transfer_engine import Route, TransferEngine


def name(number: int) -> BlockName:
    return BlockName(number.to_bytes(32, "big"))


class FailingStore(MemoryStore):
    """A store whose deletions fail while it is told to."""

    fails = False

    def delete(self, keys: Sequence[bytes]) -> int:
        if self.fails:
            raise OSError("a test has this fail")
        return super().delete(keys)


class Bed:
    """A disk with blocks 0 to 9 of its own and one of another namespace, whose index was emptied just now."""

    def __init__(self) -> None:
        finished = Finished()
        self.clock = FakeClock()
        self.store = FailingStore(1 << 20)
        self.disk, self.other = (DiskTier(self.store, namespace, self.clock) for namespace in (NAMESPACE, b"o" * 16))
        self.lanes = {route: Lane(finished) for route in (Route.DISK_TO_HOST, Route.HOST_TO_DISK)}
        self.transfers = TransferEngine(dict(self.lanes), finished)
        self.disk.follow_opening()
        self.write(range(10))
        self.put(self.other, 0)
        self.disk.index.empty()
        self.clearing = RecordDeletion(self.disk, self.transfers, self.clock)
        self.clearing.begin()

    def write(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.put(self.disk, number)
            self.disk.index.add(0, [name(number)])

    def put(self, disk: DiskTier, number: int) -> None:
        raw = memoryview(bytes([number]) * 64)
        self.store.put_many([Blob(disk.key(0, name(number)), digest(raw), raw)])

    def turn(self) -> None:
        self.clearing.go_on()
        for lane in self.lanes.values():
            lane.work()
            self.transfers.poll()

    def clear(self) -> None:
        for _ in range(30):
            self.turn()
        assert self.clearing.is_done

    def keys(self, own: Sequence[int]) -> set[bytes]:
        """Keys of these blocks, and of the other namespace's."""
        return {self.other.key(0, name(0)), *(self.disk.key(0, name(number)) for number in own)}


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Bed:
    monkeypatch.setattr(disk_tier, "PAGE_KEYS", 3)
    return Bed()


def test_all_that_was_there_is_deleted_and_other_namespaces_stay(bed: Bed) -> None:
    assert not bed.clearing.is_done

    bed.clear()

    assert set(bed.store.keys()) == bed.keys([])


def test_what_is_written_meanwhile_stays(bed: Bed) -> None:
    bed.turn()
    bed.write([0, 20, 21])  # of which one was there before

    bed.clear()

    assert set(bed.store.keys()) == bed.keys([0, 20, 21])
    assert bed.disk.num_held(0, [name(0), name(20), name(21)]) == 3


def test_a_new_deletion_does_not_wait_for_the_rest_after_an_error_of_the_last_one(bed: Bed) -> None:
    bed.store.fails = True
    for _ in range(30):
        bed.turn()
    assert bed.clearing.is_failing

    bed.store.fails = False
    bed.clearing.begin()
    bed.clear()

    assert set(bed.store.keys()) == bed.keys([])


def test_what_could_not_be_deleted_is_after_a_rest(bed: Bed) -> None:
    bed.store.fails = True
    for _ in range(30):
        bed.turn()
    assert not bed.clearing.is_done
    assert len(list(bed.store.keys())) == 11

    bed.store.fails = False
    for _ in range(30):
        bed.turn()
    assert not bed.clearing.is_done, "it rests"
    bed.clock.now += REST_S
    bed.clear()

    assert set(bed.store.keys()) == bed.keys([])


@pytest.mark.parametrize("num_turns", range(1, 12))
def test_what_was_written_since_is_deleted_too_if_all_is_cleared_again_while_a_page_is_read(
    bed: Bed, num_turns: int
) -> None:
    for _ in range(num_turns):
        bed.turn()
    bed.write([20, 21])
    bed.clearing.go_on()
    for lane in bed.lanes.values():  # a page is read, perhaps the last one, and its outcome waits to be processed
        lane.work()
    bed.disk.index.empty()

    bed.clearing.begin()
    bed.clear()

    assert set(bed.store.keys()) == bed.keys([])
