"""Layouts: chunks of several layouts share one segment and one store, and memory follows use."""

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from layout_bed import EXTENT_BYTES, LayoutBed, layout

from kvtier.sidecar.layout import LayoutRefused
from kvtier.sidecar.lmcache import chunk_part
from kvtier.sidecar.lmcache.chunk_layout import ChunkLayout
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.lower.lower_tiers import Fetch
from kvtier.tiers.naming.tier import EvictionCause

PER_EXTENT = EXTENT_BYTES // 4096  # chunks of 4 KiB


@pytest.fixture
def bed() -> Iterator[LayoutBed]:
    made = LayoutBed(Path("/dev/shm"))
    yield made
    made.layouts.check()
    made.close()


@pytest.fixture
def with_disk() -> Iterator[LayoutBed]:
    made = LayoutBed(Path("/dev/shm"), store=MemoryStore(1 << 20))
    yield made
    made.layouts.check()
    made.close()


def test_equal_layouts_are_one_and_any_difference_is_another(bed: LayoutBed) -> None:
    one = bed.layouts.open(layout())

    assert bed.layouts.open(layout()) is one
    assert len({layout().digest, layout(width=128).digest, layout("n").digest, layout(world_size=2).digest}) == 4


def test_chunks_are_where_their_offset_says_page_by_page_and_inside_the_segment(bed: LayoutBed) -> None:
    tiers = bed.layouts.open(layout(width=300))
    memory = tiers.memories[0]

    slots = tiers.reserve(0, 20)

    spans = sorted((memory.offset(slot), memory.offset(slot) + memory.block_bytes) for slot in slots)
    assert len(slots) == 20
    assert all(start % 4096 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] <= bed.segment.num_bytes
    memory.host_block(slots[3])[:] = b"x" * memory.block_bytes
    offset = memory.offset(slots[3])
    assert bytes(bed.segment.memory[offset : offset + memory.block_bytes]) == b"x" * memory.block_bytes
    tiers.tiers.abandon(0, np.array(slots, np.intp))


def test_a_layout_has_no_memory_before_it_stores_and_then_as_much_as_it_needs(bed: LayoutBed) -> None:
    tiers = bed.layouts.open(layout())
    assert tiers.held_bytes == 0

    bed.put(tiers, 1, 1)
    assert bed.held([tiers]) == [1]
    bed.put(tiers, 2, PER_EXTENT)
    assert bed.held([tiers]) == [2]


def test_who_needs_room_gets_the_extent_that_was_used_least_lately(bed: LayoutBed) -> None:
    old, used, new = (bed.layouts.open(layout(name)) for name in ("old", "used", "new"))
    bed.put(old, 1, 2 * PER_EXTENT)
    bed.put(used, 1, 2 * PER_EXTENT)
    bed.get(used, 1, 2 * PER_EXTENT)

    bed.put(new, 1, PER_EXTENT)

    assert bed.held([old, used, new]) == [1, 2, 1]
    assert bed.get(used, 1, 2 * PER_EXTENT) == list(range(2 * PER_EXTENT))
    assert bed.get(new, 1, PER_EXTENT) == list(range(PER_EXTENT))
    assert bed.get(old, 1, 2 * PER_EXTENT) != list(range(2 * PER_EXTENT))


def test_who_has_used_its_own_least_lately_evicts_its_own(bed: LayoutBed) -> None:
    greedy, other = bed.layouts.open(layout("greedy")), bed.layouts.open(layout("other"))
    bed.put(greedy, 1, 3 * PER_EXTENT)
    bed.put(other, 1, PER_EXTENT)

    for document in range(2, 5):
        bed.put(greedy, document, PER_EXTENT)

    assert bed.held([greedy, other]) == [3, 1]
    assert bed.get(other, 1, PER_EXTENT) == list(range(PER_EXTENT))


def test_an_extent_with_a_leased_chunk_is_not_taken(bed: LayoutBed) -> None:
    old, new = bed.layouts.open(layout("old")), bed.layouts.open(layout("new"))
    bed.put(old, 1, 4 * PER_EXTENT)
    fetch = bed.fetch(old, 1, 4 * PER_EXTENT)

    assert new.reserve(0, 1) == []

    bed.release(fetch)
    slots = new.reserve(0, 1)
    assert len(slots) == 1
    new.tiers.abandon(0, np.array(slots, np.intp))


