import random
from collections.abc import Iterator, Sequence

import pytest

from kvtier.tiers.device.block_pool import LARGE, BlockPool
from kvtier.tiers.device.name_table import NUM_ROUNDS, PART, NameTable
from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.naming.block_hash import BlockName


@pytest.mark.parametrize("num_slots", [70, 700])
def test_a_table_agrees_with_a_dict_whatever_comes_and_goes(num_slots: int) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    known = [BlockName(rng.randbytes(32)) for _ in range(2 * num_slots)] + [BlockName(b"short"), BlockName(b"a")]
    table, model, free = NameTable(num_slots), dict[BlockName, int](), set(range(num_slots))
    for _ in range(600):
        names: Sequence[BlockName] = rng.sample(known, rng.choice([0, 1, 2, 50, len(known)]))
        if rng.random() < 0.5:
            names = names[: len(free)]
            slots = rng.sample(sorted(free), len(names))
            expected = [model.setdefault(name, slot) for name, slot in zip(names, slots, strict=True)]
            if len(names) == 1:
                assert [table.give(names[0], slots[0])] == expected
            else:
                assert list(table.give_all(names, slots)) == expected
            free -= set(model.values())
        elif rng.random() < 0.9:
            gone = [model.pop(name) for name in names if name in model]
            table.remove_all(gone)
            free.update(gone)
        else:
            table.clear()
            model.clear()
            free.update(range(num_slots))
        asked = rng.sample(known, 60)
        assert table.get_all(asked, ABSENT).tolist() == [model.get(name, ABSENT) for name in asked]
        assert [table.get(name) for name in asked] == [model.get(name) for name in asked]
        assert table.has_none(asked) == model.keys().isdisjoint(asked)
        assert table.get(BlockName(b"")) is None
        assert len(table) == len(model)
        assert dict(table.items()) == model


@pytest.mark.parametrize("num_equal", [4, 8, 28])  # bytes: the bucket; the whole mark; more than both
@pytest.mark.parametrize("num_names", [5, 100])
def test_names_that_begin_with_the_same_bytes_are_told_apart(num_equal: int, num_names: int) -> None:
    rng = random.Random(1)
    names = [BlockName(bytes(num_equal) + rng.randbytes(32 - num_equal)) for _ in range(num_names)]
    table = NameTable(1000)

    assert table.give_all(names, range(num_names)) == list(range(num_names))

    assert [table.get(name) for name in names] == list(range(num_names))
    assert table.get_all(names, ABSENT).tolist() == list(range(num_names))
    assert table.has_none([BlockName(bytes(num_equal) + rng.randbytes(32 - num_equal)) for _ in range(50)])
    table.remove_all(range(num_names - 1))
    assert dict(table.items()) == {names[-1]: num_names - 1}


def test_of_equal_names_in_one_call_one_gets_its_slot() -> None:
    rng = random.Random(1)
    names = [BlockName(rng.randbytes(32)) for _ in range(50)]
    table = NameTable(1000)

    holders = table.give_all([*names, names[7]], range(51))

    assert holders[7] == holders[50] == table.get(names[7])
    assert len(table) == 50


def test_a_table_can_be_cleared_any_number_of_times() -> None:
    rng = random.Random(1)
    table = NameTable(300)
    before: list[BlockName] = []
    for _ in range(2 * NUM_ROUNDS + 2):
        names = [BlockName(rng.randbytes(32)) for _ in range(300)]
        assert table.give_all(names, range(300)) == list(range(300))
        assert table.has_none(before)
        table.clear()
        assert len(table) == 0
        assert table.has_none(names)
        before = names


def test_clearing_returns_the_names_in_parts_while_others_take_their_slots() -> None:
    rng = random.Random(1)
    first, second = ([BlockName(rng.randbytes(32)) for _ in range(3000)] + [BlockName(b"short")] for _ in range(2))
    table = NameTable(4000)
    table.give_all(first[:-1], range(3000))
    table.give(first[-1], 3000)
    table.remove_all(range(100))

    removed: Iterator[list[BlockName]] = table.clear()
    table.give_all(second[:-1], range(3000))
    parts = list(removed)

    assert sorted(name for part in parts for name in part) == sorted(first[100:])
    assert max(map(len, parts)) <= 256
    assert table.get_all(second[:-1], ABSENT).tolist() == list(range(3000))


def test_clearing_looks_through_slots_without_names_in_parts_too() -> None:
    table = NameTable(100 * PART)
    table.give(BlockName(b"n" * 32), 99 * PART)

    parts = list(table.clear())

    assert len(parts) >= 100
    assert sum(map(len, parts)) == 1


def test_a_large_pool_finds_its_blocks_after_evictions_and_a_clear() -> None:
    rng = random.Random(1)
    pool = BlockPool(LARGE)
    names = [BlockName(rng.randbytes(32)) for _ in range(LARGE + 1000)]
    for start in range(0, len(names), 8000):
        some = names[start : start + 8000]
        slots = pool.allocate(len(some)) or []
        assert not pool.commit(slots, some)
        pool.release(slots[::-1])

    assert pool.num_named == LARGE
    kept = names[-LARGE + 8000 :]
    assert (pool.find_all(kept) != ABSENT).all()
    assert [pool.name(slot) for slot in pool.find_all(kept[:500]).tolist()] == kept[:500]

    cleared = pool.clear()
    assert pool.has_none(names)
    slots = pool.allocate(300) or []
    pool.commit(slots, names[:300])
    num_freed = 0
    while (part := cleared.pop()) is not None:
        num_freed += len(part)
    assert num_freed == LARGE
    assert pool.find_all(names[:300]).tolist() == slots
