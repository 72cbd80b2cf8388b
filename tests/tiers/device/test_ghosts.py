"""Ghosts: the last lost blocks, and the tier that lost each."""

import hashlib

from kvtier.tiers.device.ghosts import Ghosts
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.tier import Tier


def names(start: int, end: int) -> list[BlockName]:
    return [BlockName(hashlib.sha256(str(i).encode()).digest()) for i in range(start, end)]


def test_a_block_never_lost_is_nobodys() -> None:
    assert Ghosts(4).dropped_by(names(0, 1)[0]) is None


def test_the_tier_that_dropped_it_last_is_told() -> None:
    ghosts = Ghosts(8)
    ghosts.remember(names(0, 3), Tier.HOST)
    ghosts.remember(names(1, 2), Tier.DISK)

    assert [ghosts.dropped_by(name) for name in names(0, 4)] == [Tier.HOST, Tier.DISK, Tier.HOST, None]


def test_only_the_last_ones_are_remembered_through_many_rounds_of_the_ring() -> None:
    ghosts = Ghosts(8)
    for start in range(0, 50, 3):
        ghosts.remember(names(start, start + 3), Tier.DEVICE)

        kept = [i for i in range(start + 3) if ghosts.dropped_by(names(i, i + 1)[0]) is not None]
        assert kept == list(range(max(0, start + 3 - 8), start + 3))


def test_of_more_than_it_holds_the_newest_stay() -> None:
    ghosts = Ghosts(4)
    ghosts.remember(names(0, 10), Tier.DEVICE)

    assert [ghosts.dropped_by(name) is not None for name in names(0, 10)] == [False] * 6 + [True] * 4


def test_remembering_nothing_changes_nothing() -> None:
    ghosts = Ghosts(4)
    ghosts.remember([], Tier.DEVICE)

    assert ghosts.dropped_by(names(0, 1)[0]) is None
