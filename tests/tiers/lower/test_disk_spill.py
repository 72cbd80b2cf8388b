"""Writes to disk on their way: what the store pushes out meanwhile is not there, and nobody waits for a hung one."""

from collections.abc import Sequence

import numpy as np
import pytest
from chaos import NAMESPACE, FakeClock
from test_lower_tiers import BLOCK_BYTES, GROUPS, Bed, WaitingLane, content

from kvtier.store.blob_store import Blob
from kvtier.store.memory_store import MemoryStore
from kvtier.store.record import digest
from kvtier.tiers.lower import disk_spill
from kvtier.tiers.lower.copies import HUNG_COPY_S
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.lower.local_tiers import LocalTiers
from kvtier.tiers.lower.lower_tiers import ON_DISK
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.tier import EvictionCause, Tier
from kvtier.transfer.block_memory import CpuMemory
from kvtier.transfer.lane import Finished
from kvtier.transfer.transfer_engine import Route, TransferEngine

CHARGE = 4608  # of a record of one block
NUM_SLOTS = 32  # a quarter of which may be on its way to disk


class SpillBed(Bed):
    """Tiers over a store of one or many records, whose writes end one at a time, in any order."""

    tiers: LocalTiers
    store: MemoryStore

    def __init__(self, num_records: int) -> None:
        self.finished, clock, store = Finished(), FakeClock(), MemoryStore(num_records * CHARGE)
        lanes = {route: WaitingLane(self.finished) for route in Route}
        transfers = TransferEngine(lanes, self.finished)
        memories = [CpuMemory(np.zeros((1, BLOCK_BYTES), np.uint8), NUM_SLOTS) for _ in GROUPS]
        tiers = LocalTiers(GROUPS, memories, transfers, DiskTier(store, NAMESPACE, clock), clock)
        super().__init__(tiers, memories, transfers, lanes, store, clock)
        self.settle()

    def write(self) -> list[bytes]:
        """Have the writes that wait put their blocks, in order, without telling of it; the keys that are stored."""
        for transfer in self.lanes[Route.HOST_TO_DISK].waiting:
            transfer.run()
        return list(self.store.keys())

    def tell(self, *numbers: int) -> None:
        """Have the tiers learn of waiting writes that ended, in this order."""
        lane = self.lanes[Route.HOST_TO_DISK]
        for number in numbers:
            self.finished.put(lane.waiting[number])
        lane.waiting = [transfer for number, transfer in enumerate(lane.waiting) if number not in numbers]
        self.transfers.poll()
        self.tiers.poll()

    def is_said_to_be_on_disk(self, salt: str) -> bool:
        """Whether the document's one block is looked for on disk once it has left host memory."""
        assert self.tiers.withdraw(0, np.array(self.find(salt, 1), np.intp))
        return self.find(salt, 1) == [ON_DISK]


@pytest.fixture(autouse=True)
def one_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_spill, "MAX_IN_BATCH", 1)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "the later one first"])
def test_what_a_later_write_has_pushed_out_counts_as_gone_in_whatever_order_the_outcomes_come(
    order: tuple[int, int],
) -> None:
    bed = SpillBed(num_records=1)
    bed.put("a", 1)
    bed.put("b", 1)
    bed.tiers.hints.spill()
    assert len(bed.lanes[Route.HOST_TO_DISK].waiting) == 2
    (stored,) = bed.write()

    bed.tell(*order)

    on_disk = {salt: bed.store.contains(bed.tiers.index.disk.key(0, bed.names(salt, 1)[0])) for salt in "ab"}
    assert sorted(on_disk.values()) == [False, True], stored
    assert {salt: bed.is_said_to_be_on_disk(salt) for salt in "ab"} == on_disk
    bed.tiers.status.check()


def test_what_a_write_has_pushed_out_that_was_told_of_before_counts_as_gone() -> None:
    bed = SpillBed(num_records=1)
    for salt in "ab":
        bed.put(salt, 1)
        bed.tiers.hints.spill()
        bed.write()
        bed.tell(0)

    assert [bed.is_said_to_be_on_disk(salt) for salt in "ab"] == [False, True]
    bed.tiers.status.check()


