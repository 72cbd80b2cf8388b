"""BlockPool: leases, names and the order of eviction, in the reference's scenarios and against a small model.

The scenarios are vLLM's, with slots from 0 and no null block. One difference is meant: a name is held by one slot at
most, so a block computed twice stays unnamed in its second slot.
"""

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from kvtier.tiers.device import block_pool, eviction_order
from kvtier.tiers.device.block_pool import BlockPool
from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.naming.block_hash import BlockName


def names(prompt: str) -> list[BlockName]:
    """The chained names of a prompt with one letter for each full block."""
    return [BlockName(prompt[: i + 1].encode()) for i in range(len(prompt))]


def find(pool: BlockPool, prompt: str) -> list[int]:
    """The slots of the prompt's longest cached prefix."""
    slots: list[int] = []
    for name in names(prompt):
        if (slot := pool.find(name)) is None:
            break
        slots.append(slot)
    return slots


def admit(pool: BlockPool, prompt: str, num_partial: int = 0, max_hit: int | None = None) -> list[int]:
    """Lease what is cached, allocate the rest, name the full blocks. Returns the request's table."""
    hit = find(pool, prompt)[:max_hit]
    pool.lease(hit)
    new = pool.allocate(len(prompt) + num_partial - len(hit))
    assert new is not None
    table = hit + new
    for slot, name in list(zip(table, names(prompt), strict=False))[len(hit) :]:
        pool.commit([slot], [name])
    pool.check()
    return table


def free(pool: BlockPool, table: Sequence[int]) -> None:
    pool.release(table[::-1])
    pool.check()


def drained(pool: BlockPool) -> list[int]:
    """The free slots in the order in which the pool gives them out, all of them leased now."""
    return [slot for _ in range(pool.num_free) for slot in pool.allocate(1) or []]


def books(pool: BlockPool) -> tuple[object, ...]:
    """All that can be seen of a pool."""
    slots = range(pool.num_slots)
    return (
        pool.num_blank,
        pool.num_leases,
        pool.cached_slots(),
        [pool.name(slot) for slot in slots],
        [pool.is_free(slot) for slot in slots],
    )


# --- the reference's scenarios


def test_a_cold_prompt_takes_the_first_slots_and_names_the_full_blocks() -> None:  # S1
    pool = BlockPool(10)

    table = admit(pool, "abc", num_partial=1)

    assert table == [0, 1, 2, 3]
    assert [pool.name(slot) for slot in table] == [*names("abc"), None]
    assert drained(pool) == [4, 5, 6, 7, 8, 9]


def test_a_live_prefix_is_shared() -> None:  # S2
    pool = BlockPool(10)
    admit(pool, "abc", num_partial=1)

    table = admit(pool, "abc", num_partial=1)

    assert table == [0, 1, 2, 4]
    assert pool.num_leases == 4 + 4
    assert pool.num_free == 5


def test_a_shared_block_is_free_only_after_its_last_lease() -> None:  # S2
    pool = BlockPool(10)
    first, second = admit(pool, "abc", num_partial=1), admit(pool, "abc", num_partial=1)

    free(pool, first)
    free_after_one = [slot for slot in range(5) if pool.is_free(slot)]
    free(pool, second)

    assert free_after_one == [3]
    assert all(pool.is_free(slot) for slot in range(10))


def test_unnamed_slots_are_reused_first_and_a_prefix_is_evicted_tail_first() -> None:  # S3, S5
    pool = BlockPool(10)
    first, second = admit(pool, "abc", num_partial=1), admit(pool, "abc", num_partial=1)
    free(pool, first)
    free(pool, second)

    assert drained(pool) == [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]


def test_a_hit_on_freed_blocks_takes_them_from_the_free_list() -> None:  # S4
    pool = BlockPool(10)
    first, second = admit(pool, "abc", num_partial=1), admit(pool, "abc", num_partial=1)
    free(pool, first)
    free(pool, second)

    third = admit(pool, "abc", num_partial=1)

    assert third == [0, 1, 2, 4]
    assert drained(pool) == [3, 5, 6, 7, 8, 9]


