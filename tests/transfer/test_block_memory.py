"""BlockMemory: one contract for CPU and GPU; a block has the same bytes on both sides. DeviceSlab: where it lies."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvtier.transfer.block_memory import BlockMemory, CpuMemory
from kvtier.transfer.cuda_memory import CudaMemory
from kvtier.transfer.device_slab import DeviceSlab

NUM_DEVICE_SLOTS = 12
NUM_HOST_SLOTS = 20
BLOCK_BYTES = 5003  # odd on purpose: nothing may count on alignment
Bytes = npt.NDArray[np.uint8]


@dataclass
class Device:
    """A memory under test, and the device's bytes beside it."""

    memory: BlockMemory
    blocks: torch.Tensor  # [num_slots, block_bytes]

    def write(self, content: Bytes) -> None:
        self.blocks.copy_(torch.from_numpy(content))

    def read(self) -> Bytes:
        return self.blocks.cpu().numpy().copy()

    def write_host(self, content: Bytes) -> None:
        for slot, block in enumerate(content):
            self.memory.host_block(slot)[:] = block.tobytes()

    def read_host(self) -> Bytes:
        blocks = [np.frombuffer(self.memory.host_block(slot), np.uint8) for slot in range(self.memory.num_host_slots)]
        return np.stack(blocks)


def on_cpu() -> Device:
    blocks = torch.zeros(NUM_DEVICE_SLOTS, BLOCK_BYTES, dtype=torch.uint8)
    return Device(CpuMemory(blocks.numpy(), NUM_HOST_SLOTS), blocks)


def on_gpu() -> Device:
    blocks = torch.zeros(NUM_DEVICE_SLOTS, BLOCK_BYTES, dtype=torch.uint8, device=torch.device("cuda", 0))
    return Device(CudaMemory(blocks, NUM_HOST_SLOTS), blocks)


GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(params=[pytest.param(on_cpu, id="cpu"), pytest.param(on_gpu, id="cuda", marks=GPU)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    open_device: Callable[[], Device] = request.param
    device = open_device()
    yield device
    device.memory.close()


def noise(seed: int, num_slots: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (num_slots, BLOCK_BYTES), dtype=np.uint8)


def pick_slots(seed: int, count: int) -> tuple[list[int], list[int]]:
    """As many device slots as host slots, all different, in no order."""
    rng = np.random.default_rng(seed)
    return rng.permutation(NUM_DEVICE_SLOTS)[:count].tolist(), rng.permutation(NUM_HOST_SLOTS)[:count].tolist()


def test_a_memory_says_its_sizes(device: Device) -> None:
    memory = device.memory

    assert (memory.block_bytes, memory.num_device_slots, memory.num_host_slots) == (BLOCK_BYTES, 12, 20)


@pytest.mark.parametrize("seed", range(5))
def test_a_copy_down_changes_its_host_slots_and_nothing_else(device: Device, seed: int) -> None:
    print(f"seed {seed}")
    above, below = noise(seed, NUM_DEVICE_SLOTS), noise(seed + 100, NUM_HOST_SLOTS)
    device.write(above)
    device.write_host(below)
    device_slots, host_slots = pick_slots(seed, count=7)

    device.memory.to_host(device_slots, host_slots)

    below[host_slots] = above[device_slots]
    assert np.array_equal(device.read_host(), below)
    assert np.array_equal(device.read(), above)


@pytest.mark.parametrize("seed", range(5))
def test_a_copy_up_changes_its_device_slots_and_nothing_else(device: Device, seed: int) -> None:
    print(f"seed {seed}")
    above, below = noise(seed, NUM_DEVICE_SLOTS), noise(seed + 100, NUM_HOST_SLOTS)
    device.write(above)
    device.write_host(below)
    device_slots, host_slots = pick_slots(seed, count=7)

    device.memory.to_device(host_slots, device_slots)

    above[device_slots] = below[host_slots]
    assert np.array_equal(device.read(), above)
    assert np.array_equal(device.read_host(), below)


@pytest.mark.parametrize("seed", range(5))
def test_blocks_come_back_bit_equal_through_shuffled_slots(device: Device, seed: int) -> None:
    print(f"seed {seed}")
    content = noise(seed, NUM_DEVICE_SLOTS)
    device.write(content)
    sources, host_slots = pick_slots(seed, NUM_DEVICE_SLOTS)
    targets, _ = pick_slots(seed + 1, NUM_DEVICE_SLOTS)

    device.memory.to_host(sources, host_slots)
    device.write(np.zeros_like(content))
    device.memory.to_device(host_slots, targets)

    assert np.array_equal(device.read()[targets], content[sources])


@pytest.mark.parametrize("seed", range(3))
def test_a_copy_on_the_device_changes_its_target_and_nothing_else(device: Device, seed: int) -> None:
    before = noise(seed, NUM_DEVICE_SLOTS)
    device.write(before)

    device.memory.copy(2, 5)

    expected = before.copy()
    expected[5] = before[2]
    assert (device.read() == expected).all()


def test_no_slots_is_no_copy(device: Device) -> None:
    content = noise(1, NUM_DEVICE_SLOTS)
    device.write(content)

    device.memory.to_host([], [])
    device.memory.to_device([], [])

    assert np.array_equal(device.read(), content)
    assert not device.read_host().any()


def test_slots_that_do_not_pair_up_raise(device: Device) -> None:
    with pytest.raises(ValueError, match="zip"):
        device.memory.to_host([0, 1], [0])
    with pytest.raises(ValueError, match="zip"):
        device.memory.to_device([0], [0, 1])


def test_a_host_block_is_writable_and_has_the_block_s_bytes(device: Device) -> None:
    block = device.memory.host_block(3)

    assert not block.readonly
    assert (block.nbytes, block.format, block.ndim) == (BLOCK_BYTES, "B", 1)


def test_a_host_block_is_the_slot_and_no_copy_of_it(device: Device) -> None:
    block = device.memory.host_block(3)

    block[:] = b"\x07" * BLOCK_BYTES
    device.memory.to_device([3], [0])
    device.memory.to_host([1], [3])

    assert (device.read()[0] == 7).all()
    assert not any(block)


def test_a_host_block_outlives_its_memory(device: Device) -> None:
    block = device.memory.host_block(3)
    block[:] = b"\x07" * BLOCK_BYTES

    device.memory.close()

    assert set(block) == {7}


def test_close_ends_the_memory_s_threads() -> None:
    before = set(threading.enumerate())
    device = on_cpu()

    device.memory.close()

    assert set(threading.enumerate()) <= before


def test_a_memory_without_host_slots_is_possible() -> None:
    memory = CpuMemory(np.zeros((4, 64), np.uint8), num_host_slots=0)

    memory.to_host([], [])

    memory.close()
    assert memory.num_host_slots == 0


def device_slab(dtype: torch.dtype = torch.bfloat16) -> DeviceSlab:
    return DeviceSlab(
        num_slots=6, num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=dtype, device=torch.device("cpu")
    )


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.float32, 4), (torch.bfloat16, 2), (torch.float8_e4m3fn, 1)])
def test_a_device_slab_knows_the_bytes_of_a_block(dtype: torch.dtype, itemsize: int) -> None:
    slab = device_slab(dtype)

    assert slab.tensor.shape == (6, 3, 2, 4, 2, 8)
    assert slab.block_bytes == 3 * 2 * 4 * 2 * 8 * itemsize
    assert slab.blocks.shape == (6, slab.block_bytes)
    assert slab.blocks.dtype == torch.uint8


def test_a_block_is_one_run_of_bytes_with_all_layers_keys_and_values() -> None:
    slab = device_slab()
    slab.tensor[2] = torch.randn(3, 2, 4, 2, 8, generator=torch.Generator().manual_seed(1))

    run = slab.blocks[2]

    assert run.is_contiguous()
    assert torch.equal(run.view(torch.bfloat16), slab.tensor[2].flatten())
    assert not slab.blocks[[0, 1, 3, 4, 5]].any()


def test_the_blocks_of_a_slab_are_the_same_memory() -> None:
    slab = device_slab()
    memory = CpuMemory(slab.blocks.numpy(), num_host_slots=2)
    slab.tensor[5] = 1.5

    memory.to_host([5], [0])
    memory.to_device([0], [3])

    memory.close()
    assert (slab.tensor[3] == 1.5).all()
    assert not slab.tensor[[0, 1, 2, 4]].any()
