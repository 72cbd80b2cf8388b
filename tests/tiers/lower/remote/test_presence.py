"""What a remote store has said that it has: believed for a while, and no longer than that."""

import pytest
from chaos import FakeClock

from kvtier.tiers.lower.remote import presence as module
from kvtier.tiers.lower.remote.presence import ABSENT_LASTS_S, LASTS_S, RemoteHints
from kvtier.tiers.naming.block_hash import BlockName


def name(number: int) -> BlockName:
    return BlockName(number.to_bytes(32, "big"))


NAMES = [name(number) for number in range(4)]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def presence(clock: FakeClock) -> RemoteHints:
    return RemoteHints(clock)


def test_what_is_there_is_believed_for_one_period_and_the_next(presence: RemoteHints, clock: FakeClock) -> None:
    presence.add(0, NAMES[:1])
    clock.now += LASTS_S + 1
    presence.add(0, NAMES[1:2])
    assert presence.are_held(0, NAMES).tolist() == [True, True, False, False]

    clock.now += LASTS_S + 1
    presence.add(0, NAMES[2:3])

    assert presence.are_held(0, NAMES).tolist() == [False, True, True, False]
    assert presence.num_blocks == 2


def test_a_period_that_is_full_ends_early(presence: RemoteHints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NAMES", 0)

    for each in NAMES:
        presence.add(0, [each])

    assert presence.are_held(0, NAMES).tolist() == [False, False, True, True]


def test_groups_are_apart_and_a_prefix_ends_at_the_first_hole(presence: RemoteHints) -> None:
    presence.add(1, [NAMES[0], NAMES[1], NAMES[3]])

    assert presence.num_held(1, NAMES) == 2
    assert presence.num_held(0, NAMES) == 0
    assert not presence.are_held(0, NAMES).any()


def test_what_is_not_there_is_believed_for_a_while_or_until_it_comes(presence: RemoteHints, clock: FakeClock) -> None:
    presence.add(0, NAMES[:2])
    presence.note_absent(0, NAMES[0])
    presence.note_absent(0, NAMES[2])
    assert presence.are_held(0, NAMES).tolist() == [False, True, False, False]
    assert [presence.is_absent(0, each) for each in NAMES] == [True, False, True, False]
    assert not presence.is_absent(1, NAMES[0])

    presence.add(0, NAMES[:1])
    assert [presence.is_absent(0, each) for each in NAMES] == [False, False, True, False]

    clock.now += ABSENT_LASTS_S + 1
    assert not presence.is_absent(0, NAMES[2])


def test_what_is_removed_is_in_neither_period(presence: RemoteHints, clock: FakeClock) -> None:
    presence.add(0, NAMES[:1])
    clock.now += LASTS_S + 1
    presence.add(0, NAMES[:2])

    presence.remove(0, NAMES[0])

    assert presence.are_held(0, NAMES[:2]).tolist() == [False, True]
    presence.clear()
    assert not presence.are_held(0, NAMES).any()


def test_some_block_is_found_that_is_none_of_those_that_are_known_to_be_bad(presence: RemoteHints) -> None:
    presence.add(0, NAMES[:2])

    assert presence.find_any({(0, NAMES[0])}) == (0, NAMES[1])
    assert presence.find_any({(0, NAMES[0]), (0, NAMES[1])}) is None
