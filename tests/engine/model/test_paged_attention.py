"""The benchmark of attention: its rows, with a clock of its own, on any machine."""

import os
from collections.abc import Callable

import paged_attention
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (it is no part of torch for the CPU)")
INTERPRETED = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="TRITON_INTERPRET is not 1")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _calls_take_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(calls: list[Callable[[], None]]) -> list[float]:
        for call in calls:
            call()
        return [1.0 for _ in calls]

    monkeypatch.setattr(paged_attention, "seconds", seconds)


def test_a_copy_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "COPY_BYTES", 1 << 20)

    assert paged_attention.copy_speed(CPU) == 2 * (1 << 20) / 1e9


@INTERPRETED
@pytest.mark.parametrize(("num_tokens", "unit"), [(1, "%"), (24, "TFLOP/s")])
def test_both_ways_and_the_choice_are_rows(monkeypatch: pytest.MonkeyPatch, num_tokens: int, unit: str) -> None:
    monkeypatch.setattr(paged_attention, "DTYPE", torch.float16)  # Triton's interpreter has no bfloat16
    slab = torch.randn(40, paged_attention.NUM_LAYERS, 2, 16, 8, 128, dtype=torch.float16)

    rows = paged_attention.compare("some", slab, count=2, start=64, num_tokens=num_tokens, roof=1.0)

    assert [(row.unit, row.ok) for row in rows] == [("ms", None), ("ms", None), ("x", True), (unit, None)]
