"""Fast paths that fail or differ on a machine: the model computes the same by the plain ones, and one line says so."""

import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_models import COMMON, VOCAB, build
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvtier.engine.model import fast_path
from kvtier.engine.model.cpu import row_kernel
from kvtier.engine.model.cpu.packed_linears import PackedLinears
from kvtier.engine.model.runner import Chunk, ModelRunner

STEPS = (37, 1, 60, 1)
KERNELS = {  # by the words of the log's line: where each path's kernel is looked up
    "packed linear layers": (torch.ops.mkldnn, "_linear_pointwise"),
    "attention of single tokens": (row_kernel, "attend_rows"),
}
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.02}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every path tried again, and taken at all where the tests run without fast paths."""
    monkeypatch.setattr(fast_path, "outcomes", {})
    monkeypatch.delenv(fast_path.SWITCH, raising=False)


def fails(*_: Any) -> None:
    raise RuntimeError("needs the cpu support avx_ne_convert or avx512bw")


def wrong(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel with another result, whether it returns it or writes it to its last argument."""

    def computes_wrongly(*args: Any) -> Any:
        result = kernel(*args)
        if result is None:
            output: np.ndarray = args[-1]
            output += 1
            return None
        return result + 1

    return computes_wrongly


def error_of(model: PreTrainedModel) -> float:
    """How far the logits of `ModelRunner` are from the model's own, as a share of the largest."""
    prompt = random.Random(3).choices(range(VOCAB), k=sum(STEPS))
    with torch.inference_mode():
        own = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float()
    runner = ModelRunner(model, 16, 1 << 20)
    tables = [random.Random(5).sample(range(runner.num_slots), 8) for _ in runner.groups]
    start, worst = 0, 0.0
    for num_tokens in STEPS:
        logits = runner.run([Chunk(prompt[start : start + num_tokens], start, tables)])[0]
        start += num_tokens
        worst = max(worst, float((logits - own[start - 1]).abs().max() / own.abs().max()))
    runner.close()
    return worst


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [it.getMessage() for it in caplog.records if it.levelno >= logging.WARNING]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_wrong", [False, True], ids=["raises", "differs"])
@pytest.mark.parametrize("path", KERNELS)
def test_a_kernel_that_does_not_work_here_is_not_used(
    path: str, is_wrong: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place, name = KERNELS[path]
    kernel = getattr(place, name)
    monkeypatch.setattr(place, name, wrong(kernel) if is_wrong else fails)

    assert error_of(build("llama").to(dtype)) <= DTYPES[dtype]

    (line,) = (line for line in lines(caplog) if path in line)
    assert ("differs" if is_wrong and "packed" not in path else "not used") in line


def test_the_line_says_what_failed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(row_kernel, "attend_rows", fails)

    error_of(build("llama"))

    (line,) = lines(caplog)
    assert "RuntimeError: needs the cpu support avx_ne_convert" in line


def test_weights_that_cannot_be_packed_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", fails)

    assert error_of(build("llama")) <= DTYPES[torch.float32]
    assert len(lines(caplog)) == 1


def test_without_numba_the_model_runs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, row_kernel.__name__, None)  # importing it is an ImportError

    assert error_of(build("llama")) <= DTYPES[torch.float32]
    (line,) = lines(caplog)
    assert "ImportError" in line or "ModuleNotFoundError" in line


def test_kernels_that_numba_does_not_compile_are_not_used() -> None:
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}

    done = subprocess.run(
        [sys.executable, "-c", "import kvtier.engine.model.cpu.row_kernel"],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert "ImportError: NUMBA_DISABLE_JIT is set" in done.stderr


def test_layers_of_zeros_are_packed_too(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()

    num_linears = sum(type(layer) is torch.nn.Linear for layer in model.modules())
    assert PackedLinears(model, 1 << 40).num_layers == num_linears
    assert not lines(caplog)


def test_a_torch_without_onednn_packs_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)

    assert error_of(build("llama")) <= DTYPES[torch.float32]
    assert not lines(caplog)


def test_memory_that_is_short_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory() -> float:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes")

    with pytest.raises(MemoryError):
        fast_path.works("a path", None, no_memory, 1e-3)

    assert fast_path.works("a path", None, lambda: 0.0, 1e-3)


def test_a_path_is_tried_once_for_each_subject() -> None:
    tried: list[str] = []

    def error_for(subject: str, error: float) -> bool:
        return fast_path.works("a path", subject, lambda: tried.append(subject) or error, 1e-3)

    answers = [error_for("one", 0.0), error_for("one", 0.0), error_for("other", float("nan")), error_for("one", 0.0)]

    assert answers == [True, True, False, True]
    assert tried == ["one", "other"]


@pytest.mark.parametrize("head_dim", [16, 20, 24, 80])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_and_size_of_a_head_computes_what_the_model_does(head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**{**COMMON, "head_dim": head_dim})).eval().to(dtype)

    assert error_of(model) <= DTYPES[dtype]


def test_switched_off_no_kernel_runs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(fast_path.SWITCH, "off")
    for place, name in KERNELS.values():
        monkeypatch.setattr(place, name, fails)

    assert error_of(build("llama")) <= DTYPES[torch.float32]
    assert not lines(caplog)