def test_a_layout_without_memory_gets_an_extent_although_each_extent_has_a_lease_at_all_times(bed: LayoutBed) -> None:
    busy, new = bed.layouts.open(layout("busy")), bed.layouts.open(layout("new"))
    for document in range(4 * PER_EXTENT):
        bed.put(busy, document, 1)
    leased: list[Fetch] = []
    got: list[int] = []
    for turn in range(3 * PER_EXTENT):  # one chunk of each extent is leased, the next one before the last is released
        next_ones = [bed.fetch(busy, extent * PER_EXTENT + turn % PER_EXTENT, 1) for extent in range(4)]
        for fetch in leased:
            bed.release(fetch)
        leased = next_ones
        got = new.reserve(0, 1)
        if got:
            break

    assert len(got) == 1
    assert bed.held([busy, new]) == [3, 1]
    assert busy.num_leased == 3
    for fetch in leased:
        bed.release(fetch)
    assert len(bed.get(busy, 0, 1) + bed.get(busy, PER_EXTENT, 1) + bed.get(busy, 2 * PER_EXTENT, 1)) >= 2
    new.tiers.abandon(0, np.array(got, np.intp))


def test_an_extent_that_is_emptied_for_a_layout_is_kept_if_another_extent_is_free_before(bed: LayoutBed) -> None:
    busy, new = bed.layouts.open(layout("busy")), bed.layouts.open(layout("new"))
    for document in range(4 * PER_EXTENT):
        bed.put(busy, document, 1)
    more = [bed.fetch(busy, extent * PER_EXTENT + 1, 1) for extent in range(3)]
    held = [bed.fetch(busy, extent * PER_EXTENT, 1) for extent in range(4)]
    assert new.reserve(0, 1) == []
    bed.settle()
    assert busy.num_leased == 7
    idle = [bed.get(busy, extent * PER_EXTENT + 2, 1) for extent in range(4)]
    assert idle == [[0], [0], [0], []]  # the extent with the fewest leases is emptied, but for one slot
    for fetch in [held[1], more[1]]:
        bed.release(fetch)

    got = new.reserve(0, 1)

    assert len(got) == 1
    assert bed.held([busy, new]) == [3, 1]
    for fetch in [held[0], held[2], held[3], more[0], more[2]]:
        bed.release(fetch)
    assert busy.num_leased == 0
    slots = busy.reserve(0, 3 * PER_EXTENT)
    assert len(slots) == 3 * PER_EXTENT
    busy.tiers.abandon(0, np.array(slots, np.intp))
    new.tiers.abandon(0, np.array(got, np.intp))


def test_an_extent_goes_once_its_chunks_are_on_disk_and_as_many_come_back_as_there_is_memory_for(
    with_disk: LayoutBed,
) -> None:
    old, new = with_disk.layouts.open(layout("old")), with_disk.layouts.open(layout("new"))
    with_disk.put(old, 1, 4 * PER_EXTENT)
    with_disk.put(new, 1, 1)
    held = with_disk.fetch(new, 1, 1)

    assert with_disk.held([old, new]) == [3, 1]
    assert with_disk.get(old, 1, 4 * PER_EXTENT) == list(range(3 * PER_EXTENT))

    with_disk.release(held)
    assert with_disk.get(old, 1, 4 * PER_EXTENT) == list(range(4 * PER_EXTENT))
    assert with_disk.held([old, new]) == [4, 0]


def test_the_extent_that_is_taken_has_the_tail_of_a_document(bed: LayoutBed) -> None:
    old, new = bed.layouts.open(layout("old")), bed.layouts.open(layout("new"))
    bed.put(old, 1, 4 * PER_EXTENT)

    bed.put(new, 1, 1)

    assert bed.get(old, 1, 4 * PER_EXTENT) == list(range(3 * PER_EXTENT))


def test_what_one_layout_pushes_off_the_disk_the_others_do_not_find(with_disk: LayoutBed) -> None:
    one, other = with_disk.layouts.open(layout("one")), with_disk.layouts.open(layout("other"))
    with_disk.put(one, 1, PER_EXTENT)
    for document in range(2, 30):
        with_disk.put(other, document, PER_EXTENT)
        with_disk.get(other, document, PER_EXTENT)

    assert with_disk.get(one, 1, PER_EXTENT) == []
    names = with_disk.chain(one, 1, PER_EXTENT).names
    assert (one.tiers.find(0, names) == -1).all(), "it was not told"


