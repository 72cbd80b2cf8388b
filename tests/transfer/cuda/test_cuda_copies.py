"""The ways to copy: what each asks of CUDA, run here on ordinary memory; test_block_memory.py runs them on a GPU."""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from kvtier.transfer.block_memory import Slots
from kvtier.transfer.cuda import copies as cuda_copies
from kvtier.transfer.cuda import copy_choice
from kvtier.transfer.cuda.copies import (
    BatchCopies,
    BlockCopies,
    Ends,
    LoopCopies,
    SourceOrder,
    StagedCopies,
    cuda_batch,
)
from kvtier.transfer.cuda.copy_choice import CopyChoice, choose_copies, fastest, num_trial_blocks
from kvtier.transfer.cuda.kernel import KernelCopies
from kvtier.transfer.cuda.memory import methods_for

NUM_DEVICE_SLOTS = 40
NUM_HOST_SLOTS = 60
BLOCK_SIZES = [5003, 4096]
Batch = tuple[list[int], list[int], list[int], SourceOrder]


class Submitter:
    """Stands for `cudaMemcpyBatchAsync`: records what it was asked for and does it, last copy first."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    def __call__(
        self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], order: SourceOrder
    ) -> None:
        self.batches.append((list(targets), list(sources), list(sizes), order))
        for target, source, num_bytes in reversed(list(zip(targets, sources, sizes, strict=True))):
            ctypes.memmove(target, source, num_bytes)


def make_ends(block_bytes: int, slots_per_piece: int = 7) -> Ends:
    generator = torch.Generator().manual_seed(1)
    return Ends(
        torch.randint(0, 256, (NUM_DEVICE_SLOTS, block_bytes), dtype=torch.uint8, generator=generator),
        torch.randint(0, 256, (NUM_HOST_SLOTS, block_bytes), dtype=torch.uint8, generator=generator),
        slots_per_piece,
    )


WAYS: Mapping[str, Callable[[Ends], BlockCopies]] = {
    "batch": lambda ends: BatchCopies(ends, Submitter()),
    "loop": LoopCopies,
    "staged": StagedCopies,
}


@pytest.fixture(autouse=True)
def small_stagings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make staging buffers of four blocks, so that a copy takes several."""
    monkeypatch.setattr(cuda_copies, "STAGING_BYTES", 4 * 5003)


