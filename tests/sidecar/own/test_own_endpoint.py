"""Engines at their own endpoint: what they are told, what they lease, and what becomes of it when they go."""

import gc
import os
import socket
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from engine_bed import EXTENT_BYTES, GROUPS, Bed, Engine, Plain, engine_bed, hello, in_books, names, publication

from kvtier.engine.attached import wire
from kvtier.engine.attached.wire import Chain, GroupShape
from kvtier.engine.stores.reopening_store import StoreStanding
from kvtier.sidecar.endpoint import LeaseUse
from kvtier.sidecar.shares import Shares
from kvtier.sidecar.statistics import statistics_of
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.naming.named_blocks import number_of, tenant_of
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.transfer.transfer_engine import Route

# The handshake.


@pytest.fixture
def one_may_have_all(bed: Bed) -> None:
    """The share of an engine that attaches now is all of host memory."""
    bed.layouts.shares = Shares(lambda: 1 << 40, bed.layouts.ledger)


def test_an_engine_is_welcomed_with_the_segment_itself(bed: Bed, engine: Engine) -> None:
    assert engine.welcome.num_bytes == bed.segment.num_bytes
    assert len(engine.files) == 1
    engine.memory[12345:12350] = b"hello"

    assert bytes(bed.segment.memory[12345:12350]) == b"hello"


