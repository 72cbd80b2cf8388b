"""A load of the vLLM connector: only what has come and is verified counts, and every lease ends."""

from collections.abc import Sequence
from hashlib import sha256
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
from vllm_connector_bed import BLOCK, FULL, InlineThreads

from kvtier.connectors.vllm_connector.digests import Digests
from kvtier.connectors.vllm_connector.load import Load, Where
from kvtier.connectors.vllm_connector.names import NO_ADAPTER, RequestNames
from kvtier.store.record import digest
from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.lower.lower_tiers import NOWHERE, OnFetched
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.groups import AttentionGroup, FullAttention, SlidingWindow
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.naming.tier import Reason
from kvtier.transfer.block_memory import CpuMemory

NUM_BLOCKS = 40
NUM_TOKENS = NUM_BLOCKS * BLOCK
BLOCK_BYTES = 64
WINDOW = SlidingWindow(BLOCK, 3 * BLOCK + 1)


class Fetched:
    """A fetch of which the test says what comes, and when."""

    def __init__(self, below: "Below", group_id: int, blocks: NamedBlocks, on_fetched: OnFetched) -> None:
        self.group_id = group_id
        self.names = blocks.names
        self.slots = np.array([below.slot_of(name) for name in blocks.names], np.int32)
        self.failures: dict[int, Reason] = {}
        self.leased = {place for place in range(len(self.slots)) if self.slots[place] != ABSENT}
        self._below = below
        self._tell = on_fetched

    def come(self, place: int, failure: Reason | None = None) -> None:
        """Have one block come, or fail."""
        if failure is None:
            self.slots[place] = self._below.number_of(self.names[place])
            self.leased.add(place)
        self._tell(self, place, failure)

    def digest(self, place: int) -> bytes:
        return self._below.digests[self.group_id][self.slots[place]]

    def tenant(self, place: int) -> bytes:
        return b""

    def release(self, places: Sequence[int] | npt.NDArray[np.int64]) -> None:
        self.slots[list(places)] = ABSENT
        self.leased.difference_update(int(place) for place in places)

    def time_out(self) -> None: ...


