"""BlockMemory: one contract for CPU and GPU; a block has the same bytes on both sides. DeviceSlab: its layout."""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cuda_devices import CUDA_KINDS, GPU_0, CudaDevice

from kvtier.transfer.attached_memory import AttachedMemory, MakeMemory
from kvtier.transfer.block_memory import BlockMemory, CpuMemory
from kvtier.transfer.cuda.copy_choice import COPIES
from kvtier.transfer.cuda.memory import CudaMemory, choose_methods
from kvtier.transfer.device_slab import DeviceSlab
from kvtier.transfer.host_slab import HostSlab
from kvtier.transfer.poisoned_memory import POISON, PoisonedMemory

NUM_DEVICE_SLOTS = 12
NUM_HOST_SLOTS = 20
BLOCK_BYTES = 5003  # odd on purpose: nothing may count on alignment
DEADLINE_S = 60.0  # for what takes milliseconds: reached only when a test fails
Bytes = npt.NDArray[np.uint8]


@dataclass
class Device:
    """A memory under test, and the device's bytes, by which it is judged."""

    memory: BlockMemory
    blocks: torch.Tensor  # [num_slots, block_bytes]
    cuda: CudaDevice | None = None

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


def on_cpu_poisoned() -> Device:
    device = on_cpu()
    return Device(PoisonedMemory(device.memory, device.blocks), device.blocks)


def backed_file(num_bytes: int) -> int:
    """The descriptor of a memory file, as a sidecar's segment is one."""
    file = os.memfd_create("segment")
    os.posix_fallocate(file, 0, num_bytes)
    return file


def attached(make: MakeMemory) -> AttachedMemory:
    """A memory whose host slots are the beginning of such a file."""
    file = backed_file(NUM_HOST_SLOTS * BLOCK_BYTES)
    memory = AttachedMemory(make)
    memory.attach(memory.prepare(file, NUM_HOST_SLOTS * BLOCK_BYTES))
    os.close(file)
    assert memory.wait_prepared(DEADLINE_S)
    return memory


def on_cpu_attached() -> Device:
    blocks = torch.zeros(NUM_DEVICE_SLOTS, BLOCK_BYTES, dtype=torch.uint8)
    return Device(attached(lambda num_slots, file: CpuMemory(blocks.numpy(), num_slots, file=file)), blocks)


def on_cuda_attached(monkeypatch: pytest.MonkeyPatch) -> Device:
    blocks = torch.zeros(NUM_DEVICE_SLOTS, BLOCK_BYTES, dtype=torch.uint8, device=GPU_0)
    choice = choose_methods(BLOCK_BYTES, GPU_0)
    return Device(attached(lambda num_slots, file: CudaMemory(blocks, num_slots, way=choice, file=file)), blocks)


def on_cuda(way: str | None) -> Device:
    blocks = torch.zeros(NUM_DEVICE_SLOTS, BLOCK_BYTES, dtype=torch.uint8, device=GPU_0)
    memory = CudaMemory(blocks, NUM_HOST_SLOTS, way=way)
    assert memory.wait_prepared(DEADLINE_S)
    return Device(memory, blocks)


