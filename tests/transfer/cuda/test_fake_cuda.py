"""The fake CUDA device: it runs late, it orders what must be ordered, and every misuse is an error."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from cuda_devices import GPU_0
from fake_cuda import CudaMisuse, FakeDevice, Late, Schedule, Seeded, installed
from fake_cuda.memory import Memory
from fake_cuda.runtimes import INVALID_VALUE, Bindings, SourceAccessOrder

from kvtier.transfer.cuda.copies import SourceOrder, cuda_batch
from kvtier.transfer.cuda.pinning import cuda_pin

NUM_BYTES = 4096


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    """A fake device whose misuses do not count at the end: these tests are about them."""
    with installed(Late()) as device:
        yield device
        for address, _ in device.memory.left_registered:
            device.memory.unregister(address)
        device.violations.clear()


def pinned(value: int = 0) -> torch.Tensor:
    return torch.full((NUM_BYTES,), value, dtype=torch.uint8, pin_memory=True)


def on_device(value: int = 0) -> torch.Tensor:
    blocks = torch.full((NUM_BYTES,), value, dtype=torch.uint8, device=GPU_0)
    torch.cuda.synchronize()
    return blocks


# --- it is late


def test_a_copy_down_has_not_landed_before_the_host_waits(device: FakeDevice) -> None:
    blocks, host = on_device(7), pinned(3)

    host.copy_(blocks, non_blocking=True)
    before = set(host.tolist())
    torch.cuda.current_stream().synchronize()

    assert not before & {3, 7}, "neither the old bytes nor the new ones: nobody may count on either"
    assert set(host.tolist()) == {7}


def test_a_copy_up_takes_the_bytes_that_pinned_memory_has_when_it_runs(device: FakeDevice) -> None:
    blocks, host = on_device(), pinned(7)

    blocks.copy_(host, non_blocking=True)
    host.fill_(8)

    assert set(blocks.tolist()) == {8}


def test_a_copy_up_takes_the_bytes_that_ordinary_memory_has_when_it_is_called(device: FakeDevice) -> None:
    blocks, host = on_device(), torch.full((NUM_BYTES,), 7, dtype=torch.uint8)

    blocks.copy_(host, non_blocking=True)
    host.fill_(8)

    assert set(blocks.tolist()) == {7}


def test_waiting_for_an_event_runs_what_is_before_it_and_nothing_else(device: FakeDevice) -> None:
    blocks, early, late = on_device(7), pinned(), pinned()
    copied = torch.cuda.Event()

    early.copy_(blocks, non_blocking=True)
    copied.record()
    late.copy_(blocks, non_blocking=True)
    copied.synchronize()

    assert set(early.tolist()) == {7}
    assert set(late.tolist()) != {7}
    assert copied.query()
    assert not torch.cuda.current_stream().query()


def test_what_one_stream_waits_for_in_another_runs_first(device: FakeDevice) -> None:
    blocks, host, side = on_device(1), pinned(), torch.cuda.Stream()
    blocks.fill_(7)
    side.wait_stream(torch.cuda.current_stream())

    with torch.cuda.stream(side):
        host.copy_(blocks, non_blocking=True)
    side.synchronize()

    assert set(host.tolist()) == {7}


def test_a_long_kernel_ends_when_its_maker_lets_time_pass_and_not_before(device: FakeDevice) -> None:
    side, ended = torch.cuda.Stream(), threading.Event()
    device.hold(side.state, cycles=1000)
    waiting = threading.Thread(target=lambda: (side.synchronize(), ended.set()))
    waiting.start()

    before = ended.is_set()
    with device.time_passes():
        waiting.join()

    assert not before
    assert ended.is_set()


def test_the_device_s_time_is_counted_and_not_measured(device: FakeDevice) -> None:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    first.record()
    torch.cuda._sleep(2_000_000_000)
    last.record()
    last.synchronize()

    assert first.elapsed_time(last) == pytest.approx(1000.0)


@pytest.mark.parametrize("schedule", [Late(), Seeded(1), Seeded(2)], ids=str)
def test_any_schedule_gives_the_same_bytes_after_a_wait(schedule: Schedule) -> None:
    with installed(schedule):
        blocks, host, side = on_device(), pinned(), torch.cuda.Stream()

        for value in range(20):
            blocks.fill_(value)
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                host.copy_(blocks, non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)
        side.synchronize()

        assert set(host.tolist()) == {19}


# --- every misuse is an error


def test_two_streams_that_write_the_same_bytes_unordered(device: FakeDevice) -> None:
    blocks = on_device()
    blocks.fill_(1)

    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(CudaMisuse, match="unordered"):
        blocks.fill_(2)


def test_reading_what_another_stream_may_still_write(device: FakeDevice) -> None:
    blocks, host = on_device(), pinned()
    blocks.fill_(1)

    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(CudaMisuse, match="unordered"):
        host.copy_(blocks, non_blocking=True)


def test_two_streams_may_read_the_same_bytes_and_write_others(device: FakeDevice) -> None:
    blocks, one, other = on_device(7), pinned(), pinned()

    one.copy_(blocks, non_blocking=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        other.copy_(blocks, non_blocking=True)
    torch.cuda.synchronize()

    assert set(one.tolist()) == set(other.tolist()) == {7}


def test_a_race_is_found_whatever_has_run_already() -> None:
    def race() -> None:
        blocks = on_device()
        for _ in range(10):
            with torch.cuda.stream(torch.cuda.Stream()):
                blocks.fill_(1)

    with pytest.raises(CudaMisuse, match="unordered"), installed(Seeded(1)):
        race()


def test_an_event_that_was_never_recorded_is_no_wait(device: FakeDevice) -> None:
    with pytest.raises(CudaMisuse, match="never recorded"):
        torch.cuda.current_stream().wait_event(torch.cuda.Event())


def test_the_time_between_events_that_have_not_happened(device: FakeDevice) -> None:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    last.record()

    with pytest.raises(CudaMisuse, match="before they have happened"):
        first.elapsed_time(last)


def test_registering_the_same_memory_twice(device: FakeDevice) -> None:
    host = np.zeros(NUM_BYTES, np.uint8)
    cuda_pin(GPU_0)(host.ctypes.data, NUM_BYTES)

    with pytest.raises(RuntimeError, match="CUDA error 712"):
        cuda_pin(GPU_0)(host.ctypes.data + NUM_BYTES - 1, 1)

    assert "registered twice" in device.violations[0]


def test_unregistering_memory_that_is_not_registered(device: FakeDevice) -> None:
    host = np.zeros(NUM_BYTES, np.uint8)
    unpin = cuda_pin(GPU_0)(host.ctypes.data, NUM_BYTES)

    unpin()
    unpin()

    assert "is not registered" in device.violations[0]


def test_unregistering_memory_under_a_copy(device: FakeDevice) -> None:
    blocks, host = on_device(), torch.zeros(NUM_BYTES, dtype=torch.uint8)
    unpin = cuda_pin(GPU_0)(host.data_ptr(), NUM_BYTES)
    host.copy_(blocks, non_blocking=True)

    unpin()

    assert "unregistered under a copy down" in device.violations[0]


def test_memory_that_is_still_registered_at_the_end() -> None:
    host = np.zeros(NUM_BYTES, np.uint8)

    with pytest.raises(CudaMisuse, match="1 pieces of host memory are still registered"), installed(Late()):
        cuda_pin(GPU_0)(host.ctypes.data, NUM_BYTES)


def test_misuse_whose_exception_was_caught_is_an_error_at_the_end() -> None:
    def misuse() -> None:
        with contextlib.suppress(Exception):
            torch.cuda.current_stream().wait_event(torch.cuda.Event())

    with pytest.raises(CudaMisuse, match="never recorded"), installed(Late()):
        misuse()


class MemoryRegisteredMeanwhile(Memory):
    """Memory that another thread registers right after each look at it."""

    def is_pageable(self, address: int, num_bytes: int) -> bool:
        found = super().is_pageable(address, num_bytes)
        self.register(address, num_bytes)
        return found

    def is_registered(self, address: int, num_bytes: int) -> bool:
        found = super().is_registered(address, num_bytes)
        self.register(address, num_bytes)
        return found


def test_a_copy_to_memory_that_is_being_registered_is_no_misuse(device: FakeDevice) -> None:
    blocks, host = on_device(7), torch.zeros(NUM_BYTES, dtype=torch.uint8)
    device.memory.__class__ = MemoryRegisteredMeanwhile  # keeps what is allocated so far

    host.copy_(blocks, non_blocking=True)
    torch.cuda.current_stream().synchronize()

    assert set(host.tolist()) == {7}
    assert device.violations == []


def test_a_copy_over_the_end_of_a_registration(device: FakeDevice) -> None:
    blocks, host = on_device(), torch.zeros(NUM_BYTES, dtype=torch.uint8)
    cuda_pin(GPU_0)(host.data_ptr(), NUM_BYTES // 2)

    with pytest.raises(CudaMisuse, match="over the end of a registration"):
        host.copy_(blocks, non_blocking=True)


def batch(device: FakeDevice, target: int, source: int, num_bytes: int, stream: int) -> int:
    attributes = [Bindings(device).cudaMemcpyAttributes()]
    attributes[0].srcAccessOrder = SourceAccessOrder.STREAM
    return Bindings(device).cudaMemcpyBatchAsync([target], [source], [num_bytes], 1, attributes, [0], 1, stream)[0]


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda blocks, host: (host.data_ptr(), blocks.data_ptr() + 1, NUM_BYTES), id="device"),
        pytest.param(lambda blocks, host: (host.data_ptr() - 1, blocks.data_ptr(), NUM_BYTES), id="host"),
        pytest.param(lambda blocks, host: (np.zeros(9).ctypes.data, blocks.data_ptr(), 9), id="pageable"),
    ],
)
def test_a_batch_out_of_the_bounds_of_device_or_registered_memory(
    device: FakeDevice, end: Callable[[torch.Tensor, torch.Tensor], tuple[int, int, int]]
) -> None:
    target, source, num_bytes = end(on_device(), pinned())

    assert batch(device, target, source, num_bytes, torch.cuda.Stream().cuda_stream) == INVALID_VALUE


def test_a_batch_on_the_legacy_default_stream(device: FakeDevice) -> None:
    blocks, host = on_device(), pinned()

    assert batch(device, host.data_ptr(), blocks.data_ptr(), NUM_BYTES, stream=0) == INVALID_VALUE


def test_a_batch_whose_sources_may_be_read_at_any_time_while_kernels_write_them(device: FakeDevice) -> None:
    blocks, host = on_device(), pinned()

    with torch.cuda.stream(torch.cuda.Stream()):
        blocks.fill_(7)
        with pytest.raises(CudaMisuse, match="unordered"):
            cuda_batch(GPU_0)([host.data_ptr()], [blocks.data_ptr()], [NUM_BYTES], SourceOrder.ANY)


def test_a_batch_that_writes_a_slot_twice(device: FakeDevice) -> None:
    blocks, host = on_device(), pinned()
    targets, sources = [host.data_ptr()] * 2, [blocks.data_ptr(), blocks.data_ptr() + 64]

    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(CudaMisuse, match="twice"):
        cuda_batch(GPU_0)(targets, sources, [64, 64], SourceOrder.STREAM)


def test_a_kernel_that_gathers_a_row_that_is_not_there(device: FakeDevice) -> None:
    blocks = torch.zeros(4, 64, dtype=torch.uint8, device=GPU_0)
    index, out = torch.tensor([1, 4]).to(GPU_0), torch.empty(2, 64, dtype=torch.uint8, device=GPU_0)

    with pytest.raises(CudaMisuse, match="rows 1 to 4 of 4"):
        torch.index_select(blocks, 0, index, out=out)


def test_an_operation_that_it_does_not_know(device: FakeDevice) -> None:
    with pytest.raises(NotImplementedError, match="cumsum"):
        on_device().cumsum(0)
