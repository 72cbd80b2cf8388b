"""Blocks are compared with their digests, and copied to the device after that: nothing changes them in between."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from attached_bed import SidecarBed, SteppedTiers, attached_memory
from chaos import FakeClock

from kvtier.sidecar.own.block_layout import BlockShape
from kvtier.sidecar.port import STUCK_S
from kvtier.store.record import digest
from kvtier.tiers.device.eviction_order import NamedSpan
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.up.uploads import upload_blocks
from kvtier.transfer.attached_memory import AttachedMemory
from kvtier.transfer.delegating_memory import DelegatingMemory
from kvtier.transfer.lane import Finished, InlineLane
from kvtier.transfer.transfer_engine import Route, TransferEngine

BLOCK_BYTES = 64
NUM_SLOTS = 256
BLOCKS = 16  # of a document


def transfers() -> TransferEngine:
    finished = Finished()
    return TransferEngine({route: InlineLane(finished) for route in Route}, finished)


def names_of(document: int) -> list[BlockName]:
    return [BlockName(digest(bytes([document >> 8, document & 255, i])) * 2) for i in range(BLOCKS)]


def content(name: BlockName) -> bytes:
    return name * (BLOCK_BYTES // len(name))


class Engine:
    """One with as many device slots as a document has blocks."""

    def __init__(self, bed: SidecarBed, clock: FakeClock) -> None:
        self.device = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
        self.memory = attached_memory(self.device)
        self.tiers = SteppedTiers(bed, [FullAttention(16)], [self.memory], transfers(), clock)
        self.listen()

    def listen(self) -> None:
        self.tiers.stir()
        while not self.tiers.is_quiet:
            self.tiers.poll()

    def store(self, document: int) -> None:
        names = names_of(document)[::-1]
        slots: list[int] = []
        while len(slots) < BLOCKS:
            slots += self.tiers.reserve(0, BLOCKS - len(slots))
            self.listen()
        for slot, name in zip(slots, names, strict=True):
            self.memory.host_block(slot)[:] = content(name)
        rows, owners = [NamedSpan(0, BLOCKS, names, None)], np.zeros(BLOCKS, np.uint64)
        self.tiers.publish(0, np.array(slots, np.intp), rows, [digest(content(name)) for name in names], owners)
        self.listen()


class StoppedMemory(DelegatingMemory):
    """A memory whose thread is stopped between comparing and copying."""

    def __init__(self, memory: AttachedMemory, meanwhile: Callable[[], None]) -> None:
        super().__init__(memory)
        self._meanwhile = meanwhile

    def to_device(self, host_slots: Sequence[int], device_slots: Sequence[int]) -> None:
        self._meanwhile()
        super().to_device(host_slots, device_slots)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def bed(clock: FakeClock) -> Iterator[SidecarBed]:
    num_bytes = NUM_SLOTS * BLOCK_BYTES
    bed = SidecarBed([BlockShape(16, False, BLOCK_BYTES)], num_bytes, num_bytes // 4, None, clock, transfers)
    yield bed
    bed.close()


def test_what_was_compared_is_copied_although_the_engine_was_stopped_in_between(
    bed: SidecarBed, clock: FakeClock
) -> None:
    stopped = Engine(bed, clock)
    (client,) = bed.port.clients
    other = Engine(bed, clock)
    other.store(0)
    stopped.listen()
    names = names_of(0)
    fetch = stopped.tiers.fetch(0, NamedBlocks(names, [None, *names[:-1]], b""), lambda fetch, place, failure: None)
    stopped.listen()
    slots, digests = fetch.slots.tolist(), [fetch.digest(place) for place in range(BLOCKS)]

    def others_go_on() -> None:
        document = 0
        while client.is_open:
            document += 1
            other.store(document)
            assert document < 10_000
            if client.unread:
                clock.now += STUCK_S + 1
                other.listen()
        stopped.listen()  # it finds out that its session has ended, and still copies
        assert not stopped.tiers.is_attached
        for more in range(2 * NUM_SLOTS // BLOCKS):
            other.store(document + 1 + more)

    memory = StoppedMemory(stopped.memory, others_go_on)
    are_good = upload_blocks(memory, slots, digests, range(BLOCKS))

    assert are_good == [True] * BLOCKS
    assert [bytes(block) for block in stopped.device] == [content(name) for name in names]
    fetch.release(range(BLOCKS))
    stopped.listen()
    assert stopped.tiers.standing().num_attached == 2
    for engine in (stopped, other):
        engine.tiers.close()
        engine.memory.close()
