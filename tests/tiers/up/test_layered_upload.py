"""LayeredUpload: a layer may be computed as soon as its copy has landed, and not before."""

import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from cuda_devices import CUDA_KINDS, GPU_0, CudaDevice, CudaKind

from kvtier.tiers.lower.no_tiers import NoFetch
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.naming.tier import Tier
from kvtier.tiers.residency import GroupTiers
from kvtier.tiers.up.promotion import Upload
from kvtier.tiers.up.uploads import LayeredUpload
from kvtier.transfer.block_memory import BlockMemory, CpuMemory
from kvtier.transfer.cuda.lane import CudaLane
from kvtier.transfer.cuda.memory import CudaMemory
from kvtier.transfer.lane import Finished, Transfer
from kvtier.transfer.layer_gate import LayerGate

NUM_LAYERS = 4
LAYER_BYTES = 2048
NUM_SLOTS = 3
DEADLINE_S = 60.0  # reached only when a test fails
EVERY_WAY = [
    pytest.param(kind, way, id=f"{kind.name}-{way}", marks=kind.marks())
    for kind in CUDA_KINDS
    for way in ("batch", "loop")
]


class Watched(CpuMemory):
    """Notes for each part whether its gate is open while its copy runs."""

    def __init__(self) -> None:
        super().__init__(np.zeros((NUM_SLOTS, NUM_LAYERS * LAYER_BYTES), np.uint8), NUM_SLOTS, NUM_LAYERS)
        self.gate: LayerGate | None = None
        self.were_open: list[bool] = []

    def to_device_layers(self, host_slots: Sequence[int], device_slots: Sequence[int], layers: range) -> None:
        assert self.gate is not None
        super().to_device_layers(host_slots, device_slots, layers)
        self.gate.missed = False
        self.gate.wait(layers.start, NUM_LAYERS, give_up_at=0.0)  # comes back at once, open or not
        self.were_open.append(not self.gate.missed)


def of(memory: BlockMemory) -> GroupTiers:
    """A group that has its slots in this memory."""
    return GroupTiers(0, FullAttention(1), memory, lambda *left: None, is_spilled=False, is_matched_in_part=False)


def test_the_gate_of_a_layer_opens_behind_its_copy() -> None:
    memory = Watched()
    upload = LayeredUpload([Upload(of(memory), b"name", 2, Tier.HOST, NoFetch(0, [b"name"]), 0, 1)], NUM_LAYERS)
    memory.gate = upload.gate

    upload.copy()

    memory.close()
    assert memory.were_open == [False] * NUM_LAYERS


@contextmanager
def opened(way: str, cuda: CudaDevice) -> Iterator[tuple[CudaMemory, torch.Tensor, CudaLane, Finished]]:
    blocks = torch.zeros(NUM_SLOTS, NUM_LAYERS * LAYER_BYTES, dtype=torch.uint8, device=GPU_0)
    memory = CudaMemory(blocks, NUM_SLOTS, NUM_LAYERS, way)
    assert memory.wait_prepared(DEADLINE_S)
    finished: Finished = queue.SimpleQueue()
    lane = CudaLane(finished, "test", GPU_0)
    try:
        yield memory, blocks, lane, finished
    finally:
        with cuda.time_passes():
            lane.close()
        memory.close()


@pytest.mark.parametrize(("kind", "way"), EVERY_WAY)
def test_compute_that_waits_for_a_layer_at_its_gate_finds_the_layer(kind: CudaKind, way: str) -> None:
    """On a stream that waits for nothing but the gate."""
    content = np.random.default_rng(1).integers(1, 256, (NUM_SLOTS, NUM_LAYERS, LAYER_BYTES), dtype=np.uint8)
    with kind.opened() as cuda, opened(way, cuda) as (memory, blocks, lane, finished):
        for slot in range(NUM_SLOTS):
            memory.host_block(slot)[:] = content[slot].tobytes()
        fetch = NoFetch(0, [bytes([slot]) for slot in range(NUM_SLOTS)])
        group = of(memory)
        uploads = [Upload(group, bytes([i]), 2 - i, Tier.HOST, fetch, i, i) for i in range(NUM_SLOTS)]
        upload = LayeredUpload(uploads, NUM_LAYERS)
        assert lane.submit(Transfer(upload.copy, 1, lambda transfer: None))

        seen = []
        for layer in range(NUM_LAYERS):
            with cuda.time_passes():
                upload.gate.wait(layer, NUM_LAYERS, time.monotonic() + DEADLINE_S)
            part = slice(layer * LAYER_BYTES, (layer + 1) * LAYER_BYTES)
            seen.append([blocks[2 - slot, part].clone() for slot in range(NUM_SLOTS)])

        with cuda.time_passes():
            assert finished.get(timeout=DEADLINE_S).error is None
        torch.cuda.synchronize()
        assert not upload.gate.missed
        for layer in range(NUM_LAYERS):
            assert all(np.array_equal(seen[layer][slot].cpu(), content[slot, layer]) for slot in range(NUM_SLOTS))