def slots(seed: int, count: int) -> tuple[Slots, Slots]:
    """As many device slots as host slots; some neighbours among them."""
    rng = np.random.default_rng(seed)
    device = np.concatenate([np.arange(count // 2), count // 2 + rng.permutation(NUM_DEVICE_SLOTS - count // 2)])
    host = np.concatenate([20 + np.arange(count // 2), rng.permutation(20)])
    return device[:count], host[:count]


@pytest.mark.parametrize("block_bytes", BLOCK_SIZES)
@pytest.mark.parametrize("count", [0, 1, 4, 5, 8, 9, 30])
@pytest.mark.parametrize("way", WAYS)
def test_a_way_down_changes_its_host_slots_and_nothing_else(way: str, count: int, block_bytes: int) -> None:
    ends = make_ends(block_bytes)
    above, below = ends.device.clone(), ends.host.clone()
    device, host = slots(count, count)

    WAYS[way](ends).to_host(device, host)

    below[host] = above[device]
    assert torch.equal(ends.host, below)
    assert torch.equal(ends.device, above)


@pytest.mark.parametrize("block_bytes", BLOCK_SIZES)
@pytest.mark.parametrize("count", [0, 1, 4, 5, 8, 9, 30])
@pytest.mark.parametrize("way", WAYS)
def test_a_way_up_changes_its_device_slots_and_nothing_else(way: str, count: int, block_bytes: int) -> None:
    ends = make_ends(block_bytes)
    above, below = ends.device.clone(), ends.host.clone()
    device, host = slots(count, count)

    WAYS[way](ends).to_device(host, device)

    above[device] = below[host]
    assert torch.equal(ends.device, above)
    assert torch.equal(ends.host, below)


@pytest.mark.parametrize("way", WAYS)
def test_several_threads_may_copy_at_once(way: str) -> None:
    ends = make_ends(4096)
    above = ends.device.clone()
    copies = WAYS[way](ends)
    device, host = np.arange(NUM_DEVICE_SLOTS), np.arange(NUM_DEVICE_SLOTS)[::-1].copy()
    parts = [slice(start, start + 10) for start in range(0, 40, 10)]
    threads = [threading.Thread(target=copies.to_host, args=(device[part], host[part])) for part in parts]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert torch.equal(ends.host[host], above)


def test_staging_buffers_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = StagedCopies(make_ends(4096))
    device, host = slots(1, 9)
    copies.to_host(device, host)
    made: list[object] = []
    monkeypatch.setattr(torch, "empty", lambda *arguments, **named: made.append(arguments))

    for _ in range(3):
        copies.to_device(host, device)
        copies.to_host(device, host)

    assert made == []


# --- the batched call


def test_a_batch_is_one_call_with_a_copy_for_each_run() -> None:
    ends, submit = make_ends(4096), Submitter()

    BatchCopies(ends, submit).to_host(np.array([3, 4, 9]), np.array([5, 6, 1]))

    [(targets, sources, sizes, _)] = submit.batches
    assert targets == [ends.host[5].data_ptr(), ends.host[1].data_ptr()]
    assert sources == [ends.device[3].data_ptr(), ends.device[9].data_ptr()]
    assert sizes == [2 * 4096, 4096]


def test_the_device_is_read_in_the_order_of_the_stream_and_the_host_at_any_time() -> None:
    submit = Submitter()
    ends = make_ends(4096)
    copies = BatchCopies(ends, submit)

    copies.to_host(np.array([3]), np.array([5]))
    copies.to_device(np.array([5]), np.array([3]))

    (_, _, _, down), (targets, _, _, up) = submit.batches
    assert (down, up) == (SourceOrder.STREAM, SourceOrder.ANY)
    assert targets == [ends.device[3].data_ptr()]


class FakeStream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle
        self.waits: list[int] = []

    def wait_stream(self, other: "FakeStream") -> None:
        self.waits.append(other.cuda_stream)


class FakeRuntime:
    """Stands for `cuda.bindings.runtime`, with the names and the shapes of answers of CUDA 12.9 and 13."""

    def __init__(self, answer: tuple[object, ...]) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.cudaError_t = SimpleNamespace(cudaSuccess=0)
        self.cudaMemcpyAttributes = SimpleNamespace
        self.cudaMemcpySrcAccessOrder = IntEnum("Order", {"Stream": 1, "DuringApiCall": 2, "Any": 3})
        self._answer = answer

    def cudaMemcpyBatchAsync(self, *arguments: object) -> tuple[object, ...]:
        self.calls.append(arguments)
        return self._answer


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[object], None]]:
    def install(runtime: object) -> None:
        bindings = ModuleType("cuda.bindings")
        for name, module in {"cuda": ModuleType("cuda"), "cuda.bindings": bindings}.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", runtime)

    return install


GPU_0 = torch.device("cuda", 0)


@pytest.mark.parametrize("answer", [(0,), (0, 0)], ids=["cuda13", "cuda12"])
def test_the_runtime_is_asked_on_the_current_stream(
    monkeypatch: pytest.MonkeyPatch, install: Callable[[object], None], answer: tuple[object, ...]
) -> None:
    runtime = FakeRuntime(answer)
    install(runtime)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(77))

    cuda_batch(GPU_0)([1, 2], [3, 4], [5, 6], SourceOrder.ANY)

    [(targets, sources, sizes, count, attributes, first, num_attributes, stream)] = runtime.calls
    assert (targets, sources, sizes, count) == ([1, 2], [3, 4], [5, 6], 2)
    assert (first, num_attributes, stream) == ([0], 1, 77)
    assert [attribute.srcAccessOrder for attribute in attributes] == [3]


def test_the_legacy_default_stream_is_left_and_joined_again(
    monkeypatch: pytest.MonkeyPatch, install: Callable[[object], None]
) -> None:
    runtime, default, beside = FakeRuntime((0,)), FakeStream(0), FakeStream(88)
    install(runtime)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: default)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: beside)

    cuda_batch(GPU_0)([1], [2], [3], SourceOrder.STREAM)

    assert runtime.calls[0][-1] == 88
    assert (beside.waits, default.waits) == ([0], [88])


@pytest.mark.parametrize("answer", [(35,), (35, None)], ids=["cuda13", "cuda12"])
def test_a_call_that_fails_says_so(
    monkeypatch: pytest.MonkeyPatch, install: Callable[[object], None], answer: tuple[object, ...]
) -> None:
    install(FakeRuntime(answer))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(77))

    with pytest.raises(RuntimeError, match="failed for 2 copies: 35"):
        cuda_batch(GPU_0)([1, 2], [3, 4], [5, 6], SourceOrder.STREAM)


