"""Copies and compute in order: spill after compute, the next writer after the spill, compute after its promotion.

On a GPU a kernel holds up one side, so that a copy or kernel that does not wait overtakes it and meets poison (NaN in
slots that hold nothing). What each test catches: the `wait_event` of `CudaLane`, or the waits at the end of a copy.
"""

import queue
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from cuda_devices import CUDA_KINDS, GPU_0, CudaDevice

from kvtier.transfer.block_memory import BlockMemory, CpuMemory
from kvtier.transfer.cuda.copy_choice import COPIES
from kvtier.transfer.cuda.lane import CudaLane
from kvtier.transfer.cuda.memory import CudaMemory
from kvtier.transfer.lane import Finished, Lane, ThreadLane, Transfer
from kvtier.transfer.poisoned_memory import POISON, PoisonedMemory

DEADLINE_S = 60.0  # for what takes milliseconds: reached only when a test fails
BLOCK_BYTES = 1 << 20
NUM_SLOTS = 4


@dataclass
class Machine:
    """Device slots, host slots and one lane between them; "compute" is what the test's own thread does."""

    blocks: torch.Tensor  # [num_slots, block_bytes]
    memory: PoisonedMemory
    lane: Lane
    finished: Finished
    cuda: CudaDevice | None = None

    def delay(self) -> None:
        """Keep the calling thread's stream busy: compute's, or a lane's inside its work."""
        if self.cuda is not None:
            self.cuda.delay()

    def compute(self, slot: int, value: int) -> None:
        self.blocks[slot].fill_(value)

    def read(self, slot: int) -> torch.Tensor:
        """A copy made in compute's order; look at it after `settle`."""
        return self.blocks[slot].clone()

    def settle(self) -> None:
        if self.cuda is not None:
            torch.cuda.synchronize()

    def submit(self, work: Callable[[], Any]) -> None:
        assert self.lane.submit(Transfer(work, 1, lambda transfer: None))

    def wait(self) -> None:
        """Wait until the transfer has come back, as `poll` would."""
        with self.time_passes():
            assert self.finished.get(timeout=DEADLINE_S).error is None

    def time_passes(self) -> AbstractContextManager[None]:
        return nullcontext() if self.cuda is None else self.cuda.time_passes()

    def host(self, slot: int) -> set[int]:
        return set(np.unique(np.frombuffer(self.memory.host_block(slot), np.uint8)).tolist())


def on_cpu(finished: Finished) -> Machine:
    blocks = torch.zeros(NUM_SLOTS, BLOCK_BYTES, dtype=torch.uint8)
    memory = PoisonedMemory(CpuMemory(blocks.numpy(), NUM_SLOTS), blocks)
    return Machine(blocks, memory, ThreadLane(finished, "test"), finished)


def on_cuda(finished: Finished, way: str, cuda: CudaDevice) -> Machine:
    blocks = torch.zeros(NUM_SLOTS, BLOCK_BYTES, dtype=torch.uint8, device=GPU_0)
    below: BlockMemory = CudaMemory(blocks, NUM_SLOTS, way=way)
    assert below.wait_prepared(DEADLINE_S)
    lane = CudaLane(finished, "test", GPU_0, num_threads=2)
    machine = Machine(blocks, PoisonedMemory(below, blocks), lane, finished, cuda)
    machine.delay()  # kernels and buffers that are used for the first time are loaded and made, which takes its time
    machine.compute(0, 1)
    machine.read(0)
    for slot in (0, 2):
        machine.submit(lambda slot=slot: machine.memory.to_host([slot], [slot]))
        machine.submit(lambda slot=slot: machine.memory.to_device([slot + 1], [slot + 1]))
    for _ in range(4):
        machine.wait()
    machine.memory.poison(range(NUM_SLOTS))
    torch.cuda.synchronize(GPU_0)
    return machine