def test_what_is_cleared_is_found_no_more_and_leaves_the_disk(with_disk: LayoutBed) -> None:
    tiers, other = with_disk.layouts.open(layout("m")), with_disk.layouts.open(layout("n"))
    with_disk.put(tiers, 1, PER_EXTENT)
    with_disk.put(other, 1, 2)
    fetch = with_disk.fetch(tiers, 1, 4)

    tiers.clear()

    assert with_disk.get(tiers, 1, PER_EXTENT) == []
    with_disk.settle()
    assert with_disk.store is not None
    assert all(key.startswith(other.layout.digest) for key in list(with_disk.store.keys()))  # no dict
    assert with_disk.get(other, 1, 2) == [0, 1]
    with_disk.release(fetch)
    with_disk.put(tiers, 1, 3)
    assert with_disk.get(tiers, 1, 3) == [0, 1, 2]


def test_what_is_cleared_is_remembered_with_its_tier_also_where_both_had_it(with_disk: LayoutBed) -> None:
    tiers = with_disk.layouts.open(layout("m"))
    for document in range(1, 8):
        with_disk.put(tiers, document, PER_EXTENT)
    held = [with_disk.chain(tiers, document, PER_EXTENT).names for document in range(1, 8)]
    places = [set(np.sign(tiers.tiers.find(0, names)).tolist()) for names in held]
    assert {frozenset(each) for each in places} >= {frozenset({1}), frozenset({-1})}, "not both tiers"

    tiers.clear()
    for _ in range(100):
        tiers.poll()

    for names in held:
        found = tiers.ghosts.find_all(names)
        assert {None if each is None else each.cause for each in found} == {EvictionCause.CLEARED}


def test_what_is_cleared_while_it_is_being_written_stays_gone(with_disk: LayoutBed) -> None:
    tiers = with_disk.layouts.open(layout())
    slots = tiers.reserve(0, 2)
    tiers.tiers.abandon(0, np.array(slots, np.intp))
    with_disk.put(tiers, 1, 2)
    tiers.tiers.forget_all()
    tiers.poll()

    with_disk.settle()

    assert with_disk.get(tiers, 1, 2) == []


def test_layouts_that_no_chunk_can_have_are_refused_in_a_sentence(bed: LayoutBed) -> None:
    with pytest.raises(LayoutRefused, match="dtype 'complex64' is not known; use one of bfloat16"):
        ChunkLayout("m", "", "complex64", 1, 1, 8, 4, 8, 8, 1)
    with pytest.raises(LayoutRefused, match="world_size is 65; at most 64"):
        layout(world_size=65)
    with pytest.raises(LayoutRefused, match="num_layers is 0"):
        ChunkLayout("m", "", "bfloat16", 1, 0, 8, 4, 8, 8, 1)
    with pytest.raises(LayoutRefused, match=r"an extent 65536; start the sidecar with fewer tokens"):
        bed.layouts.open(layout(width=1 << 16))


def test_chunks_so_small_that_their_books_are_large_are_refused(
    bed: LayoutBed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_part, "MAX_SLOTS", 4 * PER_EXTENT * 4)
    assert bed.layouts.open(layout(world_size=4))  # of four extents

    with pytest.raises(LayoutRefused, match=r"all ranks would have 320 slots .* more tokens in a chunk"):
        bed.layouts.open(layout(world_size=5))


@pytest.mark.parametrize("seed", range(6))
def test_random_use_never_gives_another_chunks_bytes_and_leaks_nothing(seed: int) -> None:
    rng = random.Random(seed)
    bed = LayoutBed(Path("/dev/shm"), num_extents=5, store=MemoryStore(rng.choice([1 << 18, 1 << 20])))
    kinds = [layout("a"), layout("b", width=512), layout("c", width=100, world_size=2), layout("d", width=1500)]
    all_tiers = [bed.layouts.open(kind) for kind in kinds]
    leased = []
    for _ in range(120):
        tiers = rng.choice(all_tiers)
        rank = rng.randrange(tiers.layout.world_size)
        document, num_chunks = rng.randrange(6), rng.randrange(1, 24)
        match rng.randrange(10):
            case 0 | 1 | 2 | 3:
                bed.put(tiers, document, num_chunks, rank)
            case 4 | 5 | 6:
                bed.get(tiers, document, num_chunks, rank)
            case 7:
                leased.append(bed.fetch(tiers, document, num_chunks, rank))
            case 8 if leased:
                bed.release(leased.pop(rng.randrange(len(leased))))
            case _:
                if rng.random() < 0.1:
                    tiers.clear()
        bed.layouts.check()

    for fetch in leased:
        bed.release(fetch)
    bed.settle()
    bed.layouts.check()
    for tiers in all_tiers:
        for rank in range(tiers.layout.world_size):
            elsewhere = tiers.memories[rank].num_host_slots - tiers.num_slots(rank)
            assert tiers.tiers.index.host[rank].pool.num_leases == elsewhere, f"seed {seed}: leases are left"
    bed.close()