def test_freeing_a_hit_restores_the_order() -> None:  # S4
    pool = BlockPool(10)
    first, second = admit(pool, "abc", num_partial=1), admit(pool, "abc", num_partial=1)
    free(pool, first)
    free(pool, second)

    free(pool, admit(pool, "abc", num_partial=1))

    assert drained(pool) == [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]


def test_unrelated_prompts_forget_everything_cached() -> None:  # S5
    pool = BlockPool(10)
    free(pool, admit(pool, "abc", num_partial=1))

    table = pool.allocate(10)

    assert sorted(table or []) == list(range(10))
    assert pool.num_named == 0
    assert find(pool, "abc") == []
    pool.check()


def test_the_prompt_freed_first_is_evicted_first() -> None:  # S6
    pool = BlockPool(10)
    first = admit(pool, "abcde", num_partial=1)
    second = admit(pool, "xyz")
    free(pool, first)
    free(pool, second)

    third = admit(pool, "ab", num_partial=1)

    assert (first, second) == ([0, 1, 2, 3, 4, 5], [6, 7, 8])
    assert third == [0, 1, 5]
    assert drained(pool) == [9, 4, 3, 2, 8, 7, 6]


def test_a_block_computed_twice_keeps_its_name_in_the_first_slot() -> None:  # S7, S8: here on purpose unlike vLLM
    pool = BlockPool(10)
    free(pool, admit(pool, "abc"))

    again = admit(pool, "abc", max_hit=2)  # the last token is always computed

    assert again == [0, 1, 3]
    assert pool.find(names("abc")[2]) == 2
    assert pool.name(3) is None
    assert drained(pool) == [4, 5, 6, 7, 8, 9, 2]


def test_committing_a_name_that_another_slot_has_says_so() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2) or []

    assert pool.commit([first], names("a")) == []
    assert pool.commit([second], names("a")) == [0]
    pool.check()


def test_a_slot_whose_name_was_taken_is_blank_when_released() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2) or []
    pool.commit([first], names("a"))
    pool.commit([second], names("a"))

    pool.release([second])

    assert pool.num_blank == 1
    pool.check()


def test_a_hit_is_not_evicted_for_the_rest_of_its_own_prompt() -> None:  # S9
    pool = BlockPool(2)
    free(pool, admit(pool, "a"))
    free(pool, admit(pool, "z"))

    table = admit(pool, "ab")

    assert table == [0, 1]
    assert find(pool, "z") == []


def test_an_allocation_that_fails_changes_nothing() -> None:  # S10
    pool = BlockPool(10)
    admit(pool, "abc")
    free(pool, admit(pool, "abcdef"))
    admit(pool, "yz")
    before = books(pool)

    assert pool.allocate(6) is None

    assert books(pool) == before
    assert pool.num_free == 5
    pool.check()


def test_a_hit_whose_rest_does_not_fit_can_be_put_back_as_it_was() -> None:  # S10
    pool = BlockPool(10)
    admit(pool, "abc")
    free(pool, admit(pool, "abcdef"))
    admit(pool, "yz")
    before = books(pool)
    hit = find(pool, "abcdefghi")

    pool.lease(hit)
    new = pool.allocate(3)
    free(pool, hit)

    assert new is None
    assert books(pool) == before


def test_a_leased_block_that_is_evicted_stays_with_its_owner_and_is_found_by_nobody() -> None:  # S13
    pool = BlockPool(10)
    table = admit(pool, "abc")

    pool.evict([1])

    assert find(pool, "abc") == [0]
    assert pool.find(names("abc")[2]) == 2
    assert not pool.is_free(1)
    pool.check()
    free(pool, table)
    assert drained(pool) == [1, 3, 4, 5, 6, 7, 8, 9, 2, 0]


