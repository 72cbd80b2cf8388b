"""AttachedMemory: its host slots come and go with another process's segment, and its device slots stay."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_devices import EVERY_FAKE, GPU_0, CudaKind
from waiting import wait_for

from kvtier.transfer.attached_memory import AttachedMemory
from kvtier.transfer.block_memory import BlockMemory, CpuMemory
from kvtier.transfer.cuda.memory import CudaMemory

BLOCK_BYTES = 4096
NUM_DEVICE_SLOTS = 4
SEGMENT_BYTES = 6 * BLOCK_BYTES
DEADLINE_S = 60.0  # reached only when a test fails


@pytest.fixture
def segment() -> Iterator[int]:
    """The descriptor of a segment that is backed."""
    file = os.memfd_create("segment")
    os.posix_fallocate(file, 0, SEGMENT_BYTES)
    yield file
    os.close(file)


@pytest.fixture
def device() -> torch.Tensor:
    return torch.zeros(NUM_DEVICE_SLOTS, BLOCK_BYTES, dtype=torch.uint8)


@pytest.fixture
def memory(device: torch.Tensor) -> Iterator[AttachedMemory]:
    memory = AttachedMemory(lambda num_host_slots, file: CpuMemory(device.numpy(), num_host_slots, 2, file))
    yield memory
    memory.close()


def is_mapped() -> bool:
    """Whether this process maps a segment, or has a descriptor of one beside the test's."""
    targets = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder's own descriptor, or another thread's
            targets.append(os.readlink(link))
    num_files = sum("/memfd:segment" in target for target in targets)
    return num_files > 1 or "/memfd:segment" in Path("/proc/self/maps").read_text()


def test_before_it_is_attached_a_memory_has_its_device_slots_only(memory: AttachedMemory, device: torch.Tensor) -> None:
    device[1] = 7

    memory.copy(1, 2)

    assert (memory.num_device_slots, memory.block_bytes, memory.num_layers) == (NUM_DEVICE_SLOTS, BLOCK_BYTES, 2)
    assert memory.num_host_slots == 0
    assert memory.prepared_bytes == 0
    assert (device[2] == 7).all()
    for copy in (memory.to_host, memory.to_device, lambda *slots: memory.to_device_layers(*slots, range(1))):
        with pytest.raises(IndexError, match="host slots"):
            copy([0], [0])
    with pytest.raises(IndexError):
        memory.host_block(0)


def test_the_slots_of_what_was_attached_are_its_blocks(
    memory: AttachedMemory, device: torch.Tensor, segment: int
) -> None:
    device[1] = 7

    memory.attach(memory.prepare(segment, SEGMENT_BYTES))
    memory.to_host([1], [5])
    os.pwrite(segment, b"\x05" * BLOCK_BYTES, 2 * BLOCK_BYTES)
    memory.to_device([2], [3])

    assert memory.num_host_slots == 6
    assert set(os.pread(segment, BLOCK_BYTES, 5 * BLOCK_BYTES)) == {7}
    assert (device[3] == 5).all()


def test_what_is_prepared_is_used_only_once_it_is_attached(memory: AttachedMemory, segment: int) -> None:
    prepared = memory.prepare(segment, SEGMENT_BYTES)

    num_before = memory.num_host_slots
    memory.attach(prepared)

    assert num_before == 0
    assert memory.num_host_slots == 6


def test_a_detached_memory_maps_nothing_and_has_no_host_slots(memory: AttachedMemory, segment: int) -> None:
    memory.attach(memory.prepare(segment, SEGMENT_BYTES))
    assert is_mapped()

    memory.detach()

    assert memory.num_host_slots == 0
    wait_for(lambda: not is_mapped())
    with pytest.raises(IndexError, match="host slots"):
        memory.to_host([0], [0])


