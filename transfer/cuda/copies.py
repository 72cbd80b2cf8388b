"""Three ways to copy scattered blocks between device and host slots: one batched call, a loop, or staging buffers.

`kernel.py` has a fourth. Which is fastest depends on the runtime and on the size of a block: `copy_choice.py` measures.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from itertools import cycle
from queue import Empty, SimpleQueue
from typing import Protocol

import numpy as np
import torch

from kvtier.transfer.block_runs import BlockRuns, Slots, merge_neighbours

STAGING_BYTES = 4 << 20  # of each staging buffer; two a call, so that filling one and emptying the other overlap
_WORD_BYTES = 8


@dataclass(frozen=True)
class Ends:
    """The two memories of a copy, each [num_slots, block_bytes] uint8 and contiguous.

    *device* is on the GPU; on a CPU, which tests use, it is ordinary memory. Host slots are registered with CUDA in
    pieces of *slots_per_piece*.
    """

    device: torch.Tensor
    host: torch.Tensor
    slots_per_piece: int

    def runs(self, device: Slots, host: Slots) -> BlockRuns:
        """The copies of contiguous memory that the pairs of slots come to."""
        return merge_neighbours(device, host, self.slots_per_piece)


class BlockCopies(Protocol):
    """One way to copy blocks. Several threads may use it at once.

    The slots pair up and exist (`slot_pairs`), and no slot is a target twice. A copy runs on the calling thread's
    current stream, after the operations that are enqueued there, and has landed when the method returns.
    """

    def to_host(self, device: Slots, host: Slots) -> None:
        """Copy device slot i to host slot i, pair by pair."""

    def to_device(self, host: Slots, device: Slots) -> None:
        """Copy host slot i to device slot i, pair by pair."""


class LoopCopies:
    """One asynchronous copy for each run of neighbours. Host memory need not be pinned: CUDA stages it then."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends

    def to_host(self, device: Slots, host: Slots) -> None:
        for source, target, num_blocks in _triples(self._ends.runs(device, host)):
            blocks = self._ends.device[source : source + num_blocks]
            self._ends.host[target : target + num_blocks].copy_(blocks, non_blocking=True)
        _wait_landed(self._ends.device.device)

    def to_device(self, host: Slots, device: Slots) -> None:
        for target, source, num_blocks in _triples(self._ends.runs(device, host)):
            blocks = self._ends.host[source : source + num_blocks]
            self._ends.device[target : target + num_blocks].copy_(blocks, non_blocking=True)
        _wait_landed(self._ends.device.device)

    def to_device_part(self, host: Slots, device: Slots, part: slice) -> None:
        """As `to_device`, for the bytes *part* of each block."""
        for source, target in zip(host.tolist(), device.tolist(), strict=True):
            self._ends.device[target, part].copy_(self._ends.host[source, part], non_blocking=True)
        _wait_landed(self._ends.device.device)


class SourceOrder(IntEnum):
    """When a batch of copies may read its sources: the numbers of CUDA's `cudaMemcpySrcAccessOrder`."""

    # For sources on the device: the kernels before the batch in the stream are still writing them.
    STREAM = 1
    # For sources on the host: complete before the call, so that the driver may read ahead. The writes stay in order.
    ANY = 3


# Enqueues copies of sizes[i] bytes from sources[i] to targets[i] on the current stream.
SubmitBatch = Callable[[Sequence[int], Sequence[int], Sequence[int], SourceOrder], None]


class BatchCopies:
    """Hands all copies to the driver in one call, which gives up the interpreter's lock once and not for each block."""

    def __init__(self, ends: Ends, submit: SubmitBatch | None = None) -> None:
        """ImportError, AttributeError or RuntimeError if there is no batched copy here; see `cuda_batch`."""
        self._ends = ends
        self._block_bytes = ends.device.shape[1]
        self._submit = cuda_batch(ends.device.device) if submit is None else submit

    def to_host(self, device: Slots, host: Slots) -> None:
        above, below, sizes = self._addresses(device, host)
        self._submit(below, above, sizes, SourceOrder.STREAM)
        _wait_landed(self._ends.device.device)

    def to_device(self, host: Slots, device: Slots) -> None:
        above, below, sizes = self._addresses(device, host)
        self._submit(above, below, sizes, SourceOrder.ANY)
        _wait_landed(self._ends.device.device)

    def to_device_part(self, host: Slots, device: Slots, part: slice) -> None:
        """As `to_device`, for the bytes *part* of each block."""
        above = (self._ends.device.data_ptr() + device * self._block_bytes + part.start).tolist()
        below = (self._ends.host.data_ptr() + host * self._block_bytes + part.start).tolist()
        self._submit(above, below, [part.stop - part.start] * len(host), SourceOrder.ANY)
        _wait_landed(self._ends.device.device)

    def _addresses(self, device: Slots, host: Slots) -> tuple[list[int], list[int], list[int]]:
        """The address of each copy on the device and in host memory, and its number of bytes."""
        runs, block_bytes = self._ends.runs(device, host), self._block_bytes
        above = (self._ends.device.data_ptr() + runs.device * block_bytes).tolist()
        below = (self._ends.host.data_ptr() + runs.host * block_bytes).tolist()
        return above, below, (runs.num_blocks * block_bytes).tolist()


