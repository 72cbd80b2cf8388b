"""The contract of `LowerTiers`: every kind of tiers below the device keeps it."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pytest
from attached_bed import SidecarBed, SteppedTiers, attached_memory
from chaos import NAMESPACE, FakeClock
from unreliable_tiers import UnreliableTiers

from kvtier.engine.attached.wire import Fetched, FromSidecar, InHost, LeftDisk, Reserved, frame_of, packed
from kvtier.sidecar.own.block_layout import BlockShape
from kvtier.store.memory_store import MemoryStore
from kvtier.store.record import digest
from kvtier.tiers.device.eviction_order import NamedSpan
from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.lower.local_tiers import LocalTiers, lower_tiers
from kvtier.tiers.lower.lower_tiers import NOWHERE, ON_DISK, Fetch, Lost, LowerTiers, ReadPriority
from kvtier.tiers.naming.block_hash import BlockChain, BlockName, ExtraKeys
from kvtier.tiers.naming.groups import FullAttention, SlidingWindow
from kvtier.tiers.naming.named_blocks import NamedBlocks, blocks_of
from kvtier.tiers.naming.tier import EvictionCause, Reason, Tier
from kvtier.transfer.block_memory import BlockMemory, CpuMemory
from kvtier.transfer.lane import Finished, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

SIZE = 4  # tokens of a block
BLOCK_BYTES = 64
NUM_SLOTS = 8
GROUPS = [FullAttention(SIZE), SlidingWindow(SIZE, 10)]


class WaitingLane:
    """A lane that runs its transfers when `work` is called."""

    def __init__(self, finished: Finished) -> None:
        self._finished = finished
        self.waiting: list[Transfer] = []

    @property
    def num_pending(self) -> int:
        return len(self.waiting)

    def submit(self, transfer: Transfer) -> bool:
        self.waiting.append(transfer)
        return True

    def work(self) -> None:
        waiting, self.waiting = self.waiting, []
        for transfer in waiting:
            transfer.run()
            self._finished.put(transfer)

    def close(self) -> bool:
        self.work()
        return True


@dataclass
class Bed:
    """Tiers of one kind, and around them what a device pool would have."""

    tiers: LowerTiers
    memories: Sequence[BlockMemory]
    transfers: TransferEngine
    lanes: dict[Route, WaitingLane]
    store: MemoryStore | None
    clock: FakeClock
    told: list[tuple[Fetch, int, Reason | None]] = field(default_factory=list)

    def close(self) -> None:
        if isinstance(self.tiers, SteppedTiers):
            self.tiers.close()
            self.tiers.bed.close()
        for memory in self.memories:
            memory.close()

    def settle(self) -> None:
        for _ in range(60):
            for lane in self.lanes.values():
                lane.work()
            self.transfers.poll()
            self.tiers.poll()

    def settle_and_tell(self) -> None:
        """Until what tiers elsewhere tell from time to time has been told too."""
        self.settle()
        self.clock.now += 1.0
        self.settle()

    def chain(self, salt: str, num_blocks: int) -> BlockChain:
        chain = BlockChain(SIZE, ExtraKeys(cache_salt=salt))
        chain.extend(list(range(num_blocks * SIZE)))
        return chain

    def names(self, salt: str, num_blocks: int) -> Sequence[BlockName]:
        return self.chain(salt, num_blocks).names

    def blocks(self, salt: str, num_blocks: int) -> NamedBlocks:
        return blocks_of(self.chain(salt, num_blocks), GROUPS[0], np.arange(num_blocks))

    def on_fetched(self, fetch: Fetch, place: int, failure: Reason | None) -> None:
        self.told.append((fetch, place, failure))

    def put(self, salt: str, num_blocks: int) -> None:
        """Copy a document down as a device pool does, tail first."""
        names = self.names(salt, num_blocks)[::-1]
        slots = self.reserve(num_blocks)
        for name, slot in zip(names, slots, strict=True):
            self.memories[0].host_block(slot)[:] = content(name)
        rows = [NamedSpan(0, num_blocks, names, None)]
        digests = [digest(content(name)) for name in names]
        self.tiers.publish(0, np.array(slots, np.intp), rows, digests, np.zeros(num_blocks, np.uint64))
        self.settle()

    def reserve(self, num_slots: int) -> list[int]:
        """Reserve exactly so many slots: one answer may be fewer than were asked for, several together are not."""
        slots: list[int] = []
        for _ in range(40):
            slots += self.tiers.reserve(0, num_slots - len(slots))
            if len(slots) == num_slots:
                break
            self.settle()
        return slots

    def find(self, salt: str, num_blocks: int) -> list[int]:
        return self.tiers.find(0, self.names(salt, num_blocks)).tolist()

    def fetch(self, salt: str, num_blocks: int) -> Fetch:
        fetch = self.tiers.fetch(0, self.blocks(salt, num_blocks), self.on_fetched)
        self.settle()
        return fetch

    def push_to_disk(self, salt: str, num_blocks: int) -> None:
        """Leave a document on disk only."""
        self.put(salt, num_blocks)
        for _ in range(4):
            self.tiers.hints.spill()
            self.settle()
        others = (f"other {number}" for number in range(100))
        while any(place != ON_DISK for place in self.find(salt, num_blocks)):
            self.put(next(others), 2)
            self.tiers.hints.spill()
            self.settle()


def content(name: BlockName) -> bytes:
    return (name * 2)[:BLOCK_BYTES]


def told_lost(bed: Bed) -> list[Lost]:
    """What is told as lost, also by tiers that are late."""
    told = list[Lost]()
    for _ in range(40):
        bed.tiers.poll()
        told += bed.tiers.pop_lost()
    return told


MakeBed = Callable[[str], Bed]


def bed_of(kind: str, monkeypatch: pytest.MonkeyPatch) -> Bed:
    num_slots = 0 if kind == "none" else NUM_SLOTS
    store = MemoryStore(200 * 4608) if "disk" in kind or kind == "unreliable" else None
    finished, clock = Finished(), FakeClock()
    lanes = {route: WaitingLane(finished) for route in Route}
    transfers = TransferEngine(lanes, finished)
    if "sidecar" in kind:
        return sidecar_bed(transfers, lanes, store, clock)
    memories = [CpuMemory(np.zeros((1, BLOCK_BYTES), np.uint8), num_slots) for _ in GROUPS]
    disk = None if store is None else DiskTier(store, NAMESPACE, clock)
    tiers = lower_tiers(GROUPS, memories, transfers, disk, clock)
    if kind == "unreliable":  # late and in any order; what is known of it is known
        assert isinstance(tiers, LocalTiers)
        monkeypatch.setattr("unreliable_tiers.STALE", 0.0)
        tiers = UnreliableTiers(tiers, random.Random(7))
    made = Bed(tiers, memories, transfers, lanes, store, clock)
    made.settle()
    return made


def sidecar_bed(
    transfers: TransferEngine, lanes: dict[Route, WaitingLane], store: MemoryStore | None, clock: FakeClock
) -> Bed:
    """The endpoint of a sidecar whose host memory is one extent, which the first group has."""
    shapes = [BlockShape(group.block_size, group.forgets, BLOCK_BYTES) for group in GROUPS]
    num_bytes = NUM_SLOTS * BLOCK_BYTES
    sidecar = SidecarBed(shapes, num_bytes, num_bytes, store, clock, lambda: transfers)
    memories = [attached_memory(np.zeros((1, BLOCK_BYTES), np.uint8)) for _ in GROUPS]
    tiers = SteppedTiers(sidecar, GROUPS, memories, transfers, clock)
    made = Bed(tiers, memories, transfers, lanes, store, clock)
    made.settle()
    return made


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeBed]:
    """Makes tiers of a kind, which end with the test."""
    with ExitStack() as made:

        def make(kind: str) -> Bed:
            bed = bed_of(kind, monkeypatch)
            made.callback(bed.close)
            return bed

        yield make


@pytest.fixture(params=["host", "host and disk", "unreliable", "sidecar"])
def lower(request: pytest.FixtureRequest, bed: MakeBed) -> Bed:
    """Tiers of each kind that can keep a block."""
    return bed(request.param)


@pytest.fixture(params=["none", "host", "host and disk", "unreliable", "sidecar"])
def any_lower(request: pytest.FixtureRequest, bed: MakeBed) -> Bed:
    """Tiers of every kind, `NoTiers` included."""
    return bed(request.param)


@pytest.fixture(params=["host and disk", "unreliable", "sidecar and disk"])
def with_disk(request: pytest.FixtureRequest, bed: MakeBed) -> Bed:
    """Tiers of each kind that has a disk."""
    return bed(request.param)


def test_what_was_never_published_is_nowhere(any_lower: Bed) -> None:
    assert any_lower.find("a", 3) == [NOWHERE] * 3
    assert any_lower.tiers.find_run(0, any_lower.names("a", 3)).tolist() == []
    assert any_lower.tiers.find(0, []).tolist() == []
    any_lower.tiers.status.check()


def test_what_is_nowhere_is_told_once_not_to_come_and_in_a_poll_only(any_lower: Bed) -> None:
    fetch = any_lower.tiers.fetch(0, any_lower.blocks("a", 3), any_lower.on_fetched)
    assert any_lower.told == []

    any_lower.settle()

    assert sorted(place for _, place, _ in any_lower.told) == [0, 1, 2]
    assert all(each is fetch and reason is not None for each, _, reason in any_lower.told)
    assert set(fetch.failures) == {0, 1, 2}
    assert (fetch.slots == ABSENT).all()
    fetch.release([2, 1, 0])
    any_lower.tiers.status.check()


def test_tiers_that_keep_nothing_take_nothing_and_are_whole_at_once(bed: MakeBed) -> None:
    tiers = bed("none").tiers

    assert tiers.reserve(0, 4) == []
    assert list(tiers.status.num_slots) == [0, 0]
    assert (tiers.status.is_indexed, tiers.status.is_readable, tiers.status.is_making_room) == (True, True, False)
    assert not tiers.status.spill_progress().has_target
    assert tiers.status.statistics().tiers == {}
    assert tiers.clear()


def test_a_published_block_is_found_and_fetched_with_its_bytes_and_digest(lower: Bed) -> None:
    lower.put("a", 3)

    places = lower.find("a", 3)
    fetch = lower.fetch("a", 3)

    assert all(place >= 0 for place in places)
    assert fetch.slots.tolist() == places
    for place, name in enumerate(lower.names("a", 3)):
        assert bytes(lower.memories[0].host_block(places[place])) == content(name)
        assert fetch.digest(place) == digest(content(name))
    assert lower.tiers.find(1, lower.names("a", 3)).tolist() == [NOWHERE] * 3  # of the other group nothing
    fetch.release([2, 1, 0])
    lower.tiers.status.check()


def test_a_run_ends_at_the_first_block_that_is_nowhere(lower: Bed) -> None:
    lower.put("a", 3)

    run = lower.tiers.find_run(0, lower.names("a", 5))

    assert run.tolist() == lower.find("a", 3)


def test_a_reserved_slot_is_not_given_again_and_holds_nothing_to_find_until_it_is_published(lower: Bed) -> None:
    slots = lower.reserve(NUM_SLOTS)

    assert sorted(slots) == list(range(NUM_SLOTS))
    assert lower.reserve(1) == []
    assert lower.tiers.status.statistics().tiers[Tier.HOST].num_blocks == 0
    lower.tiers.status.check()
    lower.tiers.abandon(0, np.array(slots, np.intp))
    assert len(lower.reserve(NUM_SLOTS)) == NUM_SLOTS


def test_what_is_published_twice_is_there_once_and_the_second_slot_comes_back(lower: Bed) -> None:
    lower.put("a", 3)
    before = lower.find("a", 3)

    lower.put("a", 3)

    assert lower.find("a", 3) == before
    lower.settle_and_tell()
    assert lower.tiers.status.statistics().tiers[Tier.HOST].num_blocks == 3
    assert len(lower.reserve(NUM_SLOTS - 3)) == NUM_SLOTS - 3


def test_what_is_fetched_stays_until_it_is_released(lower: Bed) -> None:
    lower.put("a", 3)
    fetch = lower.fetch("a", 3)

    lower.put("b", NUM_SLOTS - 3)
    others = lower.reserve(NUM_SLOTS)

    assert not set(others) & set(fetch.slots.tolist())
    for slot in others:
        lower.memories[0].host_block(slot)[:] = bytes(BLOCK_BYTES)
    for place, name in enumerate(lower.names("a", 3)):
        assert bytes(lower.memories[0].host_block(fetch.slots[place])) == content(name)
    fetch.release([2, 1, 0])
    assert (fetch.slots == ABSENT).all()
    lower.tiers.status.check()


def test_what_leaves_is_told_as_lost_once_with_the_tier_that_had_it(lower: Bed) -> None:
    lower.put("a", 3)
    lower.settle()
    while lower.tiers.pop_lost():
        pass
    index = getattr(lower.tiers, "inner", lower.tiers).index

    index.host[0].evict(index.host[0].pool.find_all(lower.names("a", 3)[1:]), EvictionCause.ROOM)
    lower.settle()
    told = [lost for _ in range(40) for lost in lower.tiers.pop_lost()]

    assert [(lost.group_id, lost.tier) for lost in told] == [(0, Tier.HOST)]
    assert set(told[0].names) == set(lower.names("a", 3)[1:])
    assert lower.find("a", 3)[1:] == [NOWHERE, NOWHERE]


def test_a_place_that_was_found_is_good_while_nothing_has_changed(lower: Bed) -> None:
    lower.put("a", 3)
    before = lower.tiers.status.num_changes
    places = lower.tiers.find(0, lower.names("a", 3))
    assert lower.tiers.status.num_changes == before

    fetch = lower.tiers.fetch(0, lower.blocks("a", 3), lower.on_fetched, found=places)
    lower.settle()

    assert fetch.slots.tolist() == places.tolist()
    fetch.release([2, 1, 0])
    lower.put("b", 1)
    assert lower.tiers.status.num_changes > before


def test_a_forgotten_block_is_counted_and_not_found_in_host_memory(lower: Bed) -> None:
    lower.put("a", 2)

    lower.tiers.forget(0, lower.names("a", 2)[:1])
    lower.settle_and_tell()

    assert lower.find("a", 2)[0] < 0 <= lower.find("a", 2)[1]
    assert sum(lower.tiers.status.statistics().tiers[Tier.HOST].corrupt.values()) == 1
    lower.tiers.status.check()


def test_after_a_clear_nothing_is_found_and_every_slot_is_free(lower: Bed) -> None:
    lower.put("a", 3)
    lower.fetch("a", 2)

    assert lower.tiers.clear()

    lower.settle()
    assert lower.find("a", 3) == [NOWHERE] * 3
    assert len(lower.reserve(NUM_SLOTS)) == NUM_SLOTS
    assert lower.store is None or lower.store.statistics().num_records == 0


def test_what_a_clear_forgets_is_lost_because_it_was_cleared(lower: Bed) -> None:
    lower.put("a", 3)
    lower.settle_and_tell()

    assert lower.tiers.clear()

    lost = told_lost(lower)
    assert {name for each in lost for name in each.names} == set(lower.names("a", 3))
    assert {(each.group_id, each.cause) for each in lost} == {(0, EvictionCause.CLEARED)}


def test_what_a_clear_takes_from_the_disk_is_lost_there(with_disk: Bed) -> None:
    with_disk.push_to_disk("a", 3)
    with_disk.settle_and_tell()
    told_lost(with_disk)

    assert with_disk.tiers.clear()

    lost = [each for each in told_lost(with_disk) if each.tier is Tier.DISK]
    assert set(with_disk.names("a", 3)) <= {name for each in lost for name in each.names}
    assert {each.cause for each in lost} == {EvictionCause.CLEARED}


def test_nothing_is_cleared_while_a_slot_is_reserved(lower: Bed) -> None:
    lower.put("a", 2)
    slots = lower.reserve(1)

    assert not lower.tiers.clear()

    assert NOWHERE not in lower.find("a", 2)
    lower.tiers.abandon(0, np.array(slots, np.intp))


def test_what_was_used_last_goes_last(lower: Bed) -> None:
    lower.put("a", 4)
    lower.put("b", 4)
    lower.tiers.refresh(0, lower.names("a", 4)[::-1], [])
    lower.settle()
    for _ in range(4):  # what is not on disk yet would be in the way
        lower.tiers.hints.spill()
        lower.settle()

    lower.put("c", 2)

    assert min(lower.find("a", 4)) >= 0
    assert sum(place >= 0 for place in lower.find("b", 4)) == 2


@pytest.mark.parametrize("kind", ["host", "host and disk"])
def test_what_is_wanted_later_is_the_last_to_be_evicted(kind: str, bed: MakeBed) -> None:
    lower = bed(kind)
    lower.put("a", 4)
    lower.put("b", 4)
    for _ in range(4):
        lower.tiers.hints.spill()
        lower.settle()

    places = np.append(lower.tiers.find(0, lower.names("a", 4)), [ON_DISK, NOWHERE])
    lower.tiers.hints.evict_last(0, places.astype(np.int32))
    lower.put("c", 3)

    assert min(lower.find("a", 4)) >= 0
    lower.put("d", 2)  # one of "b" is left: the tail of "a" goes
    assert [place >= 0 for place in lower.find("a", 4)] == [True, True, True, False]
    lower.tiers.status.check()


def test_releasing_a_block_twice_does_nothing(lower: Bed) -> None:
    lower.put("a", 3)
    fetch, other = lower.fetch("a", 3), lower.fetch("a", 3)

    fetch.release([2, 1, 0])
    fetch.release([2, 1, 0])
    lower.settle()

    assert not set(lower.reserve(NUM_SLOTS)) & set(other.slots.tolist())
    lower.tiers.status.check()
    other.release([2, 1, 0])
    lower.settle()
    lower.tiers.status.check()


def test_a_fetch_that_waits_for_nothing_has_no_time_to_be_over(with_disk: Bed) -> None:
    with_disk.put("a", 3)
    fetch = with_disk.fetch("a", 3)

    fetch.time_out()
    with_disk.settle()

    assert with_disk.tiers.status.is_readable
    assert (fetch.slots != ABSENT).all()
    fetch.release([2, 1, 0])


def test_what_is_on_disk_only_is_read_and_is_what_was_written(with_disk: Bed) -> None:
    with_disk.push_to_disk("a", 3)

    fetch = with_disk.fetch("a", 3)

    assert sorted(place for _, place, reason in with_disk.told if reason is None) == [0, 1, 2]
    for place, name in enumerate(with_disk.names("a", 3)):
        assert bytes(with_disk.memories[0].host_block(fetch.slots[place])) == content(name)
        assert fetch.digest(place) == digest(content(name))
    fetch.release([2, 1, 0])
    with_disk.tiers.status.check()


def test_the_speed_of_reads_is_known_once_something_was_read(with_disk: Bed) -> None:
    with_disk.push_to_disk("a", 3)
    assert with_disk.tiers.status.read_speed(Tier.DISK).bytes_per_s is None

    with_disk.fetch("a", 3)
    with_disk.settle_and_tell()

    assert with_disk.tiers.status.read_speed(Tier.DISK).bytes_per_s is not None
    assert with_disk.tiers.status.queued_read_bytes(Tier.DISK) == 0


def test_a_fetch_released_before_its_read_is_begun_or_done_is_told_nothing(with_disk: Bed) -> None:
    with_disk.push_to_disk("a", 3)

    fetch = with_disk.tiers.fetch(0, with_disk.blocks("a", 3), with_disk.on_fetched)
    fetch.release([2, 1, 0])
    with_disk.settle()

    assert with_disk.told == []
    assert (fetch.slots == ABSENT).all()
    with_disk.tiers.status.check()


def test_a_record_that_is_gone_is_a_block_that_never_comes(with_disk: Bed) -> None:
    with_disk.push_to_disk("a", 3)
    assert with_disk.store is not None
    with_disk.store.delete(list(with_disk.store.keys()))

    fetch = with_disk.fetch("a", 3)

    assert set(fetch.failures.values()) == {Reason.EVICTED_FROM_DISK}
    assert with_disk.find("a", 3) == [NOWHERE] * 3
    told = {name for _ in range(40) for lost in with_disk.tiers.pop_lost() for name in lost.names}
    assert set(with_disk.names("a", 3)) <= told


def test_a_fetch_whose_time_is_over_is_told_so_and_the_disk_is_left_alone(with_disk: Bed) -> None:
    with_disk.push_to_disk("a", 3)
    fetch = with_disk.tiers.fetch(0, with_disk.blocks("a", 3), with_disk.on_fetched)
    for _ in range(40):  # nothing comes back from the reader
        with_disk.transfers.poll()
        with_disk.tiers.poll()
    assert with_disk.told == []

    fetch.time_out()
    for _ in range(40):
        with_disk.tiers.poll()

    assert [reason for _, _, reason in with_disk.told] == [Reason.DEADLINE] * 3
    assert not with_disk.tiers.status.is_readable
    fetch.release([2, 1, 0])
    with_disk.settle()
    with_disk.tiers.status.check()


def test_what_may_come_later_is_read_when_nothing_more_urgent_is(bed: MakeBed) -> None:
    lower = bed("host and disk")
    lower.push_to_disk("a", 2)
    lower.push_to_disk("b", 2)
    slots = lower.reserve(NUM_SLOTS)  # until there is room nothing is read

    later = lower.tiers.fetch(0, lower.blocks("a", 2), lower.on_fetched, priority=ReadPriority.LATER)
    now = lower.tiers.fetch(0, lower.blocks("b", 2), lower.on_fetched)
    lower.tiers.abandon(0, np.array(slots, np.intp))
    lower.tiers.poll()

    lower.settle()

    assert [each for each, _, _ in lower.told] == [now, now, later, later]


def test_a_dying_process_below_fails_what_it_was_asked_and_comes_back_empty(bed: MakeBed) -> None:
    lower = bed("unreliable")
    assert isinstance(lower.tiers, UnreliableTiers)
    lower.put("a", 3)
    held = lower.fetch("a", 2)
    epoch, slots = lower.tiers.status.epoch, held.slots.tolist()
    asked = lower.tiers.fetch(0, lower.blocks("b", 2), lower.on_fetched)

    lower.tiers.die()
    lower.settle()

    assert set(asked.failures) == {0, 1}
    assert lower.tiers.status.epoch > epoch
    assert lower.find("a", 3) == [NOWHERE] * 3
    assert lower.tiers.reserve(0, 1) == []
    for slot, name in zip(slots, lower.names("a", 2), strict=True):  # what was leased is still there
        assert bytes(lower.memories[0].host_block(slot)) == content(name)
    held.release([1, 0])
    lower.settle()
    assert lower.tiers.is_alive
    assert len(lower.reserve(NUM_SLOTS)) == NUM_SLOTS


def test_a_sidecar_that_is_killed_fails_what_it_was_asked_and_the_next_one_is_attached_to_when_all_is_let_go(
    bed: MakeBed,
) -> None:
    lower = bed("sidecar and disk")
    assert isinstance(lower.tiers, SteppedTiers)
    sidecar = lower.tiers.bed
    lower.push_to_disk("a", 2)
    lower.put("b", 3)
    held = lower.fetch("b", 2)
    slots, epoch, changes = held.slots.tolist(), lower.tiers.status.epoch, lower.tiers.status.num_changes
    asked = lower.tiers.fetch(0, lower.blocks("c", 2), lower.on_fetched)

    sidecar.die()
    lower.settle()

    assert set(asked.failures.values()) == {Reason.FAILED}
    assert lower.find("b", 3) == [NOWHERE] * 3
    assert lower.tiers.status.epoch > epoch
    assert lower.tiers.status.num_changes > changes
    assert lower.tiers.reserve(0, 1) == []
    assert not lower.tiers.status.is_readable
    sidecar.start()
    lower.settle()
    assert not lower.tiers.is_attached  # what is leased is the memory of the one before
    for slot, name in zip(slots, lower.names("b", 2), strict=True):
        assert bytes(lower.memories[0].host_block(slot)) == content(name)
    held.release([1, 0])
    lower.settle()
    assert lower.tiers.is_attached
    assert lower.tiers.standing().num_attached == 2
    assert lower.find("a", 2) == [ON_DISK] * 2
    fetch = lower.fetch("a", 2)
    assert (fetch.slots != ABSENT).all()
    fetch.release([1, 0])
    lower.tiers.status.check()
    sidecar.check()


def test_a_sidecar_that_is_stopped_is_left_alone_until_it_goes_on(bed: MakeBed) -> None:
    lower = bed("sidecar")
    assert isinstance(lower.tiers, SteppedTiers)
    lower.put("a", 3)

    lower.tiers.bed.is_stopped = True
    fetch = lower.tiers.fetch(0, lower.blocks("a", 3), lower.on_fetched)
    for _ in range(100):
        lower.clock.now += 0.05
        lower.tiers.poll()

    assert [reason for _, _, reason in lower.told] == [Reason.DEADLINE] * 3
    assert lower.find("a", 3) == [NOWHERE] * 3
    assert lower.tiers.reserve(0, 1) == []
    fetch.release([2, 1, 0])
    lower.tiers.bed.is_stopped = False
    lower.settle()
    assert NOWHERE not in lower.find("a", 3)
    assert lower.tiers.standing().num_attached == 1
    assert len(lower.reserve(NUM_SLOTS)) == NUM_SLOTS  # what was asked for while it was stopped is free again
    lower.tiers.status.check()
    lower.tiers.bed.check()


def test_a_sidecars_answer_to_what_was_released_meanwhile_is_no_lease(bed: MakeBed) -> None:
    lower = bed("sidecar")
    assert isinstance(lower.tiers, SteppedTiers)
    lower.put("a", 3)
    fetch = lower.tiers.fetch(0, lower.blocks("a", 3), lower.on_fetched)
    lower.tiers.bed.turn()

    fetch.release([2, 1])
    lower.settle()

    assert lower.told == [(fetch, 0, None)]
    assert (fetch.slots[1:] == ABSENT).all()
    fetch.release([0])
    lower.settle()
    assert len(lower.reserve(NUM_SLOTS)) == NUM_SLOTS
    lower.tiers.status.check()
    lower.tiers.bed.check()


def test_a_speed_that_is_told_again_and_again_is_as_old_as_it_was(bed: MakeBed) -> None:
    lower = bed("sidecar and disk")
    lower.push_to_disk("a", 3)
    lower.fetch("a", 3).release([2, 1, 0])
    lower.settle_and_tell()
    measured_at = lower.tiers.status.read_speed(Tier.DISK).measured_at

    for _ in range(10):
        lower.settle_and_tell()

    assert lower.tiers.status.read_speed(Tier.DISK).measured_at == measured_at


def test_slots_that_lay_ready_when_all_was_cleared_are_of_use_after_it(bed: MakeBed) -> None:
    lower = bed("sidecar")
    lower.tiers.reserve(0, 3)
    lower.settle()

    assert lower.tiers.clear()
    lower.put("a", 3)

    assert NOWHERE not in lower.find("a", 3)
    lower.tiers.status.check()


@pytest.mark.parametrize(
    "message",
    [
        InHost(7, bytes(32), packed([0])),
        InHost(-1, bytes(32), packed([0])),
        InHost(0, bytes(32), packed([NUM_SLOTS])),
        InHost(0, bytes(32), b""),
        LeftDisk(2, bytes(32)),
        Reserved(0, 1, packed([NUM_SLOTS])),
        Fetched(0, packed([0]), packed([NUM_SLOTS]), bytes(16), bytes(8), []),
        Fetched(0, b"", b"", b"", b"", [(9, Reason.FAILED)]),
    ],
    ids=lambda message: f"{type(message).__name__}",
)
def test_a_sidecar_that_says_what_none_says_is_left_and_attached_to_anew(message: FromSidecar, bed: MakeBed) -> None:
    lower = bed("sidecar")
    assert isinstance(lower.tiers, SteppedTiers)
    sidecar = lower.tiers.bed
    lower.put("a", 3)
    sidecar.is_stopped = True  # what was asked is open
    fetch = lower.tiers.fetch(0, lower.blocks("a", 3), lower.on_fetched)

    sidecar.port.send(sidecar.port.clients[0], frame_of(message))
    lower.settle()
    sidecar.is_stopped = False
    lower.settle()

    assert [reason for _, _, reason in lower.told] == [Reason.FAILED] * 3
    fetch.release([2, 1, 0])
    lower.settle()
    assert lower.tiers.standing().num_attached == 2
    assert NOWHERE not in lower.find("a", 3)
    lower.tiers.status.check()
