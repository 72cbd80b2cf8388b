"""The mirror of a sidecar's index: right in order, and what it says is lost was not found since."""

import random
from collections.abc import Sequence

import pytest
from chaos import FakeClock

from kvtier.engine.attached.mirror import Mirror
from kvtier.tiers.lower.lower_tiers import NOWHERE, ON_DISK
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.events import BlockRemoved, BlockStored, EventLog
from kvtier.tiers.naming.tier import EvictionCause, Tier

NAMES = [BlockName(random.Random(i).randbytes(32)) for i in range(60)]


def mirror(events: EventLog | None = None) -> Mirror:
    made = Mirror([16, 16], events, FakeClock())
    made.begin([40, 40])
    return made


@pytest.mark.parametrize("seed", range(40))
def test_it_finds_what_it_was_told_and_tells_each_loss_once(seed: int) -> None:
    rng = random.Random(seed)
    known, host, disk = mirror(), dict[BlockName, int](), set[BlockName]()
    lost = set[BlockName]()
    for _ in range(200):
        names = rng.sample(NAMES, rng.randrange(1, 6))
        match rng.randrange(4):
            case 0:
                slots = rng.sample(range(40), len(names))
                known.on_in_host(0, names, slots)
                host.update(zip(names, slots, strict=True))
            case 1:
                known.on_left_host(0, names, EvictionCause.ROOM)
                lost |= {name for name in names if name in host and name not in disk}
                for name in names:
                    host.pop(name, None)
            case 2:
                known.on_disk(0, names)
                disk.update(names)
            case _:
                known.on_left_disk(0, names, EvictionCause.ROOM)
                lost |= {name for name in names if name in disk and name not in host}
                disk -= set(names)

        expected = [host.get(name, ON_DISK if name in disk else NOWHERE) for name in NAMES]
        assert known.find(0, NAMES, is_readable=True).tolist() == expected
        in_host = [host.get(name, NOWHERE) for name in NAMES]
        assert known.find(0, NAMES, is_readable=False).tolist() == in_host
        for is_readable, places in ((True, expected), (False, in_host)):
            run = known.find_run(0, NAMES, is_readable).tolist()
            assert run == places[: next((i for i, place in enumerate(places) if place == NOWHERE), len(places))]
        assert known.find(1, NAMES, is_readable=True).tolist() == [NOWHERE] * len(NAMES)
        told = [name for each in known.pop_lost() for name in each.names]
        assert sorted(told) == sorted(lost)
        lost.clear()


def test_what_it_was_never_told_of_is_not_lost() -> None:
    known = mirror()

    known.on_left_host(0, NAMES[:3], EvictionCause.ROOM)
    known.on_left_disk(0, NAMES[:3], EvictionCause.ROOM)

    assert known.pop_lost() == ()


def test_when_a_sidecar_goes_nothing_is_found_and_events_tell_of_each_block_but_those_the_next_one_has() -> None:
    events = EventLog()
    known = mirror(events)
    known.on_in_host(0, NAMES[:4], range(4))
    known.on_disk(1, NAMES[2:6])
    before = known.num_changes
    events.take()

    known.end()
    known.begin([40, 40])
    known.on_in_host(0, NAMES[:1], [7])
    known.on_disk(1, NAMES[5:6])
    for _ in range(20):
        known.go_on()

    assert known.num_changes > before
    assert known.find(0, NAMES[:4], is_readable=True).tolist() == [7, NOWHERE, NOWHERE, NOWHERE]
    assert known.pop_lost() == ()  # the epoch says it of all
    assert removed(events, Tier.HOST) == set(NAMES[1:4])


def test_events_are_as_if_the_tiers_were_in_this_process() -> None:
    events = EventLog()
    known = mirror(events)

    known.on_in_host(1, NAMES[:2], [0, 1])
    known.on_disk(1, NAMES[:2])
    known.on_left_host(1, NAMES[:1], EvictionCause.ROOM)

    assert events.take() == [
        BlockStored(Tier.HOST, 1, NAMES[:2], 16),
        BlockStored(Tier.DISK, 1, NAMES[:2], 16),
        BlockRemoved(Tier.HOST, 1, NAMES[:1]),
    ]


def removed(events: EventLog, tier: Tier) -> set[BlockName]:
    found: set[BlockName] = set()
    taken: Sequence[object] = events.take()
    for event in taken:
        if isinstance(event, BlockRemoved) and event.tier is tier:
            found.update(event.names)
    return found