def cuda_batch(device: torch.device) -> SubmitBatch:
    """A function that submits batches of copies by `cudaMemcpyBatchAsync` on *device*.

    ImportError or AttributeError without NVIDIA's cuda-bindings of CUDA 12.8 or later. The function raises RuntimeError
    if the driver is older or refuses.
    """
    cuda = import_module("cuda.bindings.runtime")
    call, success = cuda.cudaMemcpyBatchAsync, cuda.cudaError_t.cudaSuccess
    attributes = {}
    for order in SourceOrder:
        attributes[order] = cuda.cudaMemcpyAttributes()  # its location hints are for managed memory only
        attributes[order].srcAccessOrder = cuda.cudaMemcpySrcAccessOrder(order)

    def enqueue(
        targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], order: SourceOrder, stream: int
    ) -> None:
        # CUDA 12 answers (error, index of the copy that failed), CUDA 13 (error,).
        error = call(targets, sources, sizes, len(sizes), [attributes[order]], [0], 1, stream)[0]
        if error != success:
            raise RuntimeError(f"cudaMemcpyBatchAsync of {len(sizes)} copies: {error!r}")

    def submit(targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], order: SourceOrder) -> None:
        if not sizes:
            return
        stream = torch.cuda.current_stream(device)
        if stream.cuda_stream:
            enqueue(targets, sources, sizes, order, stream.cuda_stream)
            return
        beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch
        beside.wait_stream(stream)  # the call refuses the legacy default stream: run next to it, in its order
        enqueue(targets, sources, sizes, order, beside.cuda_stream)
        stream.wait_stream(beside)

    return submit


class StagedCopies:
    """Gathers blocks into a staging buffer by one kernel, moves it in one copy, and scatters it on the other side.

    For blocks so small that a copy each costs more than moving them twice (`copy_choice` says where), where there is
    no CuPy for `KernelCopies`. The host's scatter is the CPU's work, so host memory need not be pinned.
    """

    def __init__(self, ends: Ends) -> None:
        self._device, self._host = _words(ends.device), _words(ends.host)
        self._blocks_at_once = max(1, STAGING_BYTES // ends.device.shape[1])
        self._unused: SimpleQueue[tuple[_Staging, _Staging]] = SimpleQueue()

    def to_host(self, device: Slots, host: Slots) -> None:
        with self._stagings() as stagings:
            begun: list[tuple[_Staging, Slots]] = []
            for staging, start in zip(cycle(stagings), range(0, len(device), self._blocks_at_once), strict=False):
                part = slice(start, start + self._blocks_at_once)
                staging.gather(self._device, device[part])
                begun.append((staging, host[part]))
                if len(begun) == len(stagings):
                    _unpack(*begun.pop(0), self._host)
            for staging, slots in begun:
                _unpack(staging, slots, self._host)

    def to_device(self, host: Slots, device: Slots) -> None:
        with self._stagings() as stagings:
            for staging, start in zip(cycle(stagings), range(0, len(device), self._blocks_at_once), strict=False):
                part = slice(start, start + self._blocks_at_once)
                staging.wait()  # for what it was used for two parts ago
                slots = host[part]
                np.take(self._host.numpy(), slots, axis=0, out=staging.host.numpy()[: len(slots)], mode="clip")
                staging.scatter(self._device, device[part])

    @contextmanager
    def _stagings(self) -> "Iterator[tuple[_Staging, _Staging]]":
        """Two staging buffers for the calling thread, given back when the copies begun with them have landed."""
        try:
            stagings = self._unused.get_nowait()
        except Empty:
            stagings = (self._new_staging(), self._new_staging())
        try:
            yield stagings
        finally:  # also after a failure half way, which leaves copies behind that nothing has marked
            _wait_landed(self._device.device)
            self._unused.put(stagings)

    def _new_staging(self) -> "_Staging":
        return _Staging(self._blocks_at_once, self._device)


class _Staging:
    """A buffer on the device and one in host memory, [num_blocks, words], and the last copy between them."""

    def __init__(self, num_blocks: int, like: torch.Tensor) -> None:
        shape, is_cuda = (num_blocks, like.shape[1]), like.device.type == "cuda"
        self.device = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.host = torch.empty(shape, dtype=like.dtype, pin_memory=is_cuda)
        self._used = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]  # untyped in torch

    def gather(self, blocks: torch.Tensor, slots: Slots) -> None:
        """Enqueue a copy of the device's slots to `host`."""
        index, part = torch.from_numpy(slots).to(blocks.device, non_blocking=True), self.device[: len(slots)]
        torch.index_select(blocks, 0, index, out=part)
        self.host[: len(slots)].copy_(part, non_blocking=True)
        self._mark()

    def scatter(self, blocks: torch.Tensor, slots: Slots) -> None:
        """Enqueue a copy of `host` to the device's slots."""
        index, part = torch.from_numpy(slots).to(blocks.device, non_blocking=True), self.device[: len(slots)]
        part.copy_(self.host[: len(slots)], non_blocking=True)
        blocks.index_copy_(0, index, part)
        self._mark()

    def wait(self) -> None:
        """Wait until the last copy has landed."""
        if self._used is not None:
            self._used.synchronize()

    def _mark(self) -> None:
        if self._used is not None:
            self._used.record(torch.cuda.current_stream(self.device.device))


def _triples(runs: BlockRuns) -> Iterator[tuple[int, int, int]]:
    return zip(runs.device.tolist(), runs.host.tolist(), runs.num_blocks.tolist(), strict=True)


def _unpack(staging: _Staging, slots: Slots, host: torch.Tensor) -> None:
    staging.wait()
    host.numpy()[slots] = staging.host.numpy()[: len(slots)]


def _words(blocks: torch.Tensor) -> torch.Tensor:
    """The same memory in words of 8 bytes, [num_slots, words], where a block is whole words: bytes gather slower."""
    fits = blocks.shape[1] % _WORD_BYTES == 0 and blocks.data_ptr() % _WORD_BYTES == 0
    return blocks.view(torch.int64) if fits else blocks


def _wait_landed(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