class Below:
    """Host memory that has a prompt's blocks: block i in slot i, but those that have still to come."""

    def __init__(self, groups: Sequence[AttentionGroup], coming: Sequence[int], failed: Sequence[int] = ()) -> None:
        request = SimpleNamespace(block_hashes=[sha256(b"%d" % number).digest() for number in range(NUM_BLOCKS)])
        self.names = RequestNames(request, NO_ADAPTER, BLOCK)  # type: ignore[arg-type]  # as much of it as is read
        self.groups = groups
        self.memories = [CpuMemory(np.empty((0, BLOCK_BYTES), np.uint8), NUM_BLOCKS) for _ in groups]
        self.digests = []
        for group_id, memory in enumerate(self.memories):
            for slot in range(NUM_BLOCKS):
                memory.host_block(slot)[:] = bytes([group_id + 1, slot]) * (BLOCK_BYTES // 2)
            self.digests.append([digest(memory.host_block(slot)) for slot in range(NUM_BLOCKS)])
        self.fetches: list[Fetched] = []
        self.forgotten: list[tuple[int, BlockName]] = []
        self.num_corrupt = 0
        self.threads = InlineThreads()
        self._coming, self._failed = coming, failed

    def number_of(self, name: BlockName) -> int:
        return list(self.names.of(BLOCK, 0, NUM_BLOCKS)).index(name)

    def slot_of(self, name: BlockName) -> int:
        number = self.number_of(name)
        return ABSENT if number in (*self._coming, *self._failed) else number

    def find(self, group_id: int, names: Sequence[BlockName]) -> npt.NDArray[np.int32]:
        return np.full(len(names), NOWHERE, np.int32)

    def fetch(self, group_id: int, blocks: NamedBlocks, on_fetched: OnFetched) -> Fetched:
        fetch = Fetched(self, group_id, blocks, on_fetched)
        numbers = [self.number_of(name) for name in blocks.names]
        fetch.failures = {place: Reason.FAILED for place, number in enumerate(numbers) if number in self._failed}
        self.fetches.append(fetch)
        return fetch

    def forget(self, group_id: int, names: Sequence[BlockName]) -> None:
        self.forgotten += [(group_id, name) for name in names]

    def on_corrupt(self) -> None:
        self.num_corrupt += 1

    def load(self, start: int = 0, end: int = NUM_TOKENS) -> Load:
        digests = Digests(self.threads, lambda tell: tell())
        where = Where(self, self.groups, self.memories, digests, self.on_corrupt)  # type: ignore[arg-type]
        return Load(where, self.names, b"", start, end)

    @property
    def num_leased(self) -> int:
        return sum(len(fetch.leased) for fetch in self.fetches)


def below(groups: Sequence[AttentionGroup] = FULL, coming: Sequence[int] = (), failed: Sequence[int] = ()) -> Below:
    return Below(groups, coming, failed)


def test_what_is_in_host_memory_is_good_once_its_digests_have_been_taken() -> None:
    tiers = below()
    tiers.threads.is_held = True
    load = tiers.load()
    assert not load.is_done
    assert load.num_tokens == 0
    assert load.slots_of(0, range(3)) == [None] * 3

    tiers.threads.go_on()

    assert load.is_done
    assert load.num_tokens == NUM_TOKENS
    assert load.slots_of(0, range(NUM_BLOCKS)) == list(range(NUM_BLOCKS))
    assert tiers.num_corrupt == 0


def test_what_has_still_to_come_is_waited_for_and_verified_when_it_has() -> None:
    tiers = below(coming=[7, 9])
    load = tiers.load()
    assert not load.is_done
    assert load.num_tokens == 7 * BLOCK

    tiers.fetches[0].come(7)
    assert load.num_tokens == 7 * BLOCK
    load.poll()
    assert load.num_tokens == 9 * BLOCK
    assert not load.is_done

    tiers.fetches[0].come(9, Reason.DEADLINE)

    assert load.is_done
    assert load.num_tokens == 9 * BLOCK
    assert load.slots_of(0, [8, 9, 10]) == [8, None, 10]


def test_what_has_failed_at_once_is_not_waited_for() -> None:
    load = below(failed=[5]).load()

    assert load.is_done
    assert load.num_tokens == 5 * BLOCK


def test_a_block_with_other_bytes_is_a_hole_is_forgotten_and_leases_nothing() -> None:
    tiers = below()
    tiers.memories[0].host_block(35)[:] = bytes(BLOCK_BYTES)
    load = tiers.load()

    assert load.num_tokens == 35 * BLOCK
    assert tiers.num_corrupt == 1
    assert tiers.forgotten == [(0, tiers.names.of(BLOCK, 35, 36)[0])]
    assert tiers.fetches[0].leased == set(range(NUM_BLOCKS)) - {35}


def test_a_block_whose_digest_could_not_be_taken_is_a_hole_and_is_not_called_damaged() -> None:
    tiers = below()
    tiers.memories[0].host_block = lambda slot: 1 / 0  # type: ignore[assignment]
    load = tiers.load()

    assert load.is_done
    assert load.num_tokens == 0
    assert (tiers.num_corrupt, tiers.forgotten, tiers.num_leased) == (0, [], 0)


def test_a_load_asks_for_nothing_that_the_device_has() -> None:
    tiers = below((FullAttention(BLOCK), WINDOW))
    load = tiers.load(start=30 * BLOCK)

    assert [len(fetch.names) for fetch in tiers.fetches] == [10, 3]
    assert load.num_tokens == NUM_TOKENS
    assert load.slots_of(0, [0, 29, 30, 39]) == [None, None, 30, 39]
    assert load.slots_of(1, [36, 37, 39]) == [None, 37, 39]


def test_where_a_window_is_not_whole_nothing_shorter_is_either() -> None:
    tiers = below((FullAttention(BLOCK), WINDOW), failed=[37])
    load = tiers.load(start=8 * BLOCK)

    assert load.is_done
    assert load.num_tokens == 8 * BLOCK


def test_released_is_released_whatever_comes_later() -> None:
    tiers = below(coming=[7, 8])
    tiers.threads.is_held = True
    load = tiers.load()
    tiers.fetches[0].come(7)

    load.release()
    load.poll()
    tiers.threads.go_on()
    tiers.fetches[0].come(8)  # what was on its way when it was released
    load.poll()

    assert load.is_done
    assert load.num_tokens == 0
    assert load.slots_of(0, range(NUM_BLOCKS)) == [None] * NUM_BLOCKS
    assert tiers.fetches[0].leased <= {8}
    assert tiers.num_corrupt == 0


def test_a_digest_of_slots_that_were_released_is_not_asked_for() -> None:
    tiers = below(coming=[7])
    load = tiers.load()
    tiers.fetches[0].come(7)
    seen: list[int] = []
    tiers.memories[0].host_block = lambda slot: seen.append(slot) or memoryview(b"")  # type: ignore[assignment, func-returns-value]

    load.release()
    load.poll()

    assert seen == []


@pytest.mark.parametrize("is_held", [False, True])
def test_every_lease_ends_with_the_release(is_held: bool) -> None:
    tiers = below((FullAttention(BLOCK), WINDOW), coming=[38])
    tiers.threads.is_held = is_held
    load = tiers.load()

    load.release()
    tiers.threads.go_on()

    assert tiers.num_leased == 0
