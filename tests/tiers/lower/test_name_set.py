import hashlib
import itertools
import random

import numpy as np
import pytest

from kvtier.tiers.device.eviction_order import BACK_BYTES, GrowingRows
from kvtier.tiers.lower.name_set import LONG, MEAN, NAME_BYTES, SCAN_BUCKETS, SPLIT_AT_ONCE, WIDTH, NameSet, rows_of
from kvtier.tiers.naming.block_hash import BlockName


def name(number: int) -> BlockName:
    return BlockName(hashlib.sha256(number.to_bytes(8, "big")).digest())


def alike(number: int) -> BlockName:
    """Names of one bucket: only their last bytes tell them apart."""
    return BlockName(bytes(NAME_BYTES - 2) + number.to_bytes(2, "big"))


def content(names: NameSet) -> set[BlockName]:
    listed = [name for page in names.pages(7) for name in page]
    assert len(listed) == len(set(listed)) == len(names)
    return set(listed)


def test_names_agree_with_a_plain_set_whatever_comes_and_goes() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    names, model = NameSet(), set[BlockName]()
    for step in range(400):
        make, limit = (alike, 100) if rng.random() < 0.2 else (name, 3000)
        some = [make(rng.randrange(limit)) for _ in range(rng.choice([0, 1, 5, 60, 300]))]
        action = rng.random()
        if action < 0.4:
            is_new = names.add(rows_of(some))
            assert {name for name, new in zip(some, is_new, strict=True) if new} == set(some) - model
            assert np.count_nonzero(is_new) == len(set(some) - model)
            model.update(some)
        elif action < 0.6:
            for one in some:
                assert names.add_one(one) == (one not in model)
                model.add(one)
        else:
            for one in some:
                assert names.discard(one) == (one in model)
                model.discard(one)
        asked = [name(rng.randrange(3000)) for _ in range(50)] + [alike(rng.randrange(100)) for _ in range(50)]
        assert names.holds(rows_of(asked)).tolist() == [one in model for one in asked]
        assert [one in names for one in asked] == [one in model for one in asked]
        assert len(names) == len(model)
        if step % 20 == 0:
            assert content(names) == model
    assert content(names) == model


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_last_first", [False, True])
def test_a_long_prompt_whose_names_came_and_went_in_rows_is_found_name_by_name(is_last_first: bool, seed: int) -> None:
    rng = random.Random(seed)
    names, there = NameSet(), set[BlockName]()
    prompts = [[name(3000 * prompt + number) for number in range(LONG + 500)] for prompt in range(3)]
    prompts[0][100:120] = map(alike, range(20))  # more than a bucket holds
    for prompt in prompts:
        ends = [0, *sorted(rng.sample(range(1, len(prompt)), 20)), len(prompt)]
        rows = [prompt[start:end] for start, end in itertools.pairwise(ends)]
        for row in [row[::-1] for row in rows[::-1]] if is_last_first else rows:
            names.add(rows_of(row))
            there.update(row)
        for going in rng.sample(range(len(prompt)), 3), range(400, 440):
            for one in going:
                assert names.discard(prompt[one])
                there.discard(prompt[one])
        for asked in prompts:
            assert names.holds(rows_of(asked)).tolist() == [one in there for one in asked]
    assert names.num_over


@pytest.mark.parametrize("seed", range(8))
def test_pages_have_all_that_stays_and_nothing_that_left_while_names_come_and_go(seed: int) -> None:
    rng = random.Random(seed)
    numbers = itertools.count()
    staying = {name(next(numbers)) for _ in range(800)} | {alike(number) for number in range(40)}
    names, there = NameSet(), set(staying)
    for one in rng.sample(sorted(staying), len(staying)):
        names.add_one(one)
    leaving = [alike(number) for number in range(100, 140)] + [name(next(numbers)) for _ in range(800)]
    names.add(rows_of(leaving))
    there.update(leaving)
    rng.shuffle(leaving)
    assert names.num_over

    found, num_pages, num_buckets = set[BlockName](), 0, names.num_buckets
    for page in names.pages(3):
        assert set(page) <= there
        found.update(page)
        num_pages += 1
        for _ in range(rng.choice([0, 0, 1])):
            new = [name(next(numbers)) for _ in range(rng.choice([1, 20]))]
            names.add(rows_of(new))
            there.update(new)
            if leaving:
                gone = leaving.pop()
                assert names.discard(gone)
                there.discard(gone)

    assert staying <= found
    assert names.num_buckets > 1.2 * num_buckets, "nothing was split meanwhile"
    assert num_pages > 150


def test_growing_is_done_in_parts() -> None:
    rng = np.random.default_rng(1)
    names = NameSet()
    max_split = max_bytes = 0
    for _ in range(2000):
        buckets, num_bytes = names.num_buckets, names.num_bytes
        names.add(rng.integers(1 << 63, size=(100, 4), dtype=np.uint64))
        max_split = max(max_split, names.num_buckets - buckets)
        max_bytes = max(max_bytes, names.num_bytes - num_bytes)

    assert len(names) == 200_000
    assert max_split <= 100 / MEAN + 1  # of 57,000 buckets in the end
    assert max_bytes <= 5 << 20
    buckets = names.num_buckets
    for number in range(1000):
        names.add_one(name(number))
        assert names.num_buckets - buckets <= SPLIT_AT_ONCE
        buckets = names.num_buckets


def test_few_names_are_not_in_their_bucket() -> None:
    rng = np.random.default_rng(1)
    names = NameSet()
    for _ in range(300):
        names.add(rng.integers(1 << 63, size=(1000, 4), dtype=np.uint64))
        assert names.num_over <= len(names) / 500 + 10


def test_names_that_all_want_one_bucket_are_found() -> None:
    names = NameSet()

    names.add(rows_of([alike(number) for number in range(5 * WIDTH)]))
    names.discard(alike(0))

    assert names.holds(rows_of([alike(number) for number in range(6 * WIDTH)])).tolist() == (
        [False] + [True] * (5 * WIDTH - 1) + [False] * WIDTH
    )


def test_some_name_is_found_however_few_are_left() -> None:
    names = NameSet()
    names.add(rows_of([name(number) for number in range(100_000)]))
    for number in range(100_000):
        if number != 4711:
            names.discard(name(number))

    found = [one for _ in range(2 + names.num_buckets // SCAN_BUCKETS) for one in names.find()]

    assert set(found) == {name(4711)}


def test_memory_is_given_back_in_parts() -> None:
    rows = GrowingRows(np.uint64, 4)
    rows.grow(1 << 20)
    rows.all[:] = 1
    sizes = [len(rows.memory)]

    while rows.give_back():
        sizes.append(len(rows.memory))

    assert sizes[0] == 32 << 20
    assert all(before - after == BACK_BYTES for before, after in itertools.pairwise(sizes))
    assert not rows.give_back()


def test_what_grew_keeps_what_it_had() -> None:
    rows = GrowingRows(np.uint32, 1)

    for number in range(100_000):
        rows.grow(number + 1)
        rows.items[number] = number

    assert (rows.all[:100_000] == np.arange(100_000)).all()
    assert not rows.all[100_000:].any()