def test_an_engine_that_is_gone_once_it_is_welcomed_ends_alone(bed: Bed) -> None:
    """Its connection is closed inside the turn that takes its first word in, as when it is killed there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as leaving:
        leaving.connect(bed.path)
        leaving.sendall(wire.frame_of(hello()))
    bed.turn(3)

    other = Engine(bed)

    assert other.welcome.num_bytes == bed.segment.num_bytes
    other.close()


def test_two_starts_of_a_sidecar_are_told_apart(tmp_path: Path) -> None:
    boots = []
    for _ in range(2):
        with engine_bed(tmp_path) as bed:
            engine = Engine(bed)
            boots.append(engine.welcome.boot)
            engine.close()

    assert len(set(boots)) == 2


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"version": 1}, "the engine speaks version 1, the sidecar version 3; install the same kvtier in both"),
        ({"namespace": b"short"}, "a namespace has 16 bytes, not 5"),
        ({"groups": []}, "0 groups of blocks; 1 to 64 are served"),
        ({"groups": [GroupShape(16, False, 4096)] * 65}, "65 groups of blocks"),
        ({"groups": [GroupShape(0, False, 4096)]}, "blocks of 0 tokens and 4096 bytes are invalid"),
        ({"groups": [GroupShape(16, False, -1)]}, "blocks of 16 tokens and -1 bytes are invalid"),
        ({"groups": [GroupShape(16, False, EXTENT_BYTES - 1)]}, "start the sidecar with extents of 131070 bytes or"),
        ({"groups": [GroupShape(16, False, 1)] * 64}, "slots for these blocks, but the limit is 4194304; use larger"),
        ({"model": "m" * 257}, "a model's name has at most 256 characters"),
        ({"model": "a\nb"}, "all of them printable"),
    ],
)
def test_an_engine_that_cannot_be_served_is_told_what_to_do(bed: Bed, changed: dict[str, object], why: str) -> None:
    plain = Plain(bed)
    plain.send(wire.frame_of(hello(**changed)))
    bed.settle()

    (refused,) = plain.read()
    assert isinstance(refused, wire.Refused)
    assert why in refused.why
    assert plain.is_ended
    assert bed.endpoint.counts().refused == {"version" if "version" in changed else "layout": 1}
    assert Engine(bed).welcome  # others are served


@pytest.mark.usefixtures("one_may_have_all")
def test_a_block_may_be_as_large_as_an_extent(bed: Bed) -> None:
    engine = Engine(bed, groups=[GroupShape(16, False, EXTENT_BYTES)])

    assert len(engine.reserve(100)) == 8
    engine.close()


def test_another_user_is_told_that_it_is_not_let_in(tmp_path: Path) -> None:
    with engine_bed(tmp_path, allowed_uids=[os.geteuid() + 1]) as bed:
        plain = Plain(bed)
        bed.turn()

        (refused,) = plain.read()
        assert isinstance(refused, wire.Refused)
        assert f"user {os.geteuid()} is not allowed to connect" in refused.why
        assert plain.is_ended


@pytest.mark.parametrize("first", [wire.Ping(), wire.Clear(), wire.Reserve(0, 1)])
def test_nothing_is_done_for_an_engine_before_its_hello(bed: Bed, first: wire.FromEngine) -> None:
    plain = Plain(bed)
    plain.send(wire.frame_of(first) + wire.frame_of(hello()))
    bed.settle()

    assert plain.read() == []
    assert plain.is_ended
    assert bed.endpoint.counts().refused == {"malformed": 1}


def test_a_second_hello_ends_the_connection(bed: Bed, engine: Engine) -> None:
    engine.say(hello())
    bed.settle()
    engine.hear()

    assert engine.is_ended
    assert bed.endpoint.clients() == []


# What engines lease.


@pytest.mark.parametrize("group", [0, 1])
def test_what_one_engine_publishes_another_is_told_of_and_loads(bed: Bed, engine: Engine, group: int) -> None:
    other = Engine(bed)

    assert engine.store(1, 10, group) == 10
    other.hear()

    assert engine.host == other.host == in_books(bed.tiers())[0]
    assert len(other.host[group]) == 10
    assert other.load(1, 10, group) == (list(range(10)), {})
    assert bed.num_leases() == 0
    other.close()


def test_engines_of_other_layouts_never_meet(bed: Bed, engine: Engine) -> None:
    engine.store(1, 10)
    others = [
        Engine(bed, namespace=bytes(16)),
        Engine(bed, groups=GROUPS[:1]),
        Engine(bed, groups=[GROUPS[0], GroupShape(16, False, 3000)]),
        Engine(bed, groups=[GROUPS[0], GroupShape(16, True, 3000, keeps_states=True)]),
    ]

    for other in others:
        came, failures = other.load(1, 10)
        assert (came, set(failures.values())) == ([], {Reason.EVICTED_FROM_HOST})
        assert not any(other.host)
        other.close()


def test_the_models_name_decides_nothing(bed: Bed, engine: Engine) -> None:
    engine.store(1, 10)
    other = Engine(bed, model="another name")

    assert other.load(1, 10) == (list(range(10)), {})
    other.close()


@pytest.mark.usefixtures("one_may_have_all")
def test_a_slot_across_the_end_of_an_extent_is_never_given(bed: Bed, engine: Engine) -> None:
    slots = engine.reserve(10_000, group=1)

    places = [(slot * 3000 // EXTENT_BYTES, (slot * 3000 + 2999) // EXTENT_BYTES) for slot in slots]
    assert all(first == last for first, last in places)
    assert len(slots) == 8 * EXTENT_BYTES // 3000 - 7


def test_a_fetch_is_answered_in_the_turn_in_which_it_comes(bed: Bed, engine: Engine) -> None:
    engine.store(1, 3)
    engine.told.clear()
    number = engine.fetch([*names(1, 3), *names(2, 1)])
    engine.say(wire.Ping())
    bed.turn()
    engine.hear()

    fetched, pong = engine.told
    assert isinstance(fetched, wire.Fetched)
    assert fetched.number == number
    assert wire.numbers_in(fetched.places, 4).tolist() == [0, 1, 2]
    assert fetched.failures == [(3, Reason.EVICTED_FROM_HOST)]
    assert pong == wire.Pong()
    bed.settle()
    engine.hear()
    assert not [message for message in engine.told if message is not fetched and isinstance(message, wire.Fetched)]


def test_tenants_come_back_with_the_blocks(bed: Bed, engine: Engine) -> None:
    owner = number_of(tenant_of("a salt"))
    engine.publish(names(1, 2), engine.reserve(2), owner=owner)
    engine.fetch(names(1, 2))

    fetched = engine.next(wire.Fetched)
    assert wire.owners_in(fetched.owners, 2).tolist() == [owner, owner]


@pytest.mark.usefixtures("one_may_have_all")
def test_what_is_leased_stays_and_is_evicted_once_it_is_released(bed: Bed, engine: Engine) -> None:
    engine.store(1, 8)
    number = engine.fetch(names(1, 8))
    engine.next(wire.Fetched)
    everything = len(engine.reserve(10_000))
    bed.settle()
    engine.hear()
    assert set(engine.host[0]) == set(names(1, 8))

    engine.say(wire.Release(number, wire.packed(range(7, -1, -1))))
    more = engine.reserve(10_000)
    engine.hear()

    assert len(more) == 8
    assert everything + len(more) == bed.segment.num_bytes // GROUPS[0].block_bytes
    assert engine.host == [{}, {}]


def test_an_engine_that_takes_all_it_can_get_leaves_room_for_the_next_one(bed: Bed, engine: Engine) -> None:
    num_slots = bed.segment.num_bytes // GROUPS[0].block_bytes
    greedy = engine.reserve(10_000)
    other = Engine(bed)

    modest = other.reserve(4)

    assert num_slots // 2 < len(greedy) < num_slots
    assert len(modest) == 4
    assert bed.endpoint.counts().lost["over_share"] == 10_000 - len(greedy)
    other.close()
    engine.close()
    bed.settle()
    assert bed.num_leases() == 0


def test_what_an_engine_leases_is_noted_for_the_process_that_comes_after(bed: Bed, engine: Engine) -> None:
    ledger = bed.layouts.ledger
    slots = engine.reserve(4)
    assert ledger.num_leased > 0
    engine.say(wire.Abandon(0, wire.packed(slots)))
    bed.settle()
    assert ledger.num_leased == 0

    engine.store(1, 4)
    number = engine.fetch(names(1, 4))
    engine.next(wire.Fetched)
    assert ledger.num_leased > 0
    engine.say(wire.Release(number, wire.packed(range(4))))
    bed.settle()

    assert ledger.num_leased == 0


def test_what_is_beyond_an_engines_share_fails_and_the_rest_comes(bed: Bed, engine: Engine) -> None:
    num_stored = 0
    while num_stored < 40:
        engine.store(num_stored, 8)
        num_stored += 8
    wanted = [name for document in range(0, 40, 8) for name in names(document, 8)]
    engine.reserve(10_000)  # what is left of its share
    number = engine.fetch(wanted)

    fetched = engine.next(wire.Fetched)

    assert fetched.number == number
    assert fetched.failures
    assert {reason for _, reason in fetched.failures} == {Reason.CAPACITY}
    engine.say(wire.Release(number, wire.packed(range(len(wanted)))))
    engine.close()
    bed.settle()
    assert bed.num_leases() == 0


def test_an_engine_may_release_what_was_beyond_its_share_too(bed: Bed, engine: Engine) -> None:
    slots = engine.reserve(10_000)
    engine.say(wire.Abandon(0, wire.packed(slots[:8])))
    engine.store(1, 8)
    more = engine.reserve(4)
    number = engine.fetch(names(1, 8))
    fetched = engine.next(wire.Fetched)
    assert 0 < len(fetched.failures) < 8
    assert {reason for _, reason in fetched.failures} == {Reason.CAPACITY}

    engine.say(wire.Release(number, wire.packed(range(8))))
    bed.settle()

    assert bed.num_leases() == len(slots) - 8 + len(more)
    assert engine.ask(wire.Ping(), wire.Pong)


def test_what_an_engine_had_reserved_is_in_nobodys_share_once_it_has_gone(bed: Bed) -> None:
    engine = Engine(bed)
    slots = engine.reserve(10_000)
    engine.close()
    bed.settle()

    other = Engine(bed)

    assert bed.layouts.shares.leased.num_bytes == 0
    assert bed.layouts.ledger.num_leased == 0
    assert len(other.reserve(10_000)) == len(slots)
    other.close()


def test_engines_know_which_blocks_left_the_slots_that_they_are_given(small: Bed) -> None:
    engine = Engine(small)
    fill(engine)
    before = set(engine.host[0])

    engine.say(wire.Reserve(0, 5))
    small.turn()

    told = engine.read()
    reserved_at = [isinstance(message, wire.Reserved) for message in told].index(True)
    left = [
        name
        for message in told[:reserved_at]
        if isinstance(message, wire.LeftHost)
        for name in wire.names_in(message.names)
    ]
    assert len(left) == 5
    assert set(left) <= before
    assert not [message for message in told[reserved_at:] if isinstance(message, wire.LeftHost)]


def test_what_was_not_filled_is_found_by_nobody_and_can_be_had_again(bed: Bed, engine: Engine) -> None:
    slots = engine.reserve(10_000)
    assert engine.reserve(1) == []

    engine.say(wire.Abandon(0, wire.packed(slots)))

    assert sorted(engine.reserve(10_000)) == sorted(slots)
    assert engine.host == [{}, {}]


def test_blocks_with_wrong_bytes_are_forgotten(bed: Bed, engine: Engine) -> None:
    engine.store(1, 4)

    engine.say(wire.Forget(0, wire.joined(names(1, 4)[2:] * 2)))
    bed.settle()
    engine.hear()

    assert set(engine.host[0]) == set(names(1, 2))
    assert engine.load(1, 4)[0] == [0, 1]


def test_what_was_used_stays_longer(bed: Bed, engine: Engine) -> None:
    capacity = bed.segment.num_bytes // GROUPS[0].block_bytes
    for document in range(4):
        engine.store(document, capacity // 4)

    engine.say(wire.Refresh(0, wire.joined(names(0, capacity // 4)[::-1] * 2), b""))
    engine.store(9, capacity // 4)

    assert set(names(0, capacity // 4)) <= set(engine.host[0])
    assert not set(names(1, capacity // 4)) & set(engine.host[0])


# With a disk.


@pytest.fixture
def small(tmp_path: Path) -> object:
    """A segment of two extents, and a disk."""
    with engine_bed(tmp_path, num_extents=2, store=MemoryStore(1 << 20)) as bed:
        bed.layouts.shares = Shares(lambda: 1 << 40, bed.layouts.ledger)
        yield bed


def fill(engine: Engine) -> None:
    """Store documents 1 to 4, of which the segment has room for one."""
    for document in (1, 2, 3, 4):
        assert engine.store(document, 20) == 20


def test_what_left_host_memory_comes_from_disk(small: Bed) -> None:
    engine = Engine(small)
    fill(engine)
    assert not set(names(1, 20)) & set(engine.host[0])
    assert set(names(1, 20)) <= engine.disk[0]

    assert engine.load(1, 20) == (list(range(20)), {})
    assert (engine.host, engine.disk) == in_books(small.tiers())


def test_what_is_on_disk_is_answered_as_it_comes(small: Bed) -> None:
    engine = Engine(small)
    fill(engine)
    small.lanes[Route.DISK_TO_HOST].is_stopped = True
    number = engine.fetch([*names(4, 2), *names(1, 3)])

    assert wire.numbers_in(engine.next(wire.Fetched).places, 5).tolist() == [0, 1]
    assert small.endpoint.is_waiting
    engine.say(wire.Release(number, wire.packed([3])))
    small.settle()
    small.lanes[Route.DISK_TO_HOST].is_stopped = False

    fetched = engine.next(wire.Fetched)
    assert sorted(wire.numbers_in(fetched.places, 5).tolist()) == [2, 4]
    engine.say(wire.Release(number, wire.packed([4, 2, 1, 0])))
    small.settle()
    assert small.num_leases() == 0
    assert not small.endpoint.is_waiting


def test_what_is_for_later_comes_too(small: Bed) -> None:
    engine = Engine(small)
    fill(engine)
    number = engine.fetch(names(1, 3), is_for_later=True)

    assert len(engine.next(wire.Fetched).places) == 3 * 4
    engine.say(wire.Release(number, wire.packed([2, 1, 0])))


def test_a_read_that_hangs_fails(small: Bed) -> None:
    engine = Engine(small)
    fill(engine)
    small.pass_time(100)
    small.lanes[Route.DISK_TO_HOST].is_stopped = True
    engine.fetch(names(1, 3))
    small.turn()
    small.pass_time(9.9)
    engine.hear()
    assert not [message for message in engine.told if isinstance(message, wire.Fetched)]

    small.pass_time(0.2)

    assert engine.next(wire.Fetched).failures == [(place, Reason.DEADLINE) for place in range(3)]
    assert small.endpoint.counts().lost["late"] == 3
    small.lanes[Route.DISK_TO_HOST].is_stopped = False
    small.settle()


def test_blocks_for_which_there_is_no_room_fail(small: Bed) -> None:
    engine = Engine(small)
    fill(engine)
    engine.reserve(10_000)
    number = engine.fetch(names(1, 3))
    small.turn()
    small.pass_time(9.9)
    engine.hear()
    assert not [message for message in engine.told if isinstance(message, wire.Fetched)]

    small.pass_time(0.2)

    assert engine.next(wire.Fetched).failures == [(place, Reason.CAPACITY) for place in range(3)]
    assert small.layouts.num_unsaved == 0
    engine.say(wire.Release(number, wire.packed([0])))
    small.settle()
    assert not small.endpoint.is_waiting


def leave_no_room(engine: Engine, num_slots: int = 0) -> list[int]:
    """Reserve all of host memory but *num_slots*; the slots."""
    slots = engine.reserve(10_000)
    if num_slots:
        engine.say(wire.Abandon(0, wire.packed(slots[:num_slots])))
    engine.bed.settle()
    engine.hear()
    engine.told.clear()
    return slots[num_slots:]


def wait_in_vain(bed: Bed) -> None:
    """Let the time pass after which what engines wait for takes too long."""
    bed.turn()
    bed.pass_time(10.1)


def fetched_by(engine: Engine, number: int) -> tuple[list[int], dict[int, Reason]]:
    """Which places of a fetch the engine has been told to have come, and why others did not."""
    engine.hear()
    answers = [message for message in engine.told if isinstance(message, wire.Fetched) and message.number == number]
    came = [place for answer in answers for place in wire.numbers_in(answer.places, 1 << 20).tolist()]
    failures = [failure for answer in answers for failure in answer.failures]
    assert len(dict(failures)) == len(failures), "a failure is told twice"
    assert not set(came) & set(dict(failures))
    return came, dict(failures)


def test_what_an_engine_has_leased_stays_when_the_rest_of_its_fetch_times_out(small: Bed) -> None:
    engine = Engine(small)
    fill(engine)
    first = engine.fetch(names(4, 2))
    engine.next(wire.Fetched)
    leave_no_room(engine)
    second = engine.fetch([*names(4, 2), *names(1, 3)])

    wait_in_vain(small)

    assert fetched_by(engine, second) == ([0, 1], dict.fromkeys([2, 3, 4], Reason.CAPACITY))
    engine.say(wire.Release(first, wire.packed([1, 0])))
    small.settle()
    (client,) = small.endpoint.clients()
    assert [lease.num_chunks for lease in client.leases if lease.use == LeaseUse.READ] == [2], "it may be copying"
    engine.say(wire.Release(second, wire.packed([1, 0])))
    small.settle()
    (client,) = small.endpoint.clients()
    assert [lease.use for lease in client.leases] == [LeaseUse.WRITTEN]


def test_what_timed_out_is_not_read_when_there_is_room(small: Bed) -> None:
    engine = Engine(small)
    fill(engine)
    slots = leave_no_room(engine)
    number = engine.fetch(names(1, 3))
    wait_in_vain(small)
    assert fetched_by(engine, number) == ([], dict.fromkeys(range(3), Reason.CAPACITY))

    engine.say(wire.Abandon(0, wire.packed(slots)))
    small.settle()

    assert small.num_leases() == 0
    assert fetched_by(engine, number)[0] == []


def test_what_is_for_later_waits_on_when_what_is_wanted_now_times_out(small: Bed) -> None:
    engine = Engine(small)
    fill(engine)
    slots = leave_no_room(engine)
    later, now = engine.fetch(names(2, 3), is_for_later=True), engine.fetch(names(1, 3))
    wait_in_vain(small)
    assert fetched_by(engine, now) == ([], dict.fromkeys(range(3), Reason.CAPACITY))
    assert fetched_by(engine, later) == ([], {})

    engine.say(wire.Abandon(0, wire.packed(slots)))
    small.settle()

    assert fetched_by(engine, later) == ([0, 1, 2], {})
    engine.say(wire.Release(later, wire.packed([2, 1, 0])))


def test_an_engine_is_told_why_each_block_did_not_come_in_time(small: Bed) -> None:
    engine = Engine(small)
    fill(engine)
    small.tiers().read_timeout_s = 1000  # the engine's fetch has had its time first
    leave_no_room(engine, num_slots=2)
    small.lanes[Route.DISK_TO_HOST].is_stopped = True
    number = engine.fetch(names(1, 5))

    wait_in_vain(small)

    late = dict.fromkeys(range(2), Reason.DEADLINE)
    assert fetched_by(engine, number) == ([], late | dict.fromkeys(range(2, 5), Reason.FAILED))
    assert small.endpoint.counts().lost["late"] == 2
    small.lanes[Route.DISK_TO_HOST].is_stopped = False
    small.settle()


@pytest.mark.parametrize("has_room", [False, True])
def test_what_did_not_come_in_time_counts_no_more(small: Bed, monkeypatch: pytest.MonkeyPatch, has_room: bool) -> None:
    monkeypatch.setattr("kvtier.sidecar.own.session.MAX_BLOCKS", 5)
    engine = Engine(small)
    fill(engine)
    slots = leave_no_room(engine, num_slots=3 * has_room)
    small.lanes[Route.DISK_TO_HOST].is_stopped = True
    number = engine.fetch(names(1, 3))
    wait_in_vain(small)
    assert len(fetched_by(engine, number)[1]) == 3
    small.lanes[Route.DISK_TO_HOST].is_stopped = False
    small.settle()
    engine.say(wire.Abandon(0, wire.packed(slots)))
    engine.store(5, 5)

    number = engine.fetch(names(5, 5))
    small.settle()

    assert fetched_by(engine, number) == ([0, 1, 2, 3, 4], {})


def test_a_block_that_is_released_as_it_comes_is_not_told_of(small: Bed) -> None:
    engine = Engine(small)
    fill(engine)
    number = engine.fetch(names(1, 3))
    small.endpoint.receive()
    for _ in range(3):  # the blocks land, and the endpoint has no turn to tell of them
        small.layouts.poll()
        small.lanes[Route.DISK_TO_HOST].work()
        small.transfers.poll()
    small.layouts.poll()
    assert small.num_leases() == 3
    engine.say(wire.Release(number, wire.packed([1])))
    small.endpoint.receive()
    small.settle()

    assert fetched_by(engine, number) == ([0, 2], {})
    assert small.num_leases() == 2


# Clearing.


def test_an_engine_is_told_that_all_has_left_before_it_is_told_that_all_was_cleared(small: Bed) -> None:
    engine, other = Engine(small), Engine(small)
    fill(engine)

    engine.ask(wire.Clear(), wire.Cleared)

    assert (engine.host, engine.disk) == ([{}, {}], [set(), set()])
    small.settle()
    other.hear()
    assert (other.host, other.disk) == ([{}, {}], [set(), set()])
    assert not [message for message in other.told if isinstance(message, wire.Cleared)]
    assert set(engine.load(4, 20)[1].values()) == {Reason.EVICTED_FROM_DISK}


@pytest.mark.parametrize("is_by_http", [False, True])
def test_what_is_being_written_while_all_is_cleared_is_never_found(bed: Bed, engine: Engine, is_by_http: bool) -> None:
    other = Engine(bed)
    slots = engine.reserve(4)
    if is_by_http:
        bed.sidecar.clear([bed.tiers().layout])
    else:
        other.ask(wire.Clear(), wire.Cleared)

    engine.publish(names(1, 4), slots)
    assert engine.store(2, 4) == 4

    assert set(engine.host[0]) == set(names(2, 4))
    assert bed.num_leases() == 0
    assert bed.endpoint.counts().lost["given_up"] == 4
    other.close()


def test_what_was_in_part_begun_before_all_was_cleared_is_never_found(bed: Bed, engine: Engine) -> None:
    other = Engine(bed)
    before = engine.reserve(2)
    other.ask(wire.Clear(), wire.Cleared)

    engine.publish(names(1, 4), [*before, *engine.reserve(2)])
    bed.settle()
    engine.hear()

    assert engine.host[0] == {}
    assert bed.num_leases() == 0
    other.close()


def test_slots_that_were_written_while_all_was_cleared_are_free_with_their_engine(bed: Bed, engine: Engine) -> None:
    other = Engine(bed)
    other.reserve(4)
    engine.ask(wire.Clear(), wire.Cleared)

    other.close()
    bed.settle()

    assert bed.num_leases() == 0


# What becomes of what an engine has, and what is told of it.


def test_all_that_an_engine_leases_ends_with_its_connection(small: Bed) -> None:
    engine, other = Engine(small), Engine(small)
    fill(engine)
    small.lanes[Route.DISK_TO_HOST].is_stopped = True
    engine.fetch([*names(4, 3), *names(1, 3)])
    engine.fetch([*names(1, 3)], is_for_later=True)
    engine.reserve(2)
    engine.reserve(1, group=1)
    assert small.num_leases() > 3

    engine.close()
    small.turn(2)
    small.lanes[Route.DISK_TO_HOST].is_stopped = False
    small.settle()

    assert small.num_leases() == 0
    assert len(small.endpoint.clients()) == 1
    small.check()
    assert other.load(4, 20)[0] == list(range(20))


def test_nothing_is_kept_of_an_engine_that_has_gone(bed: Bed, engine: Engine) -> None:
    gone = Engine(bed, engine=b"g" * wire.ENGINE_BYTES)
    gone.store(1, 3)
    connection = weakref.ref(bed.port.clients[-1].connection)

    gone.close()
    bed.settle()
    gc.collect()

    assert connection() is None
    assert engine.ask(wire.Ping(), wire.Pong)


def test_an_engine_that_says_nothing_stays(bed: Bed, engine: Engine) -> None:
    engine.reserve(3)
    for _ in range(100):
        bed.pass_time(3600)
        engine.hear()

    assert not engine.is_ended
    assert bed.num_leases() == 3


def test_engines_and_their_leases_are_told_of(bed: Bed, engine: Engine) -> None:
    engine.store(1, 5)
    bed.clock.now += 10
    engine.fetch(names(1, 4))
    engine.reserve(3, group=1)

    (client,) = bed.sidecar.clients()
    assert client.layout == bed.tiers().layout
    assert client.name.startswith(f"process {os.getpid()}, connection ")
    leases = {(lease.use, lease.group, lease.num_chunks, bed.clock() - lease.since) for lease in client.leases}
    assert leases == {(LeaseUse.READ, 0, 4, 0.0), (LeaseUse.WRITTEN, 1, 3, 0.0)}
    counts = bed.endpoint.counts()
    assert (counts.kind, counts.num_asked, counts.num_promised, counts.num_stored) == ("engine", 4, 4, 5)
    assert counts.operations == {"hello": 1, "reserve": 2, "publish": 1, "fetch": 1}


def test_the_state_is_told_twice_a_second_and_when_it_changes(small: Bed) -> None:
    engine = Engine(small)
    fill(engine)
    small.settle()
    engine.hear()
    engine.told.clear()

    for _ in range(10):
        small.pass_time(0.25)
    engine.hear()
    states = [message for message in engine.told if isinstance(message, wire.TiersState)]
    assert len(states) == 5
    assert states[-1].is_indexed
    assert states[-1].is_readable
    assert states[-1].tiers[Tier.HOST].num_blocks == len(engine.host[0])
    assert states[-1].tiers[Tier.HOST].capacity_bytes == small.segment.num_bytes
    assert states[-1].disk is not None
    assert states[-1].disk.known_blocks == len(engine.disk[0])

    engine.told.clear()
    small.lanes[Route.DISK_TO_HOST].is_stopped = True
    engine.fetch(names(1, 3))
    small.settle()
    small.clock.now += 10.1  # the reads hang, and the disk is left alone
    small.turn(2)
    engine.hear()
    assert [message.is_readable for message in engine.told if isinstance(message, wire.TiersState)][-1] is False
    small.lanes[Route.DISK_TO_HOST].is_stopped = False
    small.settle()


# What no engine says.


def reserved(engine: Engine, num_slots: int = 2) -> list[int]:
    return engine.reserve(num_slots)


MALFORMED: dict[str, Callable[[Engine, Engine], wire.FromEngine]] = {
    "an unknown group to reserve": lambda engine, _: wire.Reserve(2, 1),
    "a negative group": lambda engine, _: wire.Reserve(-1, 1),
    "a negative number of slots": lambda engine, _: wire.Reserve(0, -1),
    "too many slots": lambda engine, _: wire.Reserve(0, wire.MAX_BLOCKS + 1),
    "another's slots to publish": lambda engine, other: publication(engine, names(1, 2), other.reserve(2)),
    "slots that nobody reserved": lambda engine, _: publication(engine, names(1, 2), [3, 4]),
    "another group's slots": lambda engine, _: publication(engine, names(1, 2), engine.reserve(2), group=1),
    "a slot twice": lambda engine, _: publication(engine, names(1, 2), engine.reserve(1) * 2),
    "a slot beyond the segment": lambda engine, _: wire.Abandon(0, wire.packed([1 << 30])),
    "a negative slot": lambda engine, _: wire.Abandon(0, wire.packed([-1])),
    "another's slots to abandon": lambda engine, other: wire.Abandon(0, wire.packed(other.reserve(2))),
    "more names than slots": lambda engine, _: publication(
        engine, names(1, 2), engine.reserve(2), names=wire.joined(names(1, 3))
    ),
    "a name cut off": lambda engine, _: publication(
        engine, names(1, 2), engine.reserve(2), names=wire.joined(names(1, 2))[:-1]
    ),
    "too few digests": lambda engine, _: publication(engine, names(1, 2), engine.reserve(2), digests=bytes(16)),
    "too few owners": lambda engine, _: publication(engine, names(1, 2), engine.reserve(2), owners=bytes(8)),
    "no chains": lambda engine, _: publication(engine, names(1, 2), engine.reserve(2), chains=[]),
    "a chain beyond the blocks": lambda engine, _: publication(
        engine, names(1, 2), engine.reserve(2), chains=[Chain(0, 3, None)]
    ),
    "chains with a gap": lambda engine, _: publication(
        engine, names(1, 3), engine.reserve(3), chains=[Chain(0, 1, None), Chain(2, 3, None)]
    ),
    "chains that overlap": lambda engine, _: publication(
        engine, names(1, 3), engine.reserve(3), chains=[Chain(0, 2, None), Chain(1, 3, None)]
    ),
    "an empty chain": lambda engine, _: publication(
        engine, names(1, 2), engine.reserve(2), chains=[Chain(0, 0, None), Chain(0, 2, None)]
    ),
    "a parent that is no name": lambda engine, _: publication(
        engine, names(1, 2), engine.reserve(2), chains=[Chain(0, 2, b"no")]
    ),
    "a fetch of an unknown group": lambda engine, _: wire.Fetch(7, 9, b"", [], b"", False),
    "a fetch of a block twice": lambda engine, _: wire.Fetch(7, 0, wire.joined(names(1, 1) * 2), [], b"", False),
    "a fetch with a start that is none": lambda engine, _: wire.Fetch(
        7, 0, wire.joined(names(1, 1)), [wire.Start(1, None)], b"", False
    ),
    "a tenant that is none": lambda engine, _: wire.Fetch(7, 0, wire.joined(names(1, 1)), [], b"salt", False),
    "the number of another fetch": lambda engine, _: wire.Fetch(
        fetched(engine), 0, wire.joined(names(1, 1)), [], b"", False
    ),
    "a place beyond the fetch": lambda engine, _: wire.Release(fetched(engine), wire.packed([4])),
    "a negative place": lambda engine, _: wire.Release(fetched(engine), wire.packed([-1])),
    "a place twice": lambda engine, _: wire.Release(fetched(engine), wire.packed([0, 0])),
    "an origin too many": lambda engine, _: wire.Refresh(0, wire.joined(names(1, 1)), b"\1\1"),
    "to refresh an unknown group": lambda engine, _: wire.Refresh(3, wire.joined(names(1, 1)), b""),
    "to forget an unknown group": lambda engine, _: wire.Forget(3, wire.joined(names(1, 1))),
}


def fetched(engine: Engine) -> int:
    """A fetch of four blocks that are leased."""
    engine.store(5, 4)
    number = engine.fetch(names(5, 4))
    engine.next(wire.Fetched)
    return number


@pytest.mark.parametrize("what", MALFORMED)
def test_an_engine_that_says_what_none_says_ends_alone(bed: Bed, what: str) -> None:
    engine, other = Engine(bed), Engine(bed)
    message = MALFORMED[what](engine, other)
    leased_by_other = sum(lease.num_chunks for lease in bed.endpoint.clients()[1].leases)

    engine.say(message)
    bed.settle()
    engine.hear()

    assert engine.is_ended
    assert bed.endpoint.counts().refused == {"malformed": 1}
    engine.close()
    bed.settle()
    assert bed.num_leases() == leased_by_other
    bed.check()
    assert other.store(3, 4) == 4
    other.close()


def test_a_release_of_what_is_over_does_nothing(bed: Bed, engine: Engine) -> None:
    number = fetched(engine)
    for _ in range(2):
        engine.say(wire.Release(number, wire.packed([3, 2, 1, 0])), wire.Release(99, wire.packed([0])))
    bed.settle()
    engine.hear()

    assert not engine.is_ended
    assert bed.num_leases() == 0


def test_blocks_that_came_while_an_engine_wrote_them_are_there_once(bed: Bed, engine: Engine) -> None:
    other = Engine(bed)
    slots, others = engine.reserve(4), other.reserve(4)
    engine.publish(names(1, 4), slots)
    other.publish(names(1, 4), others)
    bed.settle()
    engine.hear()

    assert engine.host[0] == dict(zip(names(1, 4), slots, strict=True))
    assert bed.num_leases() == 0
    other.close()


def test_more_than_an_engine_may_wait_for_fails(bed: Bed, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.sidecar.own.session.MAX_BLOCKS", 5)
    engine.store(1, 6)
    engine.fetch(names(1, 4))
    engine.next(wire.Fetched)

    engine.fetch(names(1, 2))
    failed = engine.next(wire.Fetched)
    engine.fetch(names(1, 1))

    assert failed.failures == [(0, Reason.CAPACITY), (1, Reason.CAPACITY)]
    assert len(engine.next(wire.Fetched).places) == 4


def test_an_empty_fetch_is_answered(bed: Bed, engine: Engine) -> None:
    number = engine.fetch([])

    assert engine.next(wire.Fetched) == wire.Fetched(number, b"", b"", b"", b"", [])
    assert np.count_nonzero(bed.segment.memory) == 0


def test_the_sidecar_and_its_engines_know_how_many_blocks_are_states(tmp_path: Path) -> None:
    store = MemoryStore(1 << 20)
    with engine_bed(tmp_path, num_extents=2, store=store) as bed:
        bed.layouts.shares = Shares(lambda: 1 << 40, bed.layouts.ledger)
        engine = Engine(bed, groups=[GROUPS[0], GroupShape(16, True, 3000, keeps_states=True)])
        engine.store(1, 5)
        engine.store(2, 20, group=1)
        engine.store(3, 20, group=1)
        bed.pass_time(1.0)
        engine.hear()
        told = [message for message in engine.told if isinstance(message, wire.TiersState)][-1]
        standing = StoreStanding(tmp_path, None)
        pins = bed.sidecar.statistics().pins
        found = statistics_of(bed.layouts, bed.segment, bed.transfers, (standing, store.statistics()), (), pins)

        num_states = {Tier.HOST: len(engine.host[1]), Tier.DISK: len(engine.disk[1])}
        assert min(num_states.values()) > 0
        for tiers in (told.tiers, found.tiers):
            assert {tier: tiers[tier].num_states for tier in num_states} == num_states
        engine.close()
