"""The memories of a model's groups: all are made, or those that were made are closed."""

import pytest
from small_models import build

from kvtier.engine.model import runner
from kvtier.engine.model.runner import ModelRunner
from kvtier.transfer.block_memory import CpuMemory


def test_a_memory_that_cannot_be_made_closes_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU host memory would stay pinned, and the next engine could not have it."""
    closed: list[CpuMemory] = []

    class Second(CpuMemory):
        num_made = 0

        def __init__(self, *arguments: object) -> None:
            Second.num_made += 1
            if Second.num_made == 2:
                raise MemoryError("no more")
            super().__init__(*arguments)  # type: ignore[arg-type]  # as they were given

        def close(self) -> None:
            closed.append(self)
            super().close()

    monkeypatch.setattr(runner, "CpuMemory", Second)
    model_runner = ModelRunner(build("gemma3"), 16, 1 << 22)  # two groups

    with pytest.raises(MemoryError):
        model_runner.memories(1 << 20)

    model_runner.close()
    assert len(closed) == 1