def test_an_empty_batch_asks_nothing(monkeypatch: pytest.MonkeyPatch, install: Callable[[object], None]) -> None:
    runtime = FakeRuntime((0,))
    install(runtime)

    cuda_batch(GPU_0)([], [], [], SourceOrder.STREAM)

    assert not runtime.calls


def test_bindings_without_the_call_or_none_at_all_are_no_way(install: Callable[[object], None]) -> None:
    install(SimpleNamespace())  # of CUDA 12.7
    with pytest.raises(AttributeError):
        cuda_batch(GPU_0)

    install(None)
    with pytest.raises(ImportError):
        cuda_batch(GPU_0)


# --- the choice


def test_the_fastest_is_taken() -> None:
    assert fastest({"batch": 20.0, "loop": 40.0, "staged": 10.0}) == "loop"


def test_of_close_ones_the_first_is_taken() -> None:
    assert fastest({"batch": 37.0, "loop": 40.0, "staged": 40.5}) == "batch"


def test_one_that_does_not_work_is_not_taken() -> None:
    assert fastest({"batch": 0.0, "loop": 4.0}) == "loop"


def test_the_choice_is_measured_and_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(copy_choice, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))

    choice = choose_copies(WAYS, make_ends(5003))

    gb_per_s = NUM_DEVICE_SLOTS * 5003 / 1e9
    assert choice == CopyChoice("batch", "batch", dict.fromkeys(WAYS, gb_per_s), dict.fromkeys(WAYS, gb_per_s))
    assert str(choice).startswith("batch down, batch up (GB/s: batch 0.0 down 0.0 up, loop")


def test_a_way_that_fails_is_left_out_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    def missing(ends: Ends) -> BlockCopies:
        raise ImportError("No module named 'cuda'")

    with caplog.at_level("INFO", logger="kvtier"):
        choice = choose_copies({"batch": missing, "loop": LoopCopies}, make_ends(4096))

    assert (choice.down, choice.up) == ("loop", "loop")
    assert choice.down_gb_per_s["batch"] == 0
    assert "method batch is not available: No module named 'cuda'" in caplog.text


def test_no_way_that_works_raises() -> None:
    def missing(ends: Ends) -> BlockCopies:
        raise ImportError("no")

    with pytest.raises(RuntimeError, match="tried batch"):
        choose_copies({"batch": missing}, make_ends(4096))


def test_ways_are_tried_on_scattered_blocks() -> None:
    submit = Submitter()

    choose_copies({"batch": lambda ends: BatchCopies(ends, submit)}, make_ends(4096, slots_per_piece=1000))

    targets, _, sizes, _ = submit.batches[0]
    assert len(sizes) > NUM_DEVICE_SLOTS * 0.8
    assert targets != sorted(targets)


@pytest.mark.parametrize(
    ("block_bytes", "num_blocks"), [(64, 1024), (16 << 10, 1024), (1 << 20, 16), (4 << 20, 4), (64 << 20, 2)]
)
def test_a_trial_is_of_some_megabytes_and_never_of_one_block(block_bytes: int, num_blocks: int) -> None:
    assert num_trial_blocks(block_bytes) == num_blocks


def test_a_way_that_copies_wrong_bytes_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class OffByOne(LoopCopies):
        def to_device(self, host: Slots, device: Slots) -> None:
            super().to_device((host + 1) % NUM_DEVICE_SLOTS, device)

    with caplog.at_level("INFO"):
        choice = choose_copies({"fast": OffByOne, "loop": LoopCopies}, make_ends(4096))

    assert (choice.down, choice.up) == ("loop", "loop")
    assert "wrong bytes" in caplog.text


def test_a_kernel_is_not_tried_on_memory_that_is_not_pinned() -> None:
    """The kernel would end the process's CUDA context."""
    assert "kernel" not in methods_for(is_pinned=False)
    assert methods_for(is_pinned=True).keys() == methods_for(is_pinned=False).keys() | {"kernel"}


def test_the_kernel_needs_a_device() -> None:
    with pytest.raises(RuntimeError, match="CUDA device"):
        KernelCopies(make_ends(4096))
