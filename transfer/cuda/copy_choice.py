"""The choice of the fastest copy method, by a short measurement at startup."""

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from kvtier.transfer.block_memory import Slots
from kvtier.transfer.cuda.copies import BatchCopies, BlockCopies, Ends, LoopCopies, StagedCopies
from kvtier.transfer.cuda.kernel import KernelCopies

log = logging.getLogger(__name__)

CopyMethod = Callable[[Ends], BlockCopies]
COPIES: Mapping[str, CopyMethod] = {
    "batch": BatchCopies,
    "loop": LoopCopies,
    "kernel": KernelCopies,
    "staged": StagedCopies,
}

# Bytes per copy: enough to outweigh the start of a copy. All rounds of three methods take about 50 ms at 25 GB/s.
TRIAL_BYTES = 16 << 20
MAX_TRIAL_BLOCKS = 1024
NUM_ROUNDS = 5
CLOSE = 0.9  # share of the maximum speed that counts as equal: a loaded machine shows no smaller difference


@dataclass(frozen=True)
class CopyChoice:
    """The copy methods chosen by a measurement, and the measured speeds of all methods in GB/s.

    *down* is the method for copies to the host, and *up* the method for copies to the device.
    """

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
    """Return how many device slots, and as many host slots, the measurement in `choose_copies` needs."""
    return min(max(2, TRIAL_BYTES // block_bytes), MAX_TRIAL_BLOCKS)


def choose_copies(ways: Mapping[str, CopyMethod], scratch: Ends) -> CopyChoice:
    """Measure each method in *ways* on scattered blocks in *scratch*, and choose the fastest in each direction.

    Overwrites all slots of *scratch*. Among methods of about equal speed, the earlier one in *ways* wins. A method that
    is not available, fails, or copies wrong bytes gets speed 0.

    Raises:
        RuntimeError: No method works.
    """
    device, num_blocks = scratch.device.device, len(scratch.device)
    rng = np.random.default_rng(0)
    above, below = rng.permutation(num_blocks), rng.permutation(num_blocks)
    apart: AbstractContextManager[object] = nullcontext()
    if device.type == "cuda":  # not the default stream: compute runs there, and batched calls would need a second one
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # untyped in torch
        stream.wait_stream(torch.cuda.current_stream(device))
        apart = torch.cuda.stream(stream)
    down, up = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0.0)
    with apart:
        for name, way in ways.items():
            try:
                down[name], up[name] = _speeds(way(scratch), scratch, above, below)
            except Exception as error:  # whatever the error, another method is used
                log.info("block copies: method %s is not available: %s", name, error)
    if not any(down.values()):
        raise RuntimeError(f"no method to copy blocks works on {device}; tried {', '.join(ways)}; see the log")
    return CopyChoice(fastest(down), fastest(up), down, up)


def fastest(gb_per_s: Mapping[str, float]) -> str:
    """Return the first method whose speed is at least `CLOSE` times the maximum."""
    enough = CLOSE * max(gb_per_s.values())
    return next(name for name, speed in gb_per_s.items() if speed >= enough)


def _speeds(copies: BlockCopies, scratch: Ends, above: Slots, below: Slots) -> tuple[float, float]:
    """Return the median speeds of copies to the host and to the device in GB/s, after a warm-up round.

    Raises RuntimeError if the method copies wrong bytes.
    """
    down = [_seconds(lambda: copies.to_host(above, below)) for _ in range(NUM_ROUNDS + 1)][1:]
    up = [_seconds(lambda: copies.to_device(below, above)) for _ in range(NUM_ROUNDS + 1)][1:]
    num_bytes = len(above) * scratch.device.shape[1]
    _prove(copies, scratch, above, below)
    return num_bytes / statistics.median(down) / 1e9, num_bytes / statistics.median(up) / 1e9


def _prove(copies: BlockCopies, scratch: Ends, above: Slots, below: Slots) -> None:
    """Copy random bytes to the device and back to other host slots; raise RuntimeError if the bytes changed."""
    noise = np.random.default_rng(1).integers(0, 256, scratch.host.shape, dtype=np.uint8)
    scratch.host.numpy()[:] = noise
    copies.to_device(below, above)
    copies.to_host(above, above)
    if not (scratch.host.numpy()[above] == noise[below]).all():
        raise RuntimeError("a trial with random bytes copied wrong bytes")


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
