import random
import tracemalloc
from collections.abc import Sequence

import pytest

from kvtier.tiers.device.block_pool import MAX_IN_ONE, SlotIndex
from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.naming.block_hash import BlockName


@pytest.mark.parametrize("num_slots", [1000, MAX_IN_ONE + 1, 1_000_000])
def test_an_index_agrees_with_a_dict_whatever_comes_and_goes(num_slots: int) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    known = [BlockName(rng.randbytes(32)) for _ in range(1000)] + [BlockName(b"short"), BlockName(b"a")]
    index, model = SlotIndex(num_slots), dict[BlockName, int]()
    for _ in range(300):
        names: Sequence[BlockName] = rng.sample(known, rng.choice([0, 1, 2, 50]))
        action = rng.random()
        if action < 0.5:
            slots = [rng.randrange(num_slots) for _ in names]
            expected = [model.setdefault(name, slot) for name, slot in zip(names, slots, strict=True)]
            if len(names) == 1:
                assert [index.give(names[0], slots[0])] == expected
            else:
                assert index.give_all(names, slots) == expected
        else:
            here = [name for name in names if name in model]
            index.remove_all(here)
            for name in here:
                del model[name]
        asked = rng.sample(known, 20)
        assert index.get_all(asked, ABSENT) == [model.get(name, ABSENT) for name in asked]
        assert [index.get(name) for name in asked] == [model.get(name) for name in asked]
        assert index.has_none(asked) == model.keys().isdisjoint(asked)
        assert index.get(BlockName(b"")) is None
        assert len(index) == len(model)
    assert dict(index.items()) == model


def test_what_is_made_anew_at_once_stays_small_in_a_large_pool() -> None:
    rng = random.Random(1)
    index = SlotIndex(1_000_000)

    index.give_all([BlockName(rng.randbytes(32)) for _ in range(200_000)], range(200_000))

    assert index.max_in_one < 200_000 / 100


@pytest.mark.parametrize("num_slots", [100_000, 150_000])
def test_the_dicts_of_a_large_pool_stay_small_when_other_names_take_the_place_of_all(num_slots: int) -> None:
    rng = random.Random(1)
    slots = list(range(num_slots))
    names = [BlockName(rng.randbytes(32)) for _ in range(3 * num_slots)]
    tracemalloc.start()
    index = SlotIndex(num_slots)
    index.give_all(names[:num_slots], slots)
    for start in range(0, 2 * num_slots, 500):
        index.remove_all(names[start : start + 500])
        index.give_all(names[start + num_slots : start + num_slots + 500], slots[start % num_slots :][:500])
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert len(index) == num_slots
    assert num_bytes / num_slots < 64  # of which an entry of a dict takes 24, if the dict is full
