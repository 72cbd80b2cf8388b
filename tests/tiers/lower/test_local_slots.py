"""What the owner of a memory that changes hands asks of `LocalTiers`: these very slots, and to forget all at once."""

import numpy as np
import pytest
from chaos import NAMESPACE, FakeClock
from test_lower_tiers import BLOCK_BYTES, GROUPS, NUM_SLOTS, Bed, WaitingLane

from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.lower.local_tiers import LocalTiers
from kvtier.tiers.lower.lower_tiers import NOWHERE, ON_DISK
from kvtier.tiers.naming.named_blocks import number_of
from kvtier.transfer.block_memory import CpuMemory
from kvtier.transfer.lane import Finished
from kvtier.transfer.transfer_engine import Route, TransferEngine


class LocalBed(Bed):
    """Tiers of this process over a store in memory."""

    tiers: LocalTiers
    store: MemoryStore


@pytest.fixture
def bed() -> LocalBed:
    finished, clock, store = Finished(), FakeClock(), MemoryStore(200 * 4608)
    lanes = {route: WaitingLane(finished) for route in Route}
    transfers = TransferEngine(lanes, finished)
    memories = [CpuMemory(np.zeros((1, BLOCK_BYTES), np.uint8), NUM_SLOTS) for _ in GROUPS]
    tiers = LocalTiers(GROUPS, memories, transfers, DiskTier(store, NAMESPACE, clock), clock)
    made = LocalBed(tiers, memories, transfers, lanes, store, clock)
    made.settle()
    return made


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.intp)


def test_withdrawn_slots_are_given_to_no_block_until_they_are_abandoned(bed: LocalBed) -> None:
    assert bed.tiers.withdraw(0, slots(2, 5))

    assert set(bed.reserve(NUM_SLOTS)) == set(range(NUM_SLOTS)) - {2, 5}
    bed.tiers.status.check()
    bed.tiers.abandon(0, slots(2, 5))
    assert sorted(bed.tiers.reserve(0, NUM_SLOTS)) == [2, 5]


def test_a_slot_with_a_block_that_is_on_disk_loses_it_and_one_that_is_not_yet_keeps_it(bed: LocalBed) -> None:
    bed.put("a", 3)
    held = slots(*bed.find("a", 3))
    assert not bed.tiers.withdraw(0, held), "the only copies would be lost"
    assert bed.find("a", 3) == held.tolist()
    for _ in range(4):
        bed.tiers.hints.spill()
        bed.settle()

    assert bed.tiers.withdraw(0, held)

    assert bed.find("a", 3) == [ON_DISK] * 3
    bed.tiers.status.check()


def test_a_leased_slot_is_not_withdrawn_and_nothing_has_changed(bed: LocalBed) -> None:
    bed.put("a", 3)
    for _ in range(4):
        bed.tiers.hints.spill()
        bed.settle()
    fetch = bed.fetch("a", 1)
    held = bed.find("a", 3)

    assert not bed.tiers.withdraw(0, slots(*held))

    assert bed.find("a", 3) == held
    fetch.release([0])
    assert bed.tiers.withdraw(0, slots(*held))


def test_only_idle_slots_are_withdrawn_without_leased_blocks_and_those_that_are_not_on_disk_yet(bed: LocalBed) -> None:
    bed.put("a", 3)
    for _ in range(4):
        bed.tiers.hints.spill()
        bed.settle()
    bed.put("b", 2)
    fetch = bed.fetch("a", 1)
    leased, *idle = bed.find("a", 3)
    unsaved = bed.find("b", 2)
    blank = next(slot for slot in range(NUM_SLOTS) if slot not in (leased, *idle, *unsaved))

    withdrawn = bed.tiers.withdraw_idle(0, slots(leased, *idle, *unsaved, blank))

    assert sorted(withdrawn) == sorted([*idle, blank])
    assert bed.find("a", 3) == [leased, ON_DISK, ON_DISK]
    assert bed.find("b", 2) == unsaved
    fetch.release([0])
    assert bed.tiers.withdraw_idle(0, slots(leased)).tolist() == [leased]
    bed.tiers.status.check()


def test_all_is_forgotten_at_once_and_its_records_go_beside_everything_else(bed: LocalBed) -> None:
    bed.push_to_disk("a", 3)
    bed.put("b", 3)
    fetch = bed.fetch("b", 3)

    bed.tiers.forget_all()

    assert bed.find("a", 3) == bed.find("b", 3) == [NOWHERE] * 3
    bed.put("c", 2)
    for _ in range(4):
        bed.tiers.hints.spill()
        bed.settle()
    assert len(list(bed.store.keys())) == 2, "records of what was forgotten are left, or others are gone"
    fetch.release([2, 1, 0])
    bed.tiers.status.check()


def test_blocks_that_are_being_written_when_all_is_forgotten_are_not_found_once_they_are_written(bed: LocalBed) -> None:
    bed.put("a", 3)
    bed.tiers.hints.spill()
    assert bed.lanes[Route.HOST_TO_DISK].waiting

    bed.tiers.forget_all()
    bed.settle()

    assert bed.find("a", 3) == [NOWHERE] * 3
    assert not list(bed.store.keys())
    bed.tiers.status.check()


def test_deleting_goes_on_after_an_error_and_after_the_store_was_opened_anew(bed: LocalBed) -> None:
    bed.push_to_disk("a", 3)
    disk, number = bed.tiers.index.disk, 1
    disk.opening = lambda: number
    failing = [OSError("the disk")]
    delete = bed.store.delete
    bed.store.delete = lambda keys: (_ for _ in ()).throw(failing.pop()) if failing else delete(keys)  # type: ignore[method-assign]

    bed.tiers.forget_all()
    bed.settle()
    number, epoch = 2, bed.tiers.status.epoch
    for _ in range(3):
        bed.clock.now += 2
        bed.settle()

    assert bed.find("a", 3) == [NOWHERE] * 3
    assert not list(bed.store.keys())
    assert bed.tiers.status.is_indexed
    assert bed.tiers.status.epoch > epoch, "copies that relied on the store before are not looked through"
    bed.tiers.status.check()


def test_while_a_load_wants_room_nothing_is_written_unless_host_slots_are_lacking(bed: LocalBed) -> None:
    bed.put("a", 2)

    bed.tiers.hints.make_room()
    assert not bed.lanes[Route.HOST_TO_DISK].waiting

    bed.put("b", NUM_SLOTS - 2)
    assert bed.tiers.reserve(0, 2) == []  # all are the last copies
    bed.tiers.hints.make_room()
    assert bed.lanes[Route.HOST_TO_DISK].waiting
    bed.settle()
    bed.tiers.status.check()


def test_the_tenants_of_leased_blocks_are_those_of_their_blocks_wherever_these_came_from(bed: LocalBed) -> None:
    bed.push_to_disk("a", 3)
    bed.put("b", 3)
    on_disk, in_host = bed.fetch("a", 3), bed.fetch("b", 3)
    bed.settle()

    for fetch in (on_disk, in_host):
        places = np.arange(3)
        assert fetch.owners(places).tolist() == [number_of(fetch.tenant(place)) for place in range(3)]
        fetch.release(places)
