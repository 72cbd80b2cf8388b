"""For how long evicted blocks had not been used: the sample against all of them."""

import random

import pytest

from kvtier.tiers.device.group_slots import MAX_MARKERS, EvictionAges, GroupSlots
from kvtier.tiers.naming.block_hash import BlockName


def name(number: int) -> BlockName:
    return BlockName(number.to_bytes(32, "big"))


class Play:
    """Blocks that come, are used again now and then, and leave when room is needed; with the age of each that left."""

    def __init__(self, num_slots: int, seed: int) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.used_at: dict[BlockName, float] = {}
        self.ages: list[float] = []
        self.slots = GroupSlots(num_slots, is_spilled=False, on_forgotten=self._on_forgotten)
        self.num_blocks = 0

    def _on_forgotten(self, slots: object, names: list[BlockName], were_dirty: object, cause: object) -> None:
        self.ages += [self.now - self.used_at.pop(each) for each in names]

    def step(self, num_new: int) -> None:
        """Compute so many blocks, and look at the ages."""
        names = [name(self.num_blocks + number) for number in range(num_new)]
        self.num_blocks += num_new
        slots = self.slots.take(num_new, 0)
        assert slots is not None
        self.slots.pool.commit(slots, names)
        self.slots.pool.release(slots[::-1])
        self.used_at |= dict.fromkeys(names, self.now)
        self.slots.ages.look(self.slots.num_evicted, self.now)

    def use_again(self, num_blocks: int) -> None:
        for each in self.rng.sample(list(self.used_at), min(num_blocks, len(self.used_at))):
            slot = self.slots.pool.find(each)
            assert slot is not None
            self.slots.pool.refresh([slot])
            self.used_at[each] = self.now


@pytest.mark.parametrize("seed", range(4))
def test_the_sample_has_all_evictions_and_their_mean_age(seed: int) -> None:
    play = Play(num_slots=400, seed=seed)
    for _ in range(8000):
        play.now += play.rng.expovariate(2.0)
        play.step(play.rng.randrange(1, 6))
        play.use_again(play.rng.randrange(3))

    found = play.slots.ages.statistics()

    mean_s = sum(play.ages) / len(play.ages)
    assert found.num_values == pytest.approx(len(play.ages), rel=0.02)
    assert found.total / found.num_values == pytest.approx(mean_s, rel=0.05)


def test_blocks_that_leave_faster_are_younger() -> None:
    play = Play(num_slots=200, seed=1)
    for _ in range(2000):
        play.now += 1.0
        play.step(1)
    slow = play.slots.ages.statistics()
    for _ in range(2000):
        play.now += 1.0
        play.step(10)

    fast = play.slots.ages.statistics()

    assert slow.total / slow.num_values == pytest.approx(200, rel=0.02)
    young = fast.counts[fast.bounds.index(30)] + fast.counts[fast.bounds.index(15)]
    assert young == pytest.approx(20_000, rel=0.1)


def test_a_pool_that_evicts_nothing_has_no_ages() -> None:
    play = Play(num_slots=100_000, seed=1)
    for _ in range(3 * MAX_MARKERS):
        play.now += 10.0
        play.step(2)

    assert play.slots.ages.statistics().num_values == 0


def test_most_calls_do_nothing() -> None:
    play = Play(num_slots=8, seed=1)
    ages = EvictionAges(play.slots.pool)
    ages.look(0, 100.0)
    play.slots.pool.commit(play.slots.pool.allocate(1) or [], [name(1)])

    ages.look(5, 100.1)

    assert ages.statistics().num_values == 0
