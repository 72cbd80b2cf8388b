"""Which tier a block that came up counts for: the one that it was found in, however late it was leased there."""

import pytest
from chaos import World
from small_cache import BLOCK_SIZE, DOCUMENT, balance, read, world

from kvtier.tiers.naming.tier import Tier
from kvtier.tiers.up.promotion import Promotion


def below_only(is_apart: bool) -> World:
    """A world whose device has nothing of the document `a`, host memory all of it, and the disk too."""
    w = world(is_apart=is_apart, copies_all_down=True)
    read(w, "a")
    w.flush()
    for other in "bcdefg":
        if all(tier is not Tier.DEVICE for tier in w.cache.lookups.where(w.chain("a", DOCUMENT))):
            break
        read(w, other)
    return w


def promote(w: World) -> Promotion:
    chain = w.chain("a", DOCUMENT + 1)
    return w.cache.promote(w.cache.lookup(chain, DOCUMENT + 1))


def let_go(w: World, *promotions: Promotion) -> None:
    for promotion in promotions:
        w.cache.release(promotion.tables)
    w.check()


@pytest.mark.parametrize("is_apart", [False, True])
def test_blocks_from_host_memory_come_from_there_and_from_nowhere_else(is_apart: bool) -> None:
    w = below_only(is_apart)

    promotion = promote(w)
    w.settle()

    assert balance(promotion) == (0, DOCUMENT, 0, 1)
    assert promotion.came_at.keys() == {Tier.HOST}
    let_go(w, promotion)


@pytest.mark.parametrize("is_apart", [False, True])
def test_of_a_prefix_in_both_tiers_below_blocks_come_from_both(is_apart: bool) -> None:
    w = below_only(is_apart)
    names = w.chain("a", DOCUMENT).names[5:]
    w.evict_blocks(names)
    w.settle()

    promotion = promote(w)
    w.settle()

    assert balance(promotion) == (0, 5 * BLOCK_SIZE, DOCUMENT - 5 * BLOCK_SIZE, 1)
    assert promotion.came_at.keys() == {Tier.HOST, Tier.DISK}
    let_go(w, promotion)


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_promotion_that_joins_another_one_counts_its_blocks_alike(is_apart: bool) -> None:
    w = below_only(is_apart)

    first, second = promote(w), promote(w)
    w.settle()

    assert balance(first) == balance(second) == (0, DOCUMENT, 0, 1)
    assert second.came_at.keys() == {Tier.HOST}
    let_go(w, first, second)
