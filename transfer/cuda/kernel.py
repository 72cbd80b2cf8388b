"""KernelCopies: a copy method for small blocks, in which one kernel copies all blocks from or to pinned host memory."""

from importlib import import_module

import numpy as np
import torch

from kvtier.transfer.block_memory import Slots
from kvtier.transfer.cuda.copies import Ends

_WORD_BYTES = 16  # one load instruction of a thread
_THREADS = 256
_WORDS_A_THREAD = 4  # so that one thread block copies a KV block of 16 KiB
SOURCE = r"""
extern "C" __global__ void copy_blocks(
    const uint4* const* sources, uint4* const* targets, const unsigned long long num_words
) {
    const uint4* source = sources[blockIdx.x];
    uint4* target = targets[blockIdx.x];
    const unsigned long long step = (unsigned long long)gridDim.y * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.y * blockDim.x + threadIdx.x; i < num_words; i += step)
        target[i] = source[i];
}
"""


class KernelCopies:
    """A copy method with one kernel launch for all blocks. It uses the GPU's multiprocessors, not its copy engines.

    The host slots must be pinned, because a kernel can access only pinned host memory.
    """

    def __init__(self, ends: Ends) -> None:
        """Prepare copies between *ends*. CuPy compiles the kernel at its first launch.

        Raises:
            ImportError: CuPy is not installed.
            RuntimeError: There is no CUDA device, or blocks are not aligned to multiples of 16 bytes.
        """
        block_bytes = ends.device.shape[1]
        if ends.device.device.type != "cuda":
            raise RuntimeError("the copy kernel needs a CUDA device")
        if block_bytes % _WORD_BYTES or ends.device.data_ptr() % _WORD_BYTES or ends.host.data_ptr() % _WORD_BYTES:
            raise RuntimeError(f"blocks of {block_bytes} bytes are not aligned to multiples of {_WORD_BYTES} bytes")
        self._cupy = import_module("cupy")
        self._kernel = self._cupy.RawKernel(SOURCE, "copy_blocks")
        self._ends = ends
        self._num_words = block_bytes // _WORD_BYTES

    def to_host(self, device: Slots, host: Slots) -> None:
        self._copy(self._addresses(self._ends.device, device), self._addresses(self._ends.host, host))

    def to_device(self, host: Slots, device: Slots) -> None:
        self._copy(self._addresses(self._ends.host, host), self._addresses(self._ends.device, device))

    def _addresses(self, blocks: torch.Tensor, slots: Slots) -> Slots:
        # Registered host memory has the same address on the device (unified addressing).
        return blocks.data_ptr() + slots * blocks.shape[1]

    def _copy(self, sources: Slots, targets: Slots) -> None:
        if not len(sources):
            return
        device = self._ends.device.device
        stream = torch.cuda.current_stream(device)
        pairs = torch.from_numpy(np.stack([sources, targets])).to(device)
        rows = -(-self._num_words // (_THREADS * _WORDS_A_THREAD))
        with self._cupy.cuda.Device(device.index), self._cupy.cuda.ExternalStream(stream.cuda_stream):
            arguments = (pairs[0].data_ptr(), pairs[1].data_ptr(), self._num_words)
            self._kernel((len(sources), rows), (_THREADS,), tuple(map(np.uint64, arguments)))
        stream.synchronize()