def test_slots_leave_from_the_front_and_the_middle_and_come_back_at_the_end() -> None:  # S15
    pool = BlockPool(5)
    for slot, letter in zip(pool.allocate(5) or [], "abcde", strict=True):
        pool.commit([slot], names(letter))
    pool.release(range(5))

    oldest = pool.allocate(1)
    pool.lease([2])
    pool.commit([0], names("f"))
    pool.release([0])
    pool.release([2])

    assert oldest == [0]
    assert pool.cached_slots() == [1, 3, 4, 0, 2]


def test_taking_nothing_evicts_nothing() -> None:
    pool = BlockPool(3)
    free(pool, admit(pool, "abc"))

    assert pool.allocate(0) == []
    assert find(pool, "abc") == [0, 1, 2]


# --- orders


def test_the_last_blank_slot_released_is_the_first_reused() -> None:
    pool = BlockPool(6)
    pool.allocate(6)

    pool.release([3])
    pool.release([0, 5])

    assert drained(pool) == [5, 0, 3]


def test_an_evicted_free_block_becomes_blank_and_is_reused_before_the_oldest() -> None:
    pool = BlockPool(4)
    free(pool, admit(pool, "abcd"))

    pool.evict([0])

    assert (pool.num_blank, pool.num_named) == (1, 3)
    assert drained(pool) == [0, 3, 2, 1]


def test_evicting_a_slot_without_a_name_does_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    before = books(pool)

    pool.evict([0, 1, 2])

    assert books(pool) == before


def test_blank_slots_are_taken_before_anything_is_forgotten() -> None:
    pool = BlockPool(6)
    free(pool, admit(pool, "abc"))

    taken = pool.allocate(4)

    assert sorted(taken or []) == [2, 3, 4, 5]
    assert find(pool, "abc") == [0, 1]


def test_victims_are_told_oldest_first_and_left_alone() -> None:
    pool = BlockPool(6)
    free(pool, admit(pool, "abc"))
    free(pool, admit(pool, "xyz"))
    before = books(pool)

    assert pool.order.victims(4).tolist() == [2, 1, 0, 5]
    assert pool.order.victims(100).tolist() == [2, 1, 0, 5, 4, 3]
    assert books(pool) == before


# --- slots lent to a copy


def test_a_lent_block_is_found_but_neither_offered_nor_counted_as_free() -> None:
    pool = BlockPool(4)
    free(pool, admit(pool, "abcd"))

    pool.lend([3, 1])

    assert find(pool, "abcd") == [0, 1, 2, 3]
    assert pool.order.victims(4).tolist() == pool.cached_slots() == [2, 0]
    assert (pool.num_free, pool.num_leases, pool.num_named) == (2, 2, 4)
    assert not pool.is_free(1)
    pool.check()


def test_a_lent_slot_is_never_allocated() -> None:
    pool = BlockPool(4)
    free(pool, admit(pool, "abcd"))
    pool.lend([3, 1])

    assert pool.allocate(3) is None
    assert pool.allocate(2) == [2, 0]
    assert pool.find(names("abcd")[3]) == 3


def test_a_window_of_the_oldest_counts_lent_places_but_leaves_them_out() -> None:
    pool = BlockPool(4)
    free(pool, admit(pool, "abcd"))

    pool.lend([3, 1])

    assert [pool.order.oldest(window).tolist() for window in range(6)] == [[], [], [2], [2], [2, 0], [2, 0]]


def take_apart(pool: BlockPool, slots: Sequence[int], how: str) -> None:
    """Have slots at the eviction end leave it in one of the ways there are."""
    if how == "evicted":
        pool.evict(slots)
    elif how == "lent":
        pool.lend(slots)
    elif how == "refreshed":
        pool.refresh(slots)
    else:
        pool.lease(slots)


