"""Host slots that are pinned piece by piece while they are used: no copy counts on a piece too early, or spans two."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from cuda_devices import EVERY_CUDA, EVERY_FAKE, GPU_0, CudaKind

from kvtier.transfer import host_slab
from kvtier.transfer.cuda import memory as cuda_memory
from kvtier.transfer.cuda.memory import CudaMemory
from kvtier.transfer.host_slab import Pin

BLOCK_BYTES = 4096
NUM_SLOTS = 8
DEADLINE_S = 60.0  # reached only when a test fails
WAYS = ["batch", "loop", "staged"]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pieces of host memory two slots long."""
    monkeypatch.setattr(host_slab, "PIECE_BYTES", 2 * BLOCK_BYTES)


@contextmanager
def opened(way: str) -> Iterator[tuple[CudaMemory, torch.Tensor]]:
    blocks = torch.zeros(NUM_SLOTS, BLOCK_BYTES, dtype=torch.uint8, device=GPU_0)
    memory = CudaMemory(blocks, NUM_SLOTS, way=way)
    try:
        yield memory, blocks
    finally:
        memory.close()


def pin_after(gate: threading.Event, num_free: int) -> Callable[[torch.device], Pin]:
    """Pins the first pieces at once and the others when the gate opens."""
    make_pin = cuda_memory.cuda_pin
    num_pinned = iter(range(1000))

    def make_slow_pin(device: torch.device) -> Pin:
        pin = make_pin(device)

        def slow_pin(address: int, num_bytes: int) -> Callable[[], None]:
            if next(num_pinned) >= num_free:
                assert gate.wait(DEADLINE_S)
            return pin(address, num_bytes)

        return slow_pin

    return make_slow_pin


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", EVERY_CUDA)
def test_neighbours_in_several_registrations_are_copied_both_ways(kind: CudaKind, way: str) -> None:
    """CUDA would refuse one copy over both."""
    with kind.opened(), opened(way) as (memory, blocks):
        assert memory.wait_prepared(DEADLINE_S)
        content = np.random.default_rng(1).integers(0, 256, (NUM_SLOTS, BLOCK_BYTES), dtype=np.uint8)
        blocks.copy_(torch.from_numpy(content))

        memory.to_host(range(8), range(8))
        blocks.fill_(0)
        memory.to_device(range(1, 8), range(1, 8))

        assert np.array_equal(blocks.cpu().numpy()[1:], content[1:])
        assert not blocks[0].cpu().any()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", EVERY_CUDA)
def test_slots_whose_piece_is_not_pinned_yet_are_copied_all_the_same(
    kind: CudaKind, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(cuda_memory, "cuda_pin", pin_after(gate, num_free=1))
    with kind.opened(), opened(way) as (memory, blocks):
        blocks.fill_(7)

        memory.to_host(range(8), range(8))
        gate.set()
        assert memory.wait_prepared(DEADLINE_S)
        memory.to_device(range(8), range(8))

        assert all(set(memory.host_block(slot)) == {7} for slot in range(8))


@pytest.mark.parametrize("kind", EVERY_FAKE)
def test_close_unpins_every_piece(kind: CudaKind) -> None:
    with kind.opened() as cuda:
        assert cuda.fake is not None
        with opened("loop") as (memory, _):
            assert memory.wait_prepared(DEADLINE_S)
            num_pinned = len(cuda.fake.memory.left_registered)

        assert num_pinned == 4
        assert not cuda.fake.memory.left_registered
