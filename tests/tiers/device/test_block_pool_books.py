"""`BlockPool.check` finds books that disagree."""

# ruff: noqa: SLF001  the test damages what is the pool's own; no public call makes its books disagree

import pytest

from kvtier.tiers.device.block_pool import BlockPool
from kvtier.tiers.device.eviction_order import ALONE, NO_SPOT
from kvtier.tiers.naming.block_hash import BlockName

A, B = BlockName(b"a"), BlockName(b"ab")


def exchange_names(pool: BlockPool) -> None:
    index = pool._slots
    index.remove_all([A, B])
    index.give_all([A, B], (1, 0))


def test_check_finds_a_book_that_was_cooked() -> None:
    damages = {
        "a slot is blank twice": lambda pool: pool._blank.append(pool._blank[-1]),
        "the lent slots were miscounted": lambda pool: setattr(pool.order, "num_lent", 1),
        "the slots in the order were miscounted": lambda pool: setattr(pool.order, "num_slots", 1),
        "a slot is not at its place": lambda pool: pool.order._rows.items.__setitem__(0, 3),
        "a slot is leased and free, or neither": lambda pool: pool._leases.__setitem__(4, 1),
        "a slot was released more often": lambda pool: pool._leases.__setitem__(0, -1),
        "a blank slot has a name": lambda pool: pool._spots.__setitem__(4, ALONE),
        "a cached slot has no name": lambda pool: pool._spots.__setitem__(0, NO_SPOT),
        "names and slots are inconsistent": lambda pool: pool._slots.remove_all([A]),
        "a name points to the wrong slot": exchange_names,
    }
    for message, damage in damages.items():
        pool = BlockPool(5)
        slots = pool.allocate(2) or []
        pool.commit(slots, [A, B])
        pool.release(slots[::-1])
        pool.check()

        damage(pool)

        with pytest.raises(AssertionError, match=message):
            pool.check()