@pytest.mark.parametrize("how", ["leased", "lent", "refreshed", "evicted"])
@pytest.mark.parametrize("at_once", [1, 3, 200])
def test_what_leaves_the_eviction_end_is_not_evicted_with_what_was_around_it(how: str, at_once: int) -> None:
    num_slots, chain = 600, [BlockName(f"{i:032}".encode()) for i in range(600)]
    pool = BlockPool(num_slots)
    table = pool.allocate(num_slots)
    assert table is not None
    pool.commit(table, chain)
    free(pool, table)
    assert pool.allocate(2) == table[:-3:-1]  # the end is known from here on

    taken = table[350 : 350 + at_once]
    take_apart(pool, taken, how)
    rest = [slot for slot in table[-3::-1] if slot not in taken]
    evicted = pool.allocate(at_once if how == "evicted" else 0) or []
    for num_more in (1, 40, len(rest) - 41):
        evicted += pool.allocate(num_more) or []
        pool.check()

    blank_first = taken[::-1] if how == "evicted" else []
    assert sorted(evicted[: len(blank_first)]) == sorted(blank_first)
    assert evicted[len(blank_first) :] == rest


def test_rows_are_what_is_evicted_tail_first() -> None:
    pool = BlockPool(12)
    one, other = names("abcdef"), names("xyz")
    first, second, alone = pool.allocate(6), pool.allocate(3), pool.allocate(1)
    assert first is not None
    assert second is not None
    assert alone is not None
    pool.commit(first, one)
    pool.commit(second[1:], other, 1)
    pool.commit(alone, names("m"))
    slots = np.array([*first[:1:-1], first[0], *second[:0:-1], *alone], np.intp)

    rows = pool.rows(slots)

    assert [(row.start, row.end) for row in rows] == [(0, 4), (4, 5), (5, 7), (7, 8)]
    assert [row.names for row in rows] == [one[:1:-1], one[:1], other[:0:-1], names("m")]
    assert [row.parent for row in rows] == [one[1], None, other[0], None]


def test_a_slots_spot_stays_while_it_holds_the_same_block_and_no_longer() -> None:
    pool = BlockPool(4)
    table = pool.allocate(4)
    assert table is not None
    ids = np.array(table, np.intp)
    pool.commit(table[:3], names("abc"))
    pool.commit(table[3:], names("m"))
    before = pool.spots(ids).tolist()

    pool.release(table[::-1])
    assert pool.spots(ids).tolist() == before

    pool.evict(table)
    pool.allocate(4)
    pool.commit(table[:3], names("abc"))
    pool.commit(table[3:], names("m"))
    assert all(new != old for new, old in zip(pool.spots(ids).tolist(), before, strict=True))


def test_put_back_restores_the_order_of_eviction() -> None:
    pool = BlockPool(6)
    free(pool, admit(pool, "abcdef"))
    before = books(pool)
    victims = pool.order.victims(4)
    pool.lend(victims)

    pool.put_back(victims[::-1])

    assert books(pool) == before
    pool.check()


