"""Three methods to copy scattered blocks between device and host slots: one batched call, a loop, or staging buffers.

`kernel.py` has a fourth method. The fastest method depends on the runtime and the block size, so `copy_choice.py`
measures all of them.
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

from kvtier.transfer.block_memory import Slots
from kvtier.transfer.block_runs import BlockRuns, merge_adjacent

STAGING_BYTES = 4 << 20  # size of a staging buffer; each call uses two, so that filling and emptying overlap
_WORD_BYTES = 8


@dataclass(frozen=True)
class Ends:
    """The device memory and the host memory between which blocks are copied, each [num_slots, block_bytes] uint8.

    Both tensors are contiguous. *device* is on the GPU, or in ordinary memory in tests on a CPU. *host* is registered
    with CUDA in pieces of *slots_per_piece* slots.
    """

    device: torch.Tensor
    host: torch.Tensor
    slots_per_piece: int

    def runs(self, device: Slots, host: Slots) -> BlockRuns:
        """Merge the copies between slots `device[i]` and `host[i]` into as few contiguous copies as possible."""
        return merge_adjacent(device, host, self.slots_per_piece)


class BlockCopies(Protocol):
    """A method to copy blocks. Several threads may use it at once.

    The caller has checked the slots with `slot_pairs`, and each slot is a target at most once. A copy runs on the
    calling thread's current stream, after the operations already enqueued there, and is complete when the call returns.
    """

    def to_host(self, device: Slots, host: Slots) -> None:
        """Copy each slot of *device* to the slot at the same position in *host*."""

    def to_device(self, host: Slots, device: Slots) -> None:
        """Copy each slot of *host* to the slot at the same position in *device*."""


class LoopCopies:
    """A copy method that starts one asynchronous copy for each run of adjacent slots.

    Host memory need not be pinned: CUDA copies unpinned memory through a pinned buffer of its own.
    """

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
        """Copy only the bytes *part* of each block; otherwise the same as `to_device`."""
        for source, target in zip(host.tolist(), device.tolist(), strict=True):
            self._ends.device[target, part].copy_(self._ends.host[source, part], non_blocking=True)
        _wait_landed(self._ends.device.device)


class SourceOrder(IntEnum):
    """The time at which a batch of copies may read its sources; values of CUDA's `cudaMemcpySrcAccessOrder`."""

    # For sources on the device, which earlier kernels in the stream may still be writing.
    STREAM = 1
    # For sources on the host, which are complete before the call, so the driver may read ahead. Writes stay in order.
    ANY = 3


# Enqueues copies of sizes[i] bytes from sources[i] to targets[i] on the current stream.
SubmitBatch = Callable[[Sequence[int], Sequence[int], Sequence[int], SourceOrder], None]


class BatchCopies:
    """A copy method that needs one driver call for all copies.

    It releases the GIL once instead of once per block.
    """

    def __init__(self, ends: Ends, submit: SubmitBatch | None = None) -> None:
        """Prepare copies between the device memory and the host memory in *ends*.

        *submit* enqueues a batch of copies (default: `cuda_batch`).

        Raises:
            ImportError, AttributeError: The CUDA bindings lack batched copies; see `cuda_batch`.
        """
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
        """Copy only the bytes *part* of each block; otherwise the same as `to_device`."""
        above = (self._ends.device.data_ptr() + device * self._block_bytes + part.start).tolist()
        below = (self._ends.host.data_ptr() + host * self._block_bytes + part.start).tolist()
        self._submit(above, below, [part.stop - part.start] * len(host), SourceOrder.ANY)
        _wait_landed(self._ends.device.device)

    def _addresses(self, device: Slots, host: Slots) -> tuple[list[int], list[int], list[int]]:
        """Return the device address, the host address and the number of bytes of each copy."""
        runs, block_bytes = self._ends.runs(device, host), self._block_bytes
        above = (self._ends.device.data_ptr() + runs.device * block_bytes).tolist()
        below = (self._ends.host.data_ptr() + runs.host * block_bytes).tolist()
        return above, below, (runs.num_blocks * block_bytes).tolist()


