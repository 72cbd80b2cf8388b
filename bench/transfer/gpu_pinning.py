"""Measures how long pinning host memory in the background takes, and how long it delays other CUDA calls."""

import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import torch

from bench.report import Row
from bench.rounds import KIB, MIB, at_most
from kvtier.transfer.cuda import memory as cuda_memory
from kvtier.transfer.cuda.memory import CudaMemory, cuda_pin
from kvtier.transfer.host_slab import PIECE_BYTES, Pin

BLOCK_BYTES = 512 * KIB
MAX_MS = 50.0
QUIET_S = 1.0
PINNING_S = 90.0


def pinning(gpu: torch.device, num_bytes: int) -> list[Row]:
    """Rows of pinning *num_bytes* of host memory, piece after piece, while small CUDA calls go on."""
    device = torch.zeros(4, BLOCK_BYTES, dtype=torch.uint8, device=gpu)
    small = torch.zeros(1024, device=gpu)
    quiet = _small_calls(small, lambda: False, QUIET_S)
    pieces: list[float] = []
    started = time.perf_counter()
    with patch.object(cuda_memory, "cuda_pin", lambda device: _timed(cuda_pin(device), pieces)):
        memory = CudaMemory(device, num_bytes // BLOCK_BYTES, way="loop")
    memory.to_host([0], [memory.num_host_slots - 1])  # the slot that is pinned last
    first_copy_s = time.perf_counter() - started
    stalls = _small_calls(small, lambda: memory.prepared_bytes == num_bytes, PINNING_S)
    took_s = time.perf_counter() - started
    prepared = memory.prepared_bytes
    memory.close()
    size = f"pinning {num_bytes >> 30} GiB"
    return [
        Row(f"{size}: prepared", 100 * prepared / num_bytes, "%", ">= 100", prepared == num_bytes),
        Row(f"{size}: took", took_s, "s"),
        Row(f"{size}: first block copied after", 1000 * first_copy_s, "ms"),
        Row(f"{size}: a piece of {PIECE_BYTES // MIB} MiB, median", 1000 * statistics.median(pieces), "ms"),
        Row(f"{size}: a piece, longest", 1000 * max(pieces), "ms"),
        Row(f"{size}: a small CUDA call before, longest", 1000 * max(quiet), "ms"),
        Row(f"{size}: a small CUDA call meanwhile, median", 1000 * statistics.median(stalls), "ms"),
        at_most(f"{size}: a small CUDA call meanwhile, longest", 1000 * max(stalls), "ms", MAX_MS),
    ]


def _small_calls(tensor: torch.Tensor, is_over: Callable[[], bool], max_s: float) -> list[float]:
    """Seconds of each of many small CUDA calls: a launch, a copy and a wait."""
    times, give_up_at = [], time.perf_counter() + max_s
    host = torch.zeros(tensor.shape, pin_memory=True)
    while not is_over() and time.perf_counter() < give_up_at:
        started = time.perf_counter()
        tensor.add_(1)
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        times.append(time.perf_counter() - started)
    return times or [0.0]


def _timed(pin: Pin, times: list[float]) -> Pin:
    def timed_pin(address: int, num_bytes: int) -> Callable[[], None]:
        started = time.perf_counter()
        unpin = pin(address, num_bytes)
        times.append(time.perf_counter() - started)
        return unpin

    return timed_pin