def test_what_the_store_drops_before_its_write_is_told_of_counts_as_gone() -> None:
    bed = SpillBed(num_records=9)
    bed.put("a", 1)
    bed.tiers.hints.spill()
    keys = bed.write()

    bed.store.delete(keys)
    bed.tiers.on_gone_from_disk(keys, EvictionCause.ROOM)
    bed.tell(0)

    assert not bed.is_said_to_be_on_disk("a")
    bed.tiers.status.check()


def test_a_write_that_hangs_is_waited_for_no_longer_than_patience_lasts() -> None:
    bed = SpillBed(num_records=9)
    bed.put("a", 1)
    bed.tiers.hints.spill()
    assert bed.tiers.status.is_making_room

    bed.clock.now += HUNG_COPY_S + 0.1

    assert not bed.tiers.status.is_making_room


def test_writes_behind_one_that_hangs_are_waited_for_only_while_some_get_past_it() -> None:
    bed = SpillBed(num_records=9)
    lane = bed.lanes[Route.HOST_TO_DISK]

    def begin(salt: str) -> None:
        hanging, lane.waiting = lane.waiting, []
        bed.put(salt, 1)  # which lets the lanes work
        lane.waiting = hanging
        bed.tiers.hints.spill()

    begin("hangs")
    bed.clock.now += HUNG_COPY_S + 0.1
    begin("b")
    assert len(lane.waiting) == 2
    assert not bed.tiers.status.is_making_room, "one has begun, and none has ended"
    bed.write()
    bed.tell(1)
    assert not bed.tiers.status.is_making_room, "one has ended, and no other one has begun"
    begin("c")
    assert bed.tiers.status.is_making_room
    bed.clock.now += HUNG_COPY_S + 0.1
    assert not bed.tiers.status.is_making_room


def test_a_copy_thread_and_not_the_owner_makes_the_blobs_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_spill, "MAX_IN_BATCH", 64)
    bed = SpillBed(num_records=32)
    bed.put("a", 5)
    looked_at: list[int] = []
    stored: list[Blob] = []
    host_block, put_many = bed.memories[0].host_block, bed.store.put_many
    monkeypatch.setattr(bed.memories[0], "host_block", lambda slot: looked_at.append(slot) or host_block(slot))
    monkeypatch.setattr(bed.store, "put_many", lambda blobs: stored.extend(blobs) or put_many(blobs))

    bed.tiers.hints.spill()
    assert not looked_at
    bed.write()

    names = bed.names("a", 5)
    keys = [bed.tiers.index.disk.key(0, name) for name in names]
    assert {blob.key: blob.parent for blob in stored} == dict(zip(keys, [b"", *keys], strict=False))
    assert all(blob.digest == digest(blob.raw) and blob.raw == content(name) for blob, name in _pairs(stored, names))


def test_what_one_write_has_pushed_out_is_looked_up_and_told_of_in_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_spill, "MAX_IN_BATCH", 64)
    bed = SpillBed(num_records=5)
    for salt in "ab":
        bed.put(salt, 5)
        bed.tiers.hints.spill()
        bed.write()
        if salt == "b":
            assert bed.tiers.withdraw(0, np.array(bed.find("a", 5), np.intp)[:3])  # the disk has the last copies
            bed.tiers.pop_lost()
        bed.tell(0)

    (lost,) = bed.tiers.pop_lost()

    assert (sorted(lost.names), lost.tier) == (sorted(bed.names("a", 5)[:3]), Tier.DISK)
    bed.tiers.status.check()


def test_a_page_of_the_index_that_comes_adds_no_other_part_of_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    bed = SpillBed(num_records=9)
    bed.put("a", 5)
    bed.settle()
    index, lane = bed.tiers.index, bed.lanes[Route.DISK_TO_HOST]
    report, reported = index.report_forgotten, list[int]()
    monkeypatch.setattr(index, "report_forgotten", lambda: reported.append(1) or report())
    index.disk.follow_opening()
    num_polls = 0
    while not bed.tiers.status.is_indexed:
        bed.tiers.poll()
        num_polls += 1
        lane.work()
        bed.transfers.poll()  # which brings the page

    assert len(reported) == num_polls


def _pairs(stored: Sequence[Blob], names: Sequence[BlockName]) -> list[tuple[Blob, BlockName]]:
    """The blobs, in the order in which they were stored, with the names of the blocks that they hold."""
    return [(blob, name) for blob in stored for name in names if name in blob.key]
