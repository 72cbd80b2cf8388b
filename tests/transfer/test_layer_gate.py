"""The gate between a lane that brings layers and the thread that computes them."""

import threading
import time

import pytest

from kvtier.transfer.layer_gate import LayerGate


@pytest.mark.parametrize("num_parts", [1, 3, 8])
@pytest.mark.parametrize("num_layers", [1, 2, 7, 8, 32])
def test_every_layer_is_in_one_part_and_waits_for_that(num_parts: int, num_layers: int) -> None:
    gate = LayerGate(num_parts)
    parts = [gate.layers(part, num_layers) for part in range(num_parts)]

    assert [layer for part in parts for layer in part] == list(range(num_layers))
    for part in parts:
        for layer in part:
            began = time.monotonic()
            gate.wait(layer, num_layers, began - 1.0)  # comes back at once, open or not
            assert time.monotonic() - began < 5.0
        gate.open_next()


def test_a_wait_ends_when_the_part_has_come_and_not_before() -> None:
    gate, passed = LayerGate(4), []

    def compute() -> None:
        for layer in range(8):
            gate.wait(layer, 8, time.monotonic() + 30.0)
            passed.append(layer)

    computing = threading.Thread(target=compute)
    computing.start()
    for part in range(4):
        time.sleep(0.02)
        assert len(passed) == 2 * part
        gate.open_next()
        give_up_at = time.monotonic() + 10.0
        while len(passed) < 2 * part + 2 and time.monotonic() < give_up_at:
            time.sleep(0.001)
    computing.join(10.0)

    assert passed == list(range(8))
    assert not gate.missed


def test_a_wait_ends_in_time_if_nothing_comes() -> None:
    gate = LayerGate(2)

    gate.wait(0, 2, time.monotonic() + 0.01)
    assert gate.missed

    threading.Timer(0.05, gate.open_all).start()
    gate.wait(1, 2, time.monotonic() + 30.0)
