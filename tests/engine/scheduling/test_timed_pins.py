"""TimedPins: when pins end, which owner their bytes count for, and how many end with each tick."""

import random

import pytest
from chaos import FakeClock, World

from kvtier.engine.scheduling import timed_pins
from kvtier.engine.scheduling.timed_pins import TimedPins
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.pins import Pin

BLOCK_SIZE, BLOCK_BYTES = 4, 64


def world() -> World:
    return World([FullAttention(BLOCK_SIZE)], [BLOCK_BYTES], 16, 64, MemoryStore(1 << 20), random.Random(1))


def pinned(w: World, pins: TimedPins, owner: str, until: float, num_blocks: int = 1) -> Pin:
    num_tokens = num_blocks * BLOCK_SIZE
    pin = pins.pin(owner, w.chain(f"{owner} {until}", num_tokens), num_tokens, until=until)
    assert pin is not None
    return pin


def held_bytes(w: World) -> int:
    return w.cache.pins.max_bytes - w.cache.pins.free_bytes


def test_pins_end_in_the_order_of_their_times_a_few_with_each_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_pins, "MAX_ENDED", 2)
    w, clock = world(), FakeClock()
    pins = TimedPins(w.cache, clock)
    for number, until in enumerate([30.0, 10.0, 20.0, 10.0, 10.0]):
        pinned(w, pins, str(number), until)

    left = []
    for now in (9.0, 10.0, 10.0, 10.0, 20.0, 30.0):
        clock.now = now
        pins.tick()
        left.append(held_bytes(w) // BLOCK_BYTES)

    assert left == [5, 3, 2, 2, 1, 0]


def test_bytes_are_counted_by_owner_until_a_pin_ends_however_it_does() -> None:
    w, clock = world(), FakeClock()
    pins = TimedPins(w.cache, clock)
    early, late = pinned(w, pins, "ann", 10.0, num_blocks=2), pinned(w, pins, "ann", 20.0, num_blocks=3)
    pinned(w, pins, "bob", 20.0)

    assert (pins.num_bytes("ann"), pins.num_bytes("bob")) == (5 * BLOCK_BYTES, BLOCK_BYTES)
    clock.now = 10.0
    pins.tick()
    pins.unpin(early)  # has ended
    assert (pins.num_bytes("ann"), pins.num_bytes("bob")) == (3 * BLOCK_BYTES, BLOCK_BYTES)
    pins.unpin(late)
    assert (pins.num_bytes("ann"), held_bytes(w)) == (0, BLOCK_BYTES)
    clock.now = 20.0
    pins.tick()
    assert (pins.num_bytes("bob"), held_bytes(w)) == (0, 0)


def test_what_is_more_than_the_owner_may_have_is_not_pinned() -> None:
    w = world()
    pins = TimedPins(w.cache, FakeClock())

    pin = pins.pin("ann", w.chain("a", 8), 8, BLOCK_BYTES, until=1.0)

    assert pin is None
    assert (pins.num_bytes("ann"), held_bytes(w)) == (0, 0)


def test_pins_that_ended_before_their_time_neither_delay_others_nor_pile_up() -> None:
    w, clock = world(), FakeClock()
    pins = TimedPins(w.cache, clock)
    for _ in range(2_000):  # a document, pinned for years, is pinned anew every half minute
        pins.unpin(pinned(w, pins, "ann", 1e9))
    pinned(w, pins, "bob", 11.0)

    clock.now = 11.0
    pins.tick()

    assert held_bytes(w) == 0
    assert pins.num_remembered < 1000


def test_after_all_were_ended_owners_have_nothing() -> None:
    w = world()
    pins = TimedPins(w.cache, FakeClock())
    pinned(w, pins, "ann", 10.0)
    pinned(w, pins, "bob", 10.0)

    w.cache.pins.end_all()
    pins.forget_all()

    assert (pins.num_bytes("ann"), pins.num_bytes("bob"), held_bytes(w)) == (0, 0, 0)
    assert pins.num_remembered == 0


def test_a_pin_that_is_prolonged_ends_at_its_new_time_and_never_earlier() -> None:
    w, clock = world(), FakeClock()
    pins = TimedPins(w.cache, clock)
    pin = pinned(w, pins, "ann", 10.0)
    for until in (30.0, 20.0):
        pins.prolong(pin, until)

    left = []
    for now in (10.0, 29.0, 30.0):
        clock.now = now
        pins.tick()
        left.append(pins.has(pin))

    assert left == [True, True, False]
    pins.prolong(pin, 60.0)  # too late
    assert (pins.has(pin), held_bytes(w)) == (False, 0)


def test_pins_that_are_prolonged_again_and_again_do_not_pile_up() -> None:
    w = world()
    pins = TimedPins(w.cache, FakeClock())
    pin = pinned(w, pins, "ann", 10.0)

    for until in range(2_000):
        pins.prolong(pin, float(until))

    assert pins.num_remembered < 100


def test_what_another_pin_keeps_already_is_neither_kept_nor_counted_again() -> None:
    w = world()
    pins = TimedPins(w.cache, FakeClock())
    chain = w.chain("a", 3 * BLOCK_SIZE)

    whole = pins.pin("ann", chain, 3 * BLOCK_SIZE, BLOCK_BYTES, until=10.0, start=2 * BLOCK_SIZE)

    assert whole is not None
    assert pins.num_bytes("ann") == held_bytes(w) == BLOCK_BYTES
