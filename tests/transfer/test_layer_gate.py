"""LayerGate: the gate between a lane that brings layers and the thread that computes them."""

import threading
import time
from threading import Condition

import pytest
from waiting import DEADLINE_S, is_in, join, wait_for

from kvtier.transfer.layer_gate import LayerGate

LONG_AGO = float("-inf")  # in monotonic time


@pytest.mark.parametrize("num_parts", [1, 3, 8])
@pytest.mark.parametrize("num_layers", [1, 2, 7, 8, 32])
def test_every_layer_is_in_one_part_and_waits_for_that(num_parts: int, num_layers: int) -> None:
    gate = LayerGate(num_parts)
    parts = [gate.layers(part, num_layers) for part in range(num_parts)]

    assert [layer for part in parts for layer in part] == list(range(num_layers))
    for part in parts:
        for layer in part:
            gate.wait(layer, num_layers, LONG_AGO)  # comes back at once, open or not
        gate.open_next()
        gate.missed = False
        for layer in part:
            gate.wait(layer, num_layers, LONG_AGO)
            assert not gate.missed


def test_a_wait_ends_when_the_part_has_come_and_not_before() -> None:
    gate, passed = LayerGate(4), []

    def compute() -> None:
        for layer in range(8):
            gate.wait(layer, 8, time.monotonic() + DEADLINE_S)
            passed.append(layer)

    def waits_or_has_gone_on(num_passed: int) -> bool:
        return len(passed) > num_passed or (len(passed) == num_passed and waits(computing.ident))

    computing = threading.Thread(target=compute)
    computing.start()
    for part in range(4):
        wait_for(lambda num_passed=2 * part: waits_or_has_gone_on(num_passed))  # type: ignore[misc]
        assert len(passed) == 2 * part
        gate.open_next()
    join(computing)

    assert passed == list(range(8))
    assert not gate.missed


def test_a_wait_ends_in_time_if_nothing_comes() -> None:
    gate = LayerGate(2)

    gate.wait(0, 2, LONG_AGO)

    assert gate.missed


def test_a_wait_ends_when_nothing_more_will_come() -> None:
    gate, waiting = LayerGate(2), threading.get_ident()

    def give_up() -> None:
        wait_for(lambda: waits(waiting))
        gate.open_all()

    giving_up = threading.Thread(target=give_up)
    giving_up.start()
    gate.wait(1, 2, time.monotonic() + DEADLINE_S)
    join(giving_up)

    assert not gate.missed


def waits(thread_id: int | None) -> bool:
    """Whether a thread waits at a gate that is closed."""
    return thread_id is not None and is_in(thread_id, Condition.wait_for)
