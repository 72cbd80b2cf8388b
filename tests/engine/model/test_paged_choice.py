"""Choice: attention's path is decided once for a class of segments; without a usable kernel it gathers."""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from kvtier.engine.model import paged_choice
from kvtier.engine.model.paged_choice import ALL_GATHERED, Choice, Shape, choose, class_of
from kvtier.engine.model.paged_segment import Segment, segment
from kvtier.tiers.naming.groups import FullAttention, SlidingWindow

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GROUP = FullAttention(16)
SHAPE = Shape(CPU, torch.float32, 8, 2, 64, GROUP, has_softcap=False, has_sinks=False)
SLAB = torch.zeros(10, 1, 2, 16, 2, 64)


def part(start: int, num_tokens: int, group: FullAttention | SlidingWindow = GROUP) -> Segment:
    return segment(group, [0] * 10_000, slice(0, num_tokens), start, num_tokens, CPU)


NUM_HEADS = count(10, 2)


def new_shape(device: torch.device = CPU) -> Shape:
    """One that this process has made no choice for."""
    return replace(SHAPE, device=device, num_heads=next(NUM_HEADS))


def test_on_a_cpu_everything_is_gathered() -> None:
    choice = choose(new_shape(), SLAB)

    assert not any(choice.in_place(part(start, count)) for start in (0, 4000, 100_000) for count in (1, 64, 4096))


def test_a_class_is_of_the_number_of_queries_and_of_the_keys_that_they_read() -> None:
    assert class_of(part(0, 1)) == (0, 0)
    assert class_of(part(8000, 1)) == (0, 1)
    assert class_of(part(100, 2)) == (1, 0)
    assert class_of(part(30_000, 256)) == (1, 2)
    assert class_of(part(30_000, 257)) == (2, 2)
    assert class_of(part(30_000, 257, SlidingWindow(16, 512))) == (2, 0)


def test_every_class_goes_one_way_and_what_was_not_measured_is_read_in_place() -> None:
    choice = Choice(frozenset({(0, 0), (1, 0)}))

    assert not choice.in_place(part(0, 1))
    assert not choice.in_place(part(1000, 64))
    assert choice.in_place(part(4000, 1))
    assert Choice(frozenset()).in_place(part(0, 1))
    assert not ALL_GATHERED.in_place(part(100_000, 4096))


@pytest.fixture
def _pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have choosing take the device for CUDA; each test replaces what is measured."""
    pytest.importorskip("triton", reason="Triton is not installed (it is no part of torch for the CPU)")
    nothing = SimpleNamespace(
        get_rng_state=lambda device: None, set_rng_state=lambda state, device: None, empty_cache=lambda: None
    )
    monkeypatch.setattr(paged_choice.torch, "cuda", nothing)


@pytest.mark.usefixtures("_pretend_cuda")
def test_a_shape_is_measured_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Shape] = []

    def measure(shape: Shape) -> float:
        measured.append(shape)
        return 0.5

    monkeypatch.setattr(paged_choice, "largest_error", measure)
    one, other = new_shape(CUDA), new_shape(CUDA)

    for shape in (one, replace(one), other, one):
        choose(shape, SLAB)

    assert measured == [one, other]


@pytest.mark.usefixtures("_pretend_cuda")
@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_a_kernel_that_answers_otherwise_is_never_used(error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_choice, "largest_error", lambda shape: error)
    monkeypatch.setattr(paged_choice, "both_ways", lambda *_: (1.0, 2.0))  # although it would be faster
    monkeypatch.setattr(paged_choice, "median_seconds", lambda call: call)

    assert choose(new_shape(CUDA), SLAB) == ALL_GATHERED


@pytest.mark.usefixtures("_pretend_cuda")
@pytest.mark.parametrize(
    "error", [RuntimeError("Failed to find C compiler"), ImportError("no libcuda.so"), TypeError("another Triton")]
)
def test_a_kernel_that_does_not_compile_is_never_used(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(shape: Shape) -> float:
        raise error

    monkeypatch.setattr(paged_choice, "largest_error", fail)

    assert choose(new_shape(CUDA), SLAB) == ALL_GATHERED


@pytest.mark.usefixtures("_pretend_cuda")
def test_each_class_goes_the_way_that_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls(shape: Shape, slab: torch.Tensor, segments: list[Segment]) -> tuple[float, float]:
        return (2.0, 1.0) if class_of(segments[0])[1] == 0 else (1.0, 2.0)

    monkeypatch.setattr(paged_choice, "largest_error", lambda shape: 0.0)
    monkeypatch.setattr(paged_choice, "both_ways", calls)
    monkeypatch.setattr(paged_choice, "median_seconds", lambda call: call)

    choice = choose(new_shape(CUDA), SLAB)

    assert choice == Choice(frozenset({(0, 0), (1, 0)}))
    assert choice.in_place(part(30_000, 1))