def test_another_segment_takes_the_place_of_the_one_before(
    memory: AttachedMemory, device: torch.Tensor, segment: int
) -> None:
    smaller = os.memfd_create("smaller")
    os.posix_fallocate(smaller, 0, 2 * BLOCK_BYTES)
    memory.attach(memory.prepare(segment, SEGMENT_BYTES))

    memory.attach(memory.prepare(smaller, 2 * BLOCK_BYTES))
    device[0] = 7
    memory.to_host([0], [1])

    assert memory.num_host_slots == 2
    assert set(os.pread(smaller, BLOCK_BYTES, BLOCK_BYTES)) == {7}
    assert not any(os.pread(segment, SEGMENT_BYTES, 0))
    wait_for(lambda: not is_mapped())
    os.close(smaller)


def test_the_memory_before_is_closed_when_another_is_attached(device: torch.Tensor, segment: int) -> None:
    closed: list[int] = []

    class Told(CpuMemory):
        def close(self) -> None:
            closed.append(self.num_host_slots)
            super().close()

    memory = AttachedMemory(lambda num_host_slots, file: Told(device.numpy(), num_host_slots, 2, file))
    for num_slots in (6, 2):
        memory.attach(memory.prepare(segment, num_slots * BLOCK_BYTES))

    wait_for(lambda: closed == [6])
    memory.close()
    assert sorted(closed) == [0, 2, 6]


def test_memory_that_was_prepared_in_vain_is_closed(memory: AttachedMemory, segment: int) -> None:
    memory.prepare(segment, SEGMENT_BYTES).close()

    assert not is_mapped()
    assert memory.num_host_slots == 0


@pytest.mark.parametrize(
    ("num_bytes", "why"), [(BLOCK_BYTES - 1, "too small for one block of"), (7 * BLOCK_BYTES, "the file has 24576")]
)
def test_a_segment_that_cannot_be_used_is_refused(
    memory: AttachedMemory, segment: int, num_bytes: int, why: str
) -> None:
    with pytest.raises(OSError, match=why):
        memory.prepare(segment, num_bytes)

    assert not is_mapped()


def test_detaching_does_not_wait_for_the_memory_to_be_given_up(device: torch.Tensor, segment: int) -> None:
    may_end, has_ended = threading.Event(), threading.Event()

    class Slow(CpuMemory):
        def close(self) -> None:
            assert may_end.wait(DEADLINE_S)
            super().close()
            has_ended.set()

    def make(num_host_slots: int, file: int | None) -> BlockMemory:
        return (CpuMemory if file is None else Slow)(device.numpy(), num_host_slots, 1, file)

    memory = AttachedMemory(make)
    memory.attach(memory.prepare(segment, SEGMENT_BYTES))

    memory.detach()

    assert not has_ended.is_set()
    may_end.set()
    memory.close()  # which does wait
    assert has_ended.is_set()


@pytest.mark.parametrize("kind", EVERY_FAKE)
def test_on_cuda_the_slots_are_pinned_while_they_are_attached(kind: CudaKind, segment: int) -> None:
    with kind.opened() as cuda:
        assert cuda.fake is not None
        blocks = torch.zeros(NUM_DEVICE_SLOTS, BLOCK_BYTES, dtype=torch.uint8, device=GPU_0)
        memory = AttachedMemory(lambda num_host_slots, file: CudaMemory(blocks, num_host_slots, 1, "batch", file))
        memory.attach(memory.prepare(segment, SEGMENT_BYTES))
        assert memory.wait_prepared(DEADLINE_S)
        num_pinned = sum(end - start for start, end in cuda.fake.memory.left_registered)
        blocks[1].fill_(7)

        memory.to_host([1], [5])
        content = os.pread(segment, SEGMENT_BYTES, 0)
        memory.detach()
        memory.close()

        assert num_pinned == SEGMENT_BYTES
        assert not cuda.fake.memory.left_registered
    assert np.frombuffer(content, np.uint8).reshape(6, -1).any(axis=1).tolist() == [False] * 5 + [True]