def cuda_batch(device: torch.device) -> SubmitBatch:
    """Return a function that submits batches of copies on *device* with `cudaMemcpyBatchAsync`.

    The returned function raises RuntimeError if the driver is too old or reports an error.

    Raises:
        ImportError, AttributeError: NVIDIA's cuda-bindings for CUDA 12.8 or later are not installed.
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
        # CUDA 12 returns (error, index of the failed copy), CUDA 13 returns (error,).
        error = call(targets, sources, sizes, len(sizes), [attributes[order]], [0], 1, stream)[0]
        if error != success:
            raise RuntimeError(f"cudaMemcpyBatchAsync failed for {len(sizes)} copies: {error!r}")

    def submit(targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], order: SourceOrder) -> None:
        if not sizes:
            return
        stream = torch.cuda.current_stream(device)
        if stream.cuda_stream:
            enqueue(targets, sources, sizes, order, stream.cuda_stream)
            return
        beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch
        # The call rejects the legacy default stream, so use another stream that is ordered with it.
        beside.wait_stream(stream)
        enqueue(targets, sources, sizes, order, beside.cuda_stream)
        stream.wait_stream(beside)

    return submit


class StagedCopies:
    """A copy method with staging buffers: gather the blocks in a buffer, move it in one copy, scatter the blocks.

    Useful for small blocks, where one copy per block costs more than moving all bytes twice. `KernelCopies` is for such
    blocks too, but needs CuPy. The CPU gathers and scatters on the host side, so host memory need not be pinned.
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
                staging.wait()  # for the copy of two parts ago, which used the same buffer
                slots = host[part]
                np.take(self._host.numpy(), slots, axis=0, out=staging.host.numpy()[: len(slots)], mode="clip")
                staging.scatter(self._device, device[part])

    @contextmanager
    def _stagings(self) -> "Iterator[tuple[_Staging, _Staging]]":
        """Lend two staging buffers to the calling thread until all copies that use them are complete."""
        try:
            stagings = self._unused.get_nowait()
        except Empty:
            stagings = (self._new_staging(), self._new_staging())
        try:
            yield stagings
        finally:  # also after an error, because copies that no event marks may still be running
            _wait_landed(self._device.device)
            self._unused.put(stagings)

    def _new_staging(self) -> "_Staging":
        return _Staging(self._blocks_at_once, self._device)


class _Staging:
    """A device buffer and a host buffer, each [num_blocks, words], and an event for the last copy between them."""

    def __init__(self, num_blocks: int, like: torch.Tensor) -> None:
        shape, is_cuda = (num_blocks, like.shape[1]), like.device.type == "cuda"
        self.device = torch.empty(shape, dtype=like.dtype, device=like.device)
        self.host = torch.empty(shape, dtype=like.dtype, pin_memory=is_cuda)
        self._used = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]  # untyped in torch

    def gather(self, blocks: torch.Tensor, slots: Slots) -> None:
        """Enqueue a copy of *slots* in the device memory *blocks* to the host buffer."""
        index, part = torch.from_numpy(slots).to(blocks.device, non_blocking=True), self.device[: len(slots)]
        torch.index_select(blocks, 0, index, out=part)
        self.host[: len(slots)].copy_(part, non_blocking=True)
        self._mark()

    def scatter(self, blocks: torch.Tensor, slots: Slots) -> None:
        """Enqueue a copy of the host buffer to *slots* in the device memory *blocks*."""
        index, part = torch.from_numpy(slots).to(blocks.device, non_blocking=True), self.device[: len(slots)]
        part.copy_(self.host[: len(slots)], non_blocking=True)
        blocks.index_copy_(0, index, part)
        self._mark()

    def wait(self) -> None:
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
    """Return a view as 8-byte words, [num_slots, words], which gather faster than bytes.

    Returns *blocks* itself if the block size or the address is not a multiple of 8 bytes.
    """
    fits = blocks.shape[1] % _WORD_BYTES == 0 and blocks.data_ptr() % _WORD_BYTES == 0
    return blocks.view(torch.int64) if fits else blocks


def _wait_landed(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
