"""Chooses the fastest way to copy blocks by a short measurement at the start, on memory of its own."""

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from kvtier.transfer.block_runs import Slots
from kvtier.transfer.cuda.copies import BatchCopies, BlockCopies, Ends, LoopCopies, StagedCopies
from kvtier.transfer.cuda.kernel import KernelCopies

log = logging.getLogger(__name__)

Way = Callable[[Ends], BlockCopies]
COPIES: Mapping[str, Way] = {
    "batch": BatchCopies,
    "loop": LoopCopies,
    "kernel": KernelCopies,
    "staged": StagedCopies,
}

TRIAL_BYTES = 16 << 20  # in one copy: long against its start; all rounds of three ways take about 50 ms at 25 GB/s
MAX_TRIAL_BLOCKS = 1024
NUM_ROUNDS = 5
CLOSE = 0.9  # of the fastest: no difference that a loaded machine would show


@dataclass(frozen=True)
class CopyChoice:
    """The names of the ways that were chosen down to the host and up to the device, and all speeds measured (GB/s)."""

    down: str
    up: str
    down_gb_per_s: Mapping[str, float]
    up_gb_per_s: Mapping[str, float]

    def __str__(self) -> str:
        speeds = ", ".join(
            f"{name} {self.down_gb_per_s[name]:.1f} down {self.up_gb_per_s[name]:.1f} up" for name in self.down_gb_per_s
        )
        return f"{self.down} down, {self.up} up (GB/s: {speeds})"


def num_trial_blocks(block_bytes: int) -> int:
    """Slots that each side of a trial should have."""
    return min(max(2, TRIAL_BYTES // block_bytes), MAX_TRIAL_BLOCKS)


def choose_copies(ways: Mapping[str, Way], scratch: Ends) -> CopyChoice:
    """Try each way on scattered blocks in *scratch*, all of whose slots are free; the first of *ways* is preferred.

    A way that is missing here, fails, or copies wrong bytes has speed 0. RuntimeError if none works.
    """
    device, num_blocks = scratch.device.device, len(scratch.device)
    rng = np.random.default_rng(0)
    above, below = rng.permutation(num_blocks), rng.permutation(num_blocks)
    apart: AbstractContextManager[object] = nullcontext()
    if device.type == "cuda":  # not on the default stream: compute is there, and a batched call would need a detour
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch
        stream.wait_stream(torch.cuda.current_stream(device))
        apart = torch.cuda.stream(stream)
    down, up = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
    with apart:
        for name, way in ways.items():
            try:
                down[name], up[name] = _speeds(way(scratch), scratch, above, below)
            except Exception as error:  # whatever it is, another way is taken
                log.info("copies of blocks: no %s here: %s", name, error)
    if not any(down.values()):
        raise RuntimeError(f"no way to copy blocks works on {device}: tried {', '.join(ways)}")
    return CopyChoice(fastest(down), fastest(up), down, up)


def fastest(gb_per_s: Mapping[str, float]) -> str:
    """The name of the first way that is about as fast as the fastest."""
    enough = CLOSE * max(gb_per_s.values())
    return next(name for name, speed in gb_per_s.items() if speed >= enough)


def _speeds(copies: BlockCopies, scratch: Ends, above: Slots, below: Slots) -> tuple[float, float]:
    """The speeds down and up in GB/s, medians after a round that does not count. RuntimeError for a wrong byte."""
    down = [_seconds(lambda: copies.to_host(above, below)) for _ in range(NUM_ROUNDS + 1)][1:]
    up = [_seconds(lambda: copies.to_device(below, above)) for _ in range(NUM_ROUNDS + 1)][1:]
    num_bytes = len(above) * scratch.device.shape[1]
    _prove(copies, scratch, above, below)
    return num_bytes / statistics.median(down) / 1e9, num_bytes / statistics.median(up) / 1e9


def _prove(copies: BlockCopies, scratch: Ends, above: Slots, below: Slots) -> None:
    """Copy noise up and back down to other slots; RuntimeError if it comes back changed."""
    noise = np.random.default_rng(1).integers(0, 256, scratch.host.shape, dtype=np.uint8)
    scratch.host.numpy()[:] = noise
    copies.to_device(below, above)
    copies.to_host(above, above)
    if not (scratch.host.numpy()[above] == noise[below]).all():
        raise RuntimeError("it copies wrong bytes")


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
