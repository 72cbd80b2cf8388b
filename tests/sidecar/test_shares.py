"""Shares: what one client may have leased of host memory beside the others."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from layout_bed import EXTENT_BYTES

from kvtier.sidecar.lease_ledger import new_ledger
from kvtier.sidecar.lmcache.chunk_part import ChunkMemory
from kvtier.sidecar.shares import Share, Shares, Wanted
from kvtier.tiers.lower.lower_tiers import NOWHERE, ON_DISK
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.transfer.segment import Segment

NUM_SLOTS = 64


class Client:
    """Something to compare."""


@pytest.fixture
def memory() -> Iterator[ChunkMemory]:
    with Segment(4 * EXTENT_BYTES, Path("/dev/shm")) as segment:
        yield ChunkMemory(segment, EXTENT_BYTES, EXTENT_BYTES // 16)


@pytest.fixture
def shares(memory: ChunkMemory) -> Iterator[Shares]:
    made = Shares(lambda: NUM_SLOTS * memory.slot_bytes, new_ledger(EXTENT_BYTES, 4))
    yield made
    made.check()


def new(num_chunks: int) -> np.ndarray:
    return np.full(num_chunks, NOWHERE)


def name(number: int) -> BlockName:
    return BlockName(number.to_bytes(32, "big"))


def take(share: Share, memory: ChunkMemory, free: list[int], num_chunks: int = NUM_SLOTS) -> Sequence[int]:
    """Lease what the share allows of the free slots; which."""
    num_taken = min(share.num_affordable([Wanted(memory, new(num_chunks))]), len(free))
    taken = [free.pop() for _ in range(num_taken)]
    share.lease(memory, np.array(taken, np.intp))
    return taken


def test_alone_a_client_may_have_nearly_all_and_the_next_ones_find_room(memory: ChunkMemory, shares: Shares) -> None:
    free = list(range(NUM_SLOTS))
    clients = [Client() for _ in range(4)]

    assert [len(take(shares.of(client), memory, free)) for client in clients] == [56, 7, 1, 0]
    assert len(take(shares.of(clients[0]), memory, free)) == 0


def test_greedy_clients_end_with_equal_parts(memory: ChunkMemory, shares: Shares) -> None:
    rng = random.Random(1)
    free, clients = list(range(NUM_SLOTS)), [Client() for _ in range(4)]
    held: list[list[int]] = [[] for _ in clients]
    seen = np.zeros(4)
    for step in range(4000):
        number = 0 if step < 50 else rng.randrange(4)  # one comes first, and takes what it can
        share = shares.of(clients[number])
        held[number] += take(share, memory, free, 4)
        if held[number] and rng.random() < 0.7:
            ended = held[number].pop(rng.randrange(len(held[number])))
            share.release(memory, np.array([ended]))
            free.append(ended)
        if step > 2000:
            seen += [len(slots) for slots in held]

    assert seen.min() / seen.max() > 0.8
    assert seen.sum() / 2000 > 0.8 * NUM_SLOTS


def test_what_a_client_has_leased_already_costs_it_nothing_more(memory: ChunkMemory, shares: Shares) -> None:
    client, slots = Client(), np.arange(56)
    for _ in range(3):
        assert shares.of(client).num_affordable([Wanted(memory, slots)]) == 56
        shares.of(client).lease(memory, slots)
    assert shares.of(client).num_bytes == 56 * memory.slot_bytes

    for _ in range(2):
        shares.of(client).release(memory, slots)
    assert shares.of(client).num_affordable([Wanted(memory, new(1))]) == 0
    shares.of(client).release(memory, slots)
    assert shares.num_free_bytes == NUM_SLOTS * memory.slot_bytes


def test_a_chunk_that_all_read_is_kept_once_and_counts_for_each(memory: ChunkMemory, shares: Shares) -> None:
    clients, slots = [Client() for _ in range(10)], np.arange(40)
    for client in clients:
        assert shares.of(client).num_affordable([Wanted(memory, slots)]) == 40
        shares.of(client).lease(memory, slots)

    assert shares.num_free_bytes == 24 * memory.slot_bytes
    assert {shares.of(client).num_bytes for client in clients} == {40 * memory.slot_bytes}
    shares.of(clients[0]).release(memory, slots)
    assert shares.num_free_bytes == 24 * memory.slot_bytes


def test_what_comes_from_disk_counts_from_the_moment_it_is_asked_for_and_once(
    memory: ChunkMemory, shares: Shares
) -> None:
    share, names = shares.of(client := Client()), [name(i) for i in range(56)]
    wanted = Wanted(memory, np.full(60, ON_DISK), [name(i) for i in range(60)])
    assert share.num_affordable([wanted]) == 56
    share.expect(memory, names)
    share.expect(memory, names[:8])

    assert share.num_affordable([wanted]) == 56
    assert share.num_affordable([Wanted(memory, np.full(1, ON_DISK), [name(99)])]) == 0
    assert shares.of(Client()).num_affordable([wanted]) == 7
    share.remove_pending(memory, names)
    assert share.num_bytes == 8 * memory.slot_bytes
    share.remove_pending(memory, names[:8])
    assert (share.num_bytes, shares.num_free_bytes) == (0, NUM_SLOTS * memory.slot_bytes)
    del client


def test_chunks_of_several_ranks_are_counted_together(memory: ChunkMemory, shares: Shares) -> None:
    assert shares.of(Client()).num_affordable([Wanted(memory, new(60))] * 2) == 28


def test_a_client_that_has_nothing_may_have_one_chunk_however_large(memory: ChunkMemory) -> None:
    shares = Shares(lambda: memory.slot_bytes, new_ledger(EXTENT_BYTES, 4))

    assert shares.of(Client()).num_affordable([Wanted(memory, new(3))]) == 1
    assert shares.of(Client()).num_affordable([Wanted(memory, new(0))]) == 0


def test_a_share_with_a_part_of_its_own_never_has_more(memory: ChunkMemory, shares: Shares) -> None:
    pins = Share(shares, part=0.25)

    assert pins.num_affordable([Wanted(memory, new(60))]) == 16
    pins.lease(memory, np.arange(16))
    assert pins.num_affordable([Wanted(memory, np.arange(10, 20))]) == 6
    pins.release(memory, np.arange(16))
