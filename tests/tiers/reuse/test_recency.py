"""A sample of blocks in the order of their last use, against a list of all."""

import random

import numpy as np
import pytest

from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.reuse.recency import Recency


def some_names(rng: random.Random, num_names: int) -> list[BlockName]:
    return [BlockName(rng.randbytes(32)) for _ in range(num_names)]


@pytest.mark.parametrize("seed", range(5))
def test_distances_of_all_blocks_are_those_of_a_list(seed: int) -> None:
    rng = random.Random(seed)
    names = {size: some_names(rng, 40) for size in (100, 700)}
    recency = Recency(max_blocks=1000, rate=1.0)
    used: list[tuple[BlockName, int]] = []  # newest last
    for _ in range(300):
        size = rng.choice([100, 700])
        asked = rng.sample(names[size], rng.randrange(1, 12))
        known = {name: place for place, (name, _) in enumerate(used)}
        expected = [sum(each for _, each in used[known[name] + 1 :]) + size for name in asked if name in known]

        hashes = recency.sampled(asked)

        assert len(hashes) == len(asked)
        assert recency.distances(hashes) == pytest.approx(expected)
        recency.use(hashes, size)
        recency.check()
        used = [each for each in used if each[0] not in asked] + [(name, size) for name in reversed(asked)]
    assert recency.num_bytes == pytest.approx(sum(size for _, size in used))


def test_the_sample_is_the_same_blocks_each_time_and_about_as_many_as_its_rate() -> None:
    names = some_names(random.Random(1), 20_000)
    recency = Recency(max_blocks=100_000, rate=0.1)

    first, again = recency.sampled(names), recency.sampled(names)

    assert np.array_equal(first, again)
    assert len(first) == pytest.approx(2000, rel=0.1)


def test_beyond_the_most_blocks_the_sample_becomes_a_smaller_share() -> None:
    rng = random.Random(2)
    recency = Recency(max_blocks=500, rate=0.25)
    for _ in range(100):
        recency.use(recency.sampled(some_names(rng, 400)), 10)
        recency.check()

    assert len(recency) == 500
    assert recency.rate == pytest.approx(500 / 40_000, rel=0.2)
    assert recency.num_bytes == pytest.approx(400_000, rel=0.01)


def test_what_is_too_far_away_is_forgotten_and_makes_room_in_the_sample() -> None:
    rng = random.Random(3)
    recency = Recency(max_blocks=500, rate=0.25)
    for _ in range(1000):
        names = some_names(rng, 400)
        recency.use(recency.sampled(names), 10)
        recency.forget_beyond(10_000)  # a thousand blocks
        recency.check()

    assert recency.rate == pytest.approx(0.25)
    assert len(recency) <= 251
    assert recency.distances(recency.sampled(names)) != []


def test_nothing_was_used_before_the_first_use() -> None:
    recency = Recency(max_blocks=10, rate=1.0)

    assert recency.distances(recency.sampled(some_names(random.Random(4), 5))) == []
    assert len(recency.sampled([])) == 0
