"""Copies and compute in order: spill after compute, the next writer after the spill, compute after its promotion.

On a GPU a kernel holds up one side, so that a copy or kernel that does not wait overtakes it and meets poison (NaN in
slots that hold nothing). What each test catches: the `wait_event` of `CudaLane`, or the waits at the end of a copy.
"""

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.transfer.block_memory import BlockMemory, CpuMemory
from kvtier.transfer.cuda.copy_choice import COPIES
from kvtier.transfer.cuda.lane import CudaLane
from kvtier.transfer.cuda.memory import CudaMemory
from kvtier.transfer.lane import Finished, Lane, ThreadLane, Transfer
from kvtier.transfer.poisoned_memory import POISON, PoisonedMemory

DEADLINE_S = 10.0
LONG_KERNEL_CYCLES = 500_000_000  # about a quarter of a second on the GPUs of today
BLOCK_BYTES = 1 << 20
NUM_SLOTS = 4
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@dataclass
class Machine:
    """Device slots, host slots and one lane between them; "compute" is what the test's own thread does."""

    blocks: torch.Tensor  # [num_slots, block_bytes]
    memory: PoisonedMemory
    lane: Lane
    finished: Finished

    def delay(self) -> None:
        """Keep the calling thread's stream busy: compute's, or a lane's inside its work."""
        if self.blocks.is_cuda:
            torch.cuda._sleep(LONG_KERNEL_CYCLES)

    def compute(self, slot: int, value: int) -> None:
        self.blocks[slot].fill_(value)

    def read(self, slot: int) -> torch.Tensor:
        """A copy made in compute's order; look at it after `settle`."""
        return self.blocks[slot].clone()

    def settle(self) -> None:
        if self.blocks.is_cuda:
            torch.cuda.synchronize()

    def submit(self, work: Callable[[], Any]) -> None:
        assert self.lane.submit(Transfer(work, 1, lambda transfer: None))

    def wait(self) -> None:
        """Until the transfer has come back, as `poll` would hear of it."""
        assert self.finished.get(timeout=DEADLINE_S).error is None

    def host(self, slot: int) -> set[int]:
        return set(np.unique(np.frombuffer(self.memory.host_block(slot), np.uint8)).tolist())


def on_cpu(finished: Finished) -> Machine:
    blocks = torch.zeros(NUM_SLOTS, BLOCK_BYTES, dtype=torch.uint8)
    memory = PoisonedMemory(CpuMemory(blocks.numpy(), NUM_SLOTS), blocks)
    return Machine(blocks, memory, ThreadLane(finished, "test"), finished)


def on_gpu(finished: Finished, way: str) -> Machine:
    gpu = torch.device("cuda", 0)
    blocks = torch.zeros(NUM_SLOTS, BLOCK_BYTES, dtype=torch.uint8, device=gpu)
    below: BlockMemory = CudaMemory(blocks, NUM_SLOTS, way=way)
    assert below.wait_prepared(DEADLINE_S)
    machine = Machine(blocks, PoisonedMemory(below, blocks), CudaLane(finished, "test", gpu, num_threads=2), finished)
    machine.delay()  # kernels and buffers that are used for the first time are loaded and made, which takes its time
    machine.compute(0, 1)
    machine.read(0)
    for _ in range(2):
        machine.submit(lambda: machine.memory.to_host([0, 1], [0, 1]))
        machine.submit(lambda: machine.memory.to_device([0, 1], [0, 1]))
    for _ in range(4):
        machine.wait()
    machine.memory.poison(range(NUM_SLOTS))
    torch.cuda.synchronize(gpu)
    return machine


MACHINES = [
    pytest.param(on_cpu, id="cpu"),
    *(pytest.param(lambda finished, way=way: on_gpu(finished, way), id=f"cuda-{way}", marks=GPU) for way in COPIES),
]


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    open_machine: Callable[[Finished], Machine] = request.param
    machine = open_machine(queue.SimpleQueue())
    yield machine
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


def test_a_slot_that_nobody_wrote_shows_as_poison_wherever_it_gets_to(machine: Machine) -> None:
    machine.memory.poison([2])
    machine.submit(lambda: machine.memory.to_host([2], [3]))

    machine.wait()

    assert machine.host(3) == {POISON}


@pytest.mark.parametrize("machine", [param for param in MACHINES if param.id != "cpu"], indirect=True)
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


@pytest.mark.parametrize("machine", [param for param in MACHINES if param.id != "cpu"], indirect=True)
def test_allocation_never_waits_for_a_copy(machine: Machine) -> None:
    """Handing a slot out enqueues at most kernels; submitting takes no part of a copy's time."""

    def slow_spill() -> None:
        machine.delay()
        machine.memory.to_host([1], [2])

    machine.submit(slow_spill)
    machine.submit(slow_spill)

    assert machine.finished.empty()
    assert machine.lane.num_pending == 2
    machine.wait()
    machine.wait()