@pytest.mark.parametrize("how", ["evicted", "refreshed", "leased"])
@pytest.mark.parametrize("num_more", [1, 200])
def test_a_slot_that_left_the_eviction_end_while_others_there_were_lent_does_not_come_back(
    how: str, num_more: int
) -> None:
    pool = BlockPool(2 * num_more + 40)
    table = admit(pool, "".join(map(chr, range(256, 256 + pool.num_slots))))
    free(pool, table)
    slots = table[::-1]
    oldest = pool.order.victims(pool.num_slots // 2).tolist()  # the end is known from here on
    pool.lend(oldest[:5])
    gone = oldest[10 : 10 + num_more]

    take_apart(pool, gone, how)
    pool.put_back(oldest[:5])

    expected = [slot for slot in slots if slot not in gone] + (gone if how == "refreshed" else [])
    assert pool.order.victims(pool.num_slots).tolist() == expected
    assert pool.order.victims(12).tolist() == expected[:12]
    pool.check()


def test_put_back_goes_before_what_was_freed_meanwhile() -> None:
    pool = BlockPool(6)
    free(pool, admit(pool, "abc"))
    other = admit(pool, "xyz")
    pool.lend([2, 1])
    free(pool, other)

    pool.put_back([2, 1])

    assert pool.cached_slots() == [2, 1, 0, 5, 4, 3]


def test_a_leased_slot_may_be_lent_and_gets_its_place_when_the_lease_ends() -> None:
    pool = BlockPool(3)
    table = admit(pool, "abc")
    pool.lend([1])
    pool.check()

    free(pool, table)
    free_before = pool.cached_slots()
    pool.put_back([1])

    assert free_before == [2, 0]
    assert pool.cached_slots() == [2, 1, 0]  # where it was released, so that the tail still goes first
    pool.check()


def test_a_slot_lent_to_two_copies_is_free_when_both_have_ended() -> None:
    pool = BlockPool(3)
    free(pool, admit(pool, "abc"))
    pool.lend([2])
    pool.lend([2])

    pool.put_back([2])
    free_after_one = pool.cached_slots()
    pool.put_back([2])

    assert free_after_one == [1, 0], "the second copy still reads slot 2"
    assert pool.cached_slots() == [2, 1, 0]


def test_a_lent_slot_that_somebody_leases_stays_theirs_when_put_back() -> None:
    pool = BlockPool(3)
    free(pool, admit(pool, "abc"))
    pool.lend([2, 1])
    pool.lease([1])
    pool.check()

    pool.put_back([2, 1])

    assert pool.cached_slots() == [2, 0]
    assert not pool.is_free(1)
    pool.check()


def test_a_lent_slot_that_somebody_used_meanwhile_is_the_newest_when_put_back() -> None:
    pool = BlockPool(3)
    free(pool, admit(pool, "abc"))
    pool.lend([2, 1])
    pool.lease([2])
    pool.release([2])
    pool.check()

    pool.put_back([2, 1])

    assert pool.cached_slots() == [1, 0, 2]
    pool.check()


def test_a_lent_block_forgotten_meanwhile_gives_a_blank_slot_once_it_is_put_back() -> None:
    pool = BlockPool(3)
    free(pool, admit(pool, "abc"))
    pool.lend([2, 1])

    pool.evict([2])

    assert pool.num_blank == 0, "the copy still reads it"
    pool.check()
    pool.put_back([2, 1])
    assert (pool.num_blank, pool.cached_slots()) == (1, [1, 0])
    pool.check()


# --- the owner's mistakes


def test_leasing_a_blank_free_slot_fails() -> None:
    pool = BlockPool(3)

    with pytest.raises((AssertionError, KeyError)):
        pool.lease([1])

    pool.check()


@pytest.mark.parametrize("give", [BlockPool.release, BlockPool.put_back])
def test_giving_back_a_slot_that_nobody_leases_fails(give: Callable[[BlockPool, list[int]], None]) -> None:
    pool = BlockPool(3)
    free(pool, admit(pool, "a"))

    for slot in (0, 1):  # cached, blank
        with pytest.raises((AssertionError, KeyError)):
            give(pool, [slot])
        pool.check()


def test_lending_a_blank_slot_fails() -> None:
    pool = BlockPool(4)

    with pytest.raises(AssertionError, match="a slot is blank"):
        pool.lend([3])

    pool.check()


def test_giving_back_a_slot_once_too_often_in_one_call_fails() -> None:
    pool = BlockPool(3)
    table = admit(pool, "a")

    with pytest.raises((AssertionError, KeyError)):
        pool.release(table * 2)


def test_naming_a_free_slot_fails() -> None:
    with pytest.raises(AssertionError, match="a slot that is not leased cannot be named"):
        BlockPool(3).commit([1], names("a"))


def test_naming_a_slot_twice_fails() -> None:
    pool = BlockPool(3)
    admit(pool, "a")

    with pytest.raises(AssertionError, match="a slot has a name already"):
        pool.commit([0], names("b"))


# --- random operations against a model


class ModelPool:
    """What BlockPool promises, in lists: `blank` with the next one to be taken first, `cached` with the oldest."""

    def __init__(self, num_slots: int) -> None:
        self.leases = [0] * num_slots
        self.copies = [0] * num_slots
        self.names: list[BlockName | None] = [None] * num_slots
        self.blank = list(range(num_slots))
        self.cached: list[int] = []

    @property
    def victims(self) -> list[int]:
        return [slot for slot in self.cached if not self.copies[slot]]

    def allocate(self, num_slots: int) -> list[int] | None:
        taken = (self.blank + self.victims)[:num_slots]
        if len(taken) < num_slots:
            return None
        for slot in taken:
            (self.cached if self.names[slot] else self.blank).remove(slot)
            self.leases[slot], self.names[slot] = 1, None
        return taken

    def lease(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.leases[slot] += 1
        self.cached = [slot for slot in self.cached if slot not in slots]

    def release(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.leases[slot] -= 1
            if self.leases[slot] == self.copies[slot] and self.names[slot]:
                self.cached.append(slot)
            elif self.leases[slot] == 0:
                self.blank.insert(0, slot)

    def lend(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.copies[slot] += 1
            self.leases[slot] += 1

    def put_back(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.copies[slot] -= 1
            self.leases[slot] -= 1
            if self.leases[slot] == 0 and not self.names[slot]:
                self.blank.insert(0, slot)

    def evict(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if self.names[slot]:
                self.names[slot] = None
                if slot in self.cached:
                    self.cached.remove(slot)
                if self.leases[slot] == 0:
                    self.blank.append(slot)


class BothPools:
    """Does the same to the pool and to the model. `held` is leased, `lent` is lent, and neither is given back yet."""

    def __init__(self, num_slots: int, pick: random.Random) -> None:
        self.num_slots = num_slots
        self.pool, self.model = BlockPool(num_slots), ModelPool(num_slots)
        self.pick = pick
        self.held: list[list[int]] = []
        self.lent: list[list[int]] = []
        self.num_evictions = 0
        self.prompts = [[BlockName(bytes([of, block])) for block in range(2 * num_slots)] for of in range(2)]

    def allocate(self) -> None:
        num_slots, num_blank = self.pick.randint(0, self.num_slots // 2 + 1), len(self.model.blank)
        expected, taken = self.model.allocate(num_slots), self.pool.allocate(num_slots)
        assert taken == expected
        self.num_evictions += max(0, len(taken or []) - num_blank)
        self.held += [taken] if taken else []

    def lease(self) -> None:
        named = [slot for slot in range(self.num_slots) if self.pool.name(slot) is not None]
        if slots := self.pick.sample(named, self.pick.randint(0, min(4, len(named)))):
            self.pool.lease(slots)
            self.model.lease(slots)
            self.held.append(slots)

    def lend(self) -> None:
        leased = [slot for slots in self.held[:1] for slot in slots if not self.model.copies[slot]]
        if slots := self.pool.order.oldest(self.pick.randint(0, self.num_slots)).tolist() + leased:
            self.pool.lend(slots)
            self.model.lend(slots)
            self.lent.append(slots)

    def put_back(self) -> None:
        if self.lent:
            slots = self.lent.pop(self.pick.randrange(len(self.lent)))
            self.pool.put_back(slots)
            self.model.put_back(slots)

    def commit(self) -> None:
        for slot in {slot for slots in self.held for slot in slots if self.pool.name(slot) is None}:
            name = BlockName(bytes([self.pick.randrange(4 * self.num_slots)]))
            holder = self.model.names.index(name) if name in self.model.names else slot
            assert self.pool.commit([slot], [name]) == ([] if holder == slot else [0])
            self.model.names[holder] = name

    def commit_row(self) -> None:
        unnamed = [slot for slots in self.held for slot in slots if self.pool.name(slot) is None]
        slots, prompt = list(dict.fromkeys(unnamed))[: self.pick.randint(1, 4)], self.pick.choice(self.prompts)
        if not slots:
            return
        first = self.pick.randint(0, len(prompt) - len(slots))
        names = prompt[first : first + len(slots)]
        taken = [place for place, name in enumerate(names) if name in self.model.names]
        row = prompt[max(0, first - 1) : first + len(slots)]
        assert self.pool.commit_row(np.array(slots), row, min(1, first)) == taken
        for place, (slot, name) in enumerate(zip(slots, names, strict=True)):
            self.model.names[slot] = None if place in taken else name

    def release(self) -> None:
        if self.held:
            slots = self.held.pop(self.pick.randrange(len(self.held)))
            self.pick.shuffle(slots)
            self.pool.release(slots)
            self.model.release(slots)

    def evict(self) -> None:
        slots = self.pick.sample(range(self.num_slots), min(2, self.num_slots))
        self.pool.evict(slots)
        self.model.evict(slots)

    def compare(self) -> None:
        pool, model, slots = self.pool, self.model, range(self.num_slots)
        assert pool.cached_slots() == pool.order.victims(self.num_slots).tolist() == model.victims
        window = self.num_slots // 2
        assert pool.order.oldest(window).tolist() == [slot for slot in model.cached[:window] if not model.copies[slot]]
        assert [pool.name(slot) for slot in slots] == model.names
        assert [pool.find(name) for name in model.names if name] == [slot for slot in slots if model.names[slot]]
        for prompt in self.prompts:
            there = [model.names.index(name) if name in model.names else ABSENT for name in prompt]
            assert pool.find_all(prompt).tolist() == there
        assert (pool.num_blank, pool.num_free) == (len(model.blank), len(model.blank + model.victims))
        assert (pool.num_named, pool.num_leases) == (sum(map(bool, model.names)), sum(model.leases))
        assert [pool.is_free(slot) for slot in slots] == [leases == 0 for leases in model.leases]


@pytest.mark.parametrize("num_slots", [1, 3, 12, 40])
@pytest.mark.parametrize("many", [1, 5, block_pool.MANY], ids=lambda many: f"many={many}")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_random_operations_agree_with_the_model(
    seed: int, many: int, num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (block_pool, eviction_order):  # from how many slots on a call takes the way of whole arrays
        monkeypatch.setattr(module, "MANY", many)
    print(f"seed {seed}")
    pick = random.Random(seed)
    both = BothPools(num_slots, pick)
    operations = [both.allocate] * 4 + [both.commit, both.commit_row] * 2 + [both.release] * 5
    operations += [both.put_back] * 2 + [both.lend, both.lease, both.evict]
    for step in range(3000):
        operation = pick.choice(operations)

        operation()

        print(step, operation.__name__)
        both.pool.check()
        both.compare()
    while both.held or both.lent:
        both.release()
        both.put_back()
    assert drained(both.pool) == both.model.blank + both.model.cached
    assert both.num_evictions > 20, "too few interesting steps"


@pytest.mark.long
def test_the_order_is_put_together_a_part_at_a_time() -> None:
    num_slots = 4000
    pool = BlockPool(num_slots)
    slots = pool.allocate(num_slots)
    assert slots is not None
    pool.commit(slots, [BlockName(b"block %d" % number) for number in range(num_slots)])
    pool.release(slots)
    rng = random.Random(1)
    places = {slot: pool.order.place(slot) for slot in slots}
    num_moved = max_moved = 0
    for _ in range(2000):
        some = rng.sample(slots, 10)
        pool.refresh(some)
        moved = {slot for slot in slots if pool.order.place(slot) != places[slot]} - set(some)
        places = {slot: pool.order.place(slot) for slot in slots}
        num_moved += len(moved)
        max_moved = max(max_moved, len(moved))

    assert num_moved > num_slots  # the order had to be put together
    assert max_moved <= 2 * (eviction_order.SWEPT * 10 + eviction_order.MANY)  # lease and release
    pool.check()


def test_a_walk_over_the_order_goes_on_where_it_was_after_the_places_are_counted_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eviction_order, "MAX_PLACES", 1000)
    pool = BlockPool(20)
    slots = admit(pool, "abcdefghijklmnopqrst")
    free(pool, slots)
    for _ in range(500):
        pool.refresh(slots)
    first, place = pool.order.part(0, 5)
    assert first.tolist() == slots[:5]

    for _ in range(500):  # many times as many places
        pool.refresh(first.tolist())
    walked: list[int] = []
    while place is not None:
        some, place = pool.order.part(place, 5)
        walked += some.tolist()

    assert [slot for slot in walked if slot not in first] == slots[5:]
    pool.check()


def test_a_pool_is_cleared_at_once_and_slots_in_use_become_blank_when_they_are_released() -> None:
    pool = BlockPool(8)
    reader, lent = admit(pool, "abc"), admit(pool, "xy")
    free(pool, lent)
    pool.lend(np.array(lent, np.intp))

    cleared = pool.clear()
    pool.check()

    assert (pool.num_named, pool.num_blank, pool.num_free) == (0, 3, 3)
    assert [pool.name(slot) for slot in range(8)] == [None] * 8
    assert find(pool, "abc") == find(pool, "xy") == []
    pool.put_back(np.array(lent, np.intp))
    free(pool, reader)
    assert (pool.num_blank, pool.num_free) == (8, 8)
    assert sorted(pool.blank_slots()) == list(range(8))
    assert sorted(pool.allocate(8) or []) == list(range(8))
    gone = list[BlockName]()
    while (part := cleared.pop()) is not None:
        gone += part
    assert sorted(gone) == sorted([*names("abc"), *names("xy")])


def test_a_pool_in_which_nothing_is_leased_is_cleared_whatever_of_it_is_blank() -> None:
    for num_evicted in range(4):
        pool = BlockPool(6)
        free(pool, admit(pool, "abc"))
        pool.evict(pool.cached_slots()[:num_evicted])

        pool.clear()
        pool.check()
        free(pool, admit(pool, "abcde"))
        pool.clear()
        pool.check()

        assert sorted(pool.blank_slots()) == list(range(6))
        assert sorted(pool.allocate(6) or []) == list(range(6))


def test_what_is_evicted_while_slots_were_never_used_comes_after_them() -> None:
    pool = BlockPool(6)
    free(pool, admit(pool, "ab"))

    assert pool.evict(pool.cached_slots())
    pool.check()

    assert pool.blank_slots() == [2, 3, 4, 5, 1, 0]
    assert pool.allocate(5) == [2, 3, 4, 5, 1]
    pool.check()


def test_slots_that_were_never_used_can_be_taken_out_of_turn() -> None:
    pool = BlockPool(2000)
    table = admit(pool, "ab")

    pool.lease_blank(np.arange(1000, 1500))
    pool.check()

    assert pool.num_blank == 2000 - 500 - len(table)
    rest = pool.allocate(pool.num_blank)
    assert rest is not None
    assert not {*rest} & {*range(1000, 1500), *table}


def test_a_prompt_in_short_runs_is_looked_up_by_name_and_one_in_long_runs_by_its_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_followed = list[int]()
    following = eviction_order.Runs.following
    monkeypatch.setattr(
        eviction_order.Runs, "following", lambda *a: [found := following(*a), num_followed.append(len(found))][0]
    )
    prompt = [BlockName(number.to_bytes(32, "big")) for number in range(1024)]
    for length, num_runs in ((24, 1), (64, 15)):  # the last names are too few for a run
        pool, num_followed[:] = BlockPool(1024), []
        for start in range(0, len(prompt), length):
            part = prompt[start : start + length]
            slots = pool.allocate(len(part))
            assert slots is not None
            pool.commit(slots, part)

        assert pool.find_all(prompt).tolist() == [pool.find(name) for name in prompt]

        assert len(num_followed) == num_runs
