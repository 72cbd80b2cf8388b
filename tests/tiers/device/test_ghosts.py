"""Ghosts: the last lost blocks, the tier that lost each, why and when."""

import hashlib

from kvtier.tiers.device.ghosts import Ghost, Ghosts
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.tier import EvictionCause, Tier

ROOM, QUOTA = EvictionCause.ROOM, EvictionCause.QUOTA


def names(start: int, end: int) -> list[BlockName]:
    return [BlockName(hashlib.sha256(str(i).encode()).digest()) for i in range(start, end)]


def test_a_block_never_lost_is_nobodys() -> None:
    assert Ghosts(4).find(names(0, 1)[0]) is None
    assert Ghosts(4).find_all(names(0, 2)) == [None, None]


def test_the_tier_that_dropped_it_last_is_told_with_cause_and_time() -> None:
    ghosts = Ghosts(8)
    ghosts.remember(names(0, 3), Tier.HOST, ROOM, 1.5)
    ghosts.remember(names(1, 2), Tier.DISK, QUOTA, 2.5)

    by_host, by_disk = Ghost(Tier.HOST, ROOM, 1.5), Ghost(Tier.DISK, QUOTA, 2.5)
    assert [ghosts.find(name) for name in names(0, 4)] == [by_host, by_disk, by_host, None]
    assert ghosts.find_all(names(0, 4)) == [by_host, by_disk, by_host, None]


def test_what_was_lost_later_does_not_hide_what_was_lost_before() -> None:
    ghosts = Ghosts(8)
    ghosts.remember(names(0, 2), Tier.HOST, ROOM, 1.0)
    ghosts.remember(names(0, 1), Tier.DISK, ROOM, 3.0)

    assert ghosts.find_all(names(0, 2), before=2.0) == [Ghost(Tier.HOST, ROOM, 1.0)] * 2
    assert ghosts.find_all(names(0, 2), before=1.0) == [None, None]


def test_only_the_last_ones_are_remembered_through_many_rounds_of_the_ring() -> None:
    ghosts = Ghosts(8)
    for start in range(0, 50, 3):
        ghosts.remember(names(start, start + 3), Tier.DEVICE, ROOM, float(start))

        kept = [i for i in range(start + 3) if ghosts.find(names(i, i + 1)[0]) is not None]
        assert kept == list(range(max(0, start + 3 - 8), start + 3))
        found = ghosts.find_all(names(0, start + 3))
        assert [ghost.at for ghost in found if ghost is not None] == [i // 3 * 3 for i in kept]


def test_of_more_than_it_holds_the_newest_stay() -> None:
    ghosts = Ghosts(4)
    ghosts.remember(names(0, 10), Tier.DEVICE, ROOM, 0.0)

    assert [ghosts.find(name) is not None for name in names(0, 10)] == [False] * 6 + [True] * 4


def test_remembering_nothing_changes_nothing() -> None:
    ghosts = Ghosts(4)
    ghosts.remember([], Tier.DEVICE, ROOM, 0.0)

    assert ghosts.find(names(0, 1)[0]) is None


def test_a_copy_and_what_it_was_made_of_know_nothing_of_each_other() -> None:
    ghosts = Ghosts(4)
    ghosts.remember(names(0, 3), Tier.HOST, ROOM, 1.0)
    copied = ghosts.copy()
    ghosts.remember(names(3, 6), Tier.DISK, QUOTA, 2.0)
    assert [ghost is not None for ghost in ghosts.find_all(names(0, 6))] == [False] * 2 + [True] * 4

    assert copied.find_all(names(0, 6)) == [Ghost(Tier.HOST, ROOM, 1.0)] * 3 + [None] * 3
    copied.remember(names(6, 8), Tier.DEVICE, ROOM, 3.0)
    assert copied.find_all(names(0, 8)) == [
        None,
        *[Ghost(Tier.HOST, ROOM, 1.0)] * 2,
        *[None] * 3,
        *[Ghost(Tier.DEVICE, ROOM, 3.0)] * 2,
    ]
    assert ghosts.find_all(names(6, 8)) == [None, None]