def on_cuda_unpinned(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A memory on CUDA in which half of the host slots never get pinned."""
    monkeypatch.setattr(HostSlab, "num_pinned_slots", property(lambda slab: NUM_HOST_SLOTS // 2))
    return on_cuda("batch")


def on_cuda_by_kernel(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A memory on CUDA that copies by kernel, which takes whole words of 16 bytes only."""
    monkeypatch.setattr(sys.modules[__name__], "BLOCK_BYTES", BLOCK_BYTES // 16 * 16)
    return on_cuda("kernel")


WAYS: dict[str | None, Callable[[pytest.MonkeyPatch], Device]] = {
    None: lambda patch: on_cuda(None),
    **{way: lambda patch, way=way: on_cuda(way) for way in COPIES},
    "kernel": on_cuda_by_kernel,
    "unpinned": on_cuda_unpinned,
    "attached": on_cuda_attached,
}
ON_CUDA = [
    pytest.param((kind, WAYS[way]), id=f"{kind.name}-{way}" if way else kind.name, marks=kind.marks(way))
    for kind in CUDA_KINDS
    for way in WAYS
]
EVERYWHERE = [
    pytest.param((None, lambda patch: on_cpu()), id="cpu"),
    pytest.param((None, lambda patch: on_cpu_poisoned()), id="cpu-poisoned"),
    pytest.param((None, lambda patch: on_cpu_attached()), id="cpu-attached"),
    *ON_CUDA,
]


@contextmanager
def opened(request: pytest.FixtureRequest, patch: pytest.MonkeyPatch) -> Iterator[Device]:
    kind, open_device = request.param
    with nullcontext() if kind is None else kind.opened() as cuda:
        device: Device = open_device(patch)
        device.cuda = cuda
        yield device
        device.memory.close()


@pytest.fixture(params=EVERYWHERE)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with opened(request, monkeypatch) as device:
        yield device


@pytest.fixture(params=ON_CUDA)
def cuda_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    with opened(request, monkeypatch) as device:
        yield device


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
    with pytest.raises(ValueError, match="2 device slots and 1 host slots"):
        device.memory.to_host([0, 1], [0])
    with pytest.raises(ValueError, match="2 device slots and 1 host slots"):
        device.memory.to_device([0], [0, 1])


@pytest.mark.parametrize("wrong", [-1, NUM_DEVICE_SLOTS])
def test_a_device_slot_that_is_not_there_raises_and_copies_nothing(device: Device, wrong: int) -> None:
    device.write(noise(1, NUM_DEVICE_SLOTS))

    with pytest.raises(IndexError, match="device slots"):
        device.memory.to_host([0, wrong], [0, 1])

    assert not device.read_host().any()


@pytest.mark.parametrize("wrong", [-1, NUM_HOST_SLOTS])
def test_a_host_slot_that_is_not_there_raises_and_copies_nothing(device: Device, wrong: int) -> None:
    content = noise(1, NUM_DEVICE_SLOTS)
    device.write(content)

    with pytest.raises(IndexError, match="host slots"):
        device.memory.to_host([0, 1], [0, wrong])

    assert not device.read_host().any()


def test_a_memory_says_how_much_of_it_is_prepared(device: Device) -> None:
    assert device.memory.wait_prepared(DEADLINE_S)

    assert device.memory.prepared_bytes == NUM_HOST_SLOTS * BLOCK_BYTES


def test_a_host_block_is_writable_and_has_the_block_s_bytes(device: Device) -> None:
    block = device.memory.host_block(3)

    assert not block.readonly
    assert (block.nbytes, block.format, block.ndim) == (BLOCK_BYTES, "B", 1)


def test_a_host_block_is_the_slot_and_no_copy_of_it(device: Device) -> None:
    device.write(np.zeros((NUM_DEVICE_SLOTS, BLOCK_BYTES), np.uint8))
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


def test_a_copy_down_reads_what_its_stream_wrote_and_has_landed_when_it_returns(cuda_device: Device) -> None:
    cuda_device.cuda.delay()
    cuda_device.blocks[3].fill_(7)

    cuda_device.memory.to_host([3], [12])

    assert set(cuda_device.memory.host_block(12)) == {7}


def test_a_copy_up_has_landed_when_it_returns(cuda_device: Device) -> None:
    cuda_device.memory.host_block(12)[:] = b"\x07" * BLOCK_BYTES
    cuda_device.cuda.delay()

    cuda_device.memory.to_device([12], [3])

    with torch.cuda.stream(torch.cuda.Stream()):  # which waits for no other stream
        content = cuda_device.blocks[3].cpu()
    assert bool((content == 7).all())


def test_layers_have_landed_when_their_copy_returns(cuda_device: Device) -> None:
    cuda_device.memory.host_block(12)[:] = b"\x07" * BLOCK_BYTES
    cuda_device.cuda.delay()

    cuda_device.memory.to_device_layers([12], [3], range(1))

    with torch.cuda.stream(torch.cuda.Stream()):  # which waits for no other stream
        content = cuda_device.blocks[3].cpu()
    assert bool((content == 7).all())


def test_the_measured_choice_is_among_the_ways_and_can_be_read(cuda: CudaDevice) -> None:
    device = on_cuda(None)

    choice = device.memory.choice

    device.memory.close()
    assert {choice.down, choice.up} <= set(COPIES)
    assert choice.down_gb_per_s[choice.down] > 0
    assert choice.up_gb_per_s[choice.up] > 0


def test_a_memory_that_cannot_be_made_leaves_nothing_pinned(cuda: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    slabs: list[HostSlab] = []
    close = HostSlab.close
    monkeypatch.setattr(HostSlab, "close", lambda slab: (slabs.append(slab), close(slab)))

    with pytest.raises(RuntimeError, match="multiples of 16 bytes"):
        on_cuda("kernel")

    assert [slab.num_bytes for slab in slabs] == [NUM_HOST_SLOTS * BLOCK_BYTES]


def test_memory_that_cannot_be_pinned_copies_all_the_same(cuda: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int, num_bytes: int) -> Callable[[], None]:
        raise RuntimeError("cudaHostRegister: out of memory")

    monkeypatch.setattr("kvtier.transfer.cuda.memory.cuda_pin", lambda device: refuse)
    blocks = torch.full((NUM_DEVICE_SLOTS, 4096), 7, dtype=torch.uint8, device=GPU_0)
    memory = CudaMemory(blocks, NUM_HOST_SLOTS)  # 4096: a size that every way takes, were the memory pinned

    memory.to_host([3], [12])

    assert set(memory.host_block(12)) == {7}
    memory.close()


# --- poisoned: slots that hold nothing are NaN


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_poison_is_not_a_number_whatever_the_dtype(dtype: torch.dtype) -> None:
    poison = torch.full((8,), POISON, dtype=torch.uint8).view(dtype)

    assert bool(poison.float().isnan().all())


def test_fresh_slots_are_poisoned() -> None:
    device = on_cpu_poisoned()

    fresh = device.read()

    device.memory.close()
    assert (fresh == POISON).all()


def test_poison_fills_the_slots_given_and_no_others() -> None:
    device = on_cpu_poisoned()
    content = noise(1, NUM_DEVICE_SLOTS)
    device.write(content)

    device.memory.poison([2, 5])

    device.memory.close()
    content[[2, 5]] = POISON
    assert np.array_equal(device.read(), content)


def test_a_slot_is_poison_from_the_start_of_its_promotion_on() -> None:
    seen = []

    class Spy(CpuMemory):
        def to_device(self, host_slots: Sequence[int], device_slots: Sequence[int]) -> None:
            seen.append(blocks[device_slots].clone())
            super().to_device(host_slots, device_slots)

    blocks = torch.zeros(NUM_DEVICE_SLOTS, BLOCK_BYTES, dtype=torch.uint8)
    memory = PoisonedMemory(Spy(blocks.numpy(), NUM_HOST_SLOTS), blocks)
    blocks.fill_(7)

    memory.to_device([0, 1], [4, 2])

    memory.close()
    assert bool((seen[0] == POISON).all())
    assert not blocks[[2, 4]].any()
    assert bool((blocks[[0, 1, 3]] == 7).all())


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
        num_slots=6, num_layers=3, block_size=4, parts=[(2, 8), (2, 8)], dtype=dtype, device=torch.device("cpu")
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


@pytest.mark.parametrize("seed", range(3))
def test_layers_copied_up_one_after_the_other_are_the_whole_blocks(device: Device, seed: int) -> None:
    print(f"seed {seed}")
    above, below = noise(seed, NUM_DEVICE_SLOTS), noise(seed + 100, NUM_HOST_SLOTS)
    device.write(above)
    device.write_host(below)
    device_slots, host_slots = pick_slots(seed, count=7)
    device.memory.num_layers = num_layers = next(n for n in (4, 3, 1) if BLOCK_BYTES % n == 0)
    each = BLOCK_BYTES // num_layers

    for layer in range(num_layers):
        device.memory.to_device_layers(host_slots, device_slots, range(layer, layer + 1))
        part = slice(layer * each, (layer + 1) * each)
        above[device_slots, part] = below[host_slots, part]
        if layer > 0 or num_layers == 1:  # the first poisons the rest, where that is so
            seen = device.read()
            assert np.array_equal(seen[device_slots, : part.stop], above[device_slots, : part.stop])

    assert np.array_equal(device.read(), above)