ON_CUDA = [
    pytest.param((kind, way), id=f"{kind.name}-{way}", marks=kind.marks(way)) for kind in CUDA_KINDS for way in COPIES
]


@pytest.fixture(params=[pytest.param((None, ""), id="cpu"), *ON_CUDA])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    kind, way = request.param
    finished: Finished = queue.SimpleQueue()
    with nullcontext() if kind is None else kind.opened() as cuda:
        machine = on_cpu(finished) if cuda is None else on_cuda(finished, way, cuda)
        yield machine
        with machine.time_passes():
            machine.lane.close()
        machine.memory.close()


def test_a_spill_waits_for_the_compute_that_wrote_the_block(machine: Machine) -> None:
    """Without `wait_event` the copy overtakes the delay and takes poison."""
    machine.delay()
    machine.compute(2, value=7)
    machine.submit(lambda: machine.memory.to_host([2], [3]))

    machine.wait()

    assert machine.host(3) == {7}


def test_a_slot_s_next_writer_waits_for_the_spill(machine: Machine) -> None:
    """Without the wait at the end of a copy its transfer comes back early, and the copy takes the poison."""
    machine.compute(2, value=7)

    def slow_spill() -> None:
        machine.delay()
        machine.memory.to_host([2], [3])

    machine.submit(slow_spill)
    machine.wait()
    machine.memory.poison([2])
    machine.settle()

    assert machine.host(3) == {7}


def test_compute_waits_for_the_promotion_of_its_block(machine: Machine) -> None:
    """Without the wait at the end of a copy its transfer comes back early, and compute reads poison."""
    machine.memory.host_block(1)[:] = b"\x09" * BLOCK_BYTES

    def slow_promotion() -> None:
        machine.delay()
        machine.memory.to_device([1], [2])

    machine.submit(slow_promotion)
    machine.wait()
    seen = machine.read(2)
    machine.settle()

    assert seen.unique().tolist() == [9]


def test_a_promotion_waits_for_compute_that_still_reads_its_slot(machine: Machine) -> None:
    """Without `wait_event` the promotion overtakes the delay, and compute reads what it brings."""
    machine.compute(2, value=7)
    machine.memory.host_block(1)[:] = b"\x09" * BLOCK_BYTES
    machine.delay()
    seen = machine.read(2)
    machine.submit(lambda: machine.memory.to_device([1], [2]))

    machine.wait()
    promoted = machine.read(2)
    machine.settle()

    assert seen.unique().tolist() == [7]
    assert promoted.unique().tolist() == [9]


def test_a_slot_that_was_never_written_shows_as_poison_wherever_it_gets_to(machine: Machine) -> None:
    machine.memory.poison([2])
    machine.submit(lambda: machine.memory.to_host([2], [3]))

    machine.wait()

    assert machine.host(3) == {POISON}


@pytest.mark.parametrize("machine", ON_CUDA, indirect=True)
def test_compute_on_other_blocks_does_not_wait_for_a_promotion(machine: Machine) -> None:
    """If compute waited for the lane and not for its own blocks, the promotion would be back when it has finished."""

    def slow_promotion() -> None:
        machine.delay()
        machine.memory.to_device([1], [2])

    machine.submit(slow_promotion)
    machine.compute(0, value=5)
    torch.cuda.current_stream().synchronize()

    assert machine.finished.empty()
    machine.wait()


@pytest.mark.parametrize("machine", ON_CUDA, indirect=True)
def test_allocation_never_waits_for_a_copy(machine: Machine) -> None:
    """Handing a slot out enqueues at most kernels; submitting takes no part of a copy's time."""

    def slow_spill(slot: int) -> None:
        machine.delay()
        machine.memory.to_host([slot], [slot])

    machine.submit(lambda: slow_spill(1))
    machine.submit(lambda: slow_spill(2))

    assert machine.finished.empty()
    assert machine.lane.num_pending == 2
    machine.wait()
    machine.wait()
