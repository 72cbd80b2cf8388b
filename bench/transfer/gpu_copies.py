"""Do scattered blocks cross the bus as fast as one plain copy of pinned memory?

Each way to copy, and the one that `CudaMemory` chooses, by block size: down, up, and both at once. Then the same with
the digests that a spill takes and a promotion checks, by threads of a lane; and how long pinning host memory delays
other calls. Ratios are medians over works done in turn in one run, in random order. Two minutes on an H200.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from bench.gpu_report import gpu_arguments, measure, publish_gpu
from bench.report import Row
from bench.rounds import KIB, MIB, Side, Work, alternate, at_least, gb_per_s, in_words, ratio_of, ready
from bench.transfer.gpu_lanes import digests, lanes
from bench.transfer.gpu_pinning import pinning
from kvtier.transfer.cuda.copy_choice import COPIES
from kvtier.transfer.cuda.memory import CudaMemory

SIZES = (64 * KIB, 256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB)
MIN_PROMISED = 512 * KIB  # the promises are about blocks of this size and larger ones
ONE_WAY, BOTH_WAYS = 0.92, 0.85
BATCH_BYTES = 64 * MIB
AT_ONCE = 10  # batches each way, when both ways run at once
PREPARE_S = 30.0


@dataclass(frozen=True)
class Bed:
    """Device slots of one size, and host slots for each way to copy; twice as many of both as a batch has."""

    device: torch.Tensor  # [num_slots, block_bytes]
    memories: dict[str, CudaMemory]  # "chosen" first
    plain: torch.Tensor  # pinned by torch, [BATCH_BYTES]

    @classmethod
    def of(cls, block_bytes: int, gpu: torch.device) -> "Bed":
        """Make a bed with pinned host memory. Ways to copy that this machine does not have are left out."""
        num_slots = 2 * BATCH_BYTES // block_bytes
        device = torch.zeros(num_slots, block_bytes, dtype=torch.uint8, device=gpu)
        memories = {"chosen": CudaMemory(device, num_slots)}
        choice = memories["chosen"].choice
        assert choice is not None, "nothing was chosen"
        for way in COPIES:
            if choice.down_gb_per_s[way]:
                memories[way] = CudaMemory(device, num_slots, way=way)
        for memory in memories.values():
            if not memory.wait_prepared(PREPARE_S):
                raise RuntimeError("host memory could not be pinned: see `ulimit -l`, and the memory of the container")
        return cls(device, memories, torch.zeros(BATCH_BYTES, dtype=torch.uint8, pin_memory=True))

    def close(self) -> None:
        for memory in self.memories.values():
            memory.close()

    def slots(self, scattered: bool) -> tuple[list[int], list[int]]:
        """Device and host slots of a batch: the first ones, or *scattered* ones."""
        num_slots = len(self.device)
        if not scattered:
            return list(range(num_slots // 2)), list(range(num_slots // 2))
        rng = np.random.default_rng(num_slots)
        return rng.permutation(num_slots)[: num_slots // 2].tolist(), rng.permutation(num_slots)[
            : num_slots // 2
        ].tolist()

    def copy(self, way: str, is_down: bool, scattered: bool) -> Work:
        """Work that copies one batch by the call that a lane's thread makes."""
        memory, (above, below) = self.memories[way], self.slots(scattered)
        return (lambda: memory.to_host(above, below)) if is_down else (lambda: memory.to_device(below, above))

    def copy_plain(self, is_down: bool) -> Work:
        """Work that copies as many bytes by one copy of pinned memory."""
        flat = self.device.view(-1)[:BATCH_BYTES]
        target, source = (self.plain, flat) if is_down else (flat, self.plain)

        def copy() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.current_stream().synchronize()

        return copy


def one_way(bed: Bed, size: str, promised: bool, num_rounds: int) -> list[Row]:
    """Rows of every way to copy, contiguous and scattered, against the plain copy."""
    rows = []
    for is_down in (True, False):
        works = {"plain": bed.copy_plain(is_down)}
        for way in bed.memories:
            works[f"{way}, contiguous"] = bed.copy(way, is_down, scattered=False)
            works[f"{way}, scattered"] = bed.copy(way, is_down, scattered=True)
        times = alternate([Side(name, ready(work)) for name, work in works.items()], num_rounds)
        name = f"{size} {'down' if is_down else 'up'}"
        rows.append(Row(f"{name}: plain pinned copy", gb_per_s(BATCH_BYTES, times["plain"]), "GB/s"))
        rows.append(Row(f"{name}: chosen, scattered", gb_per_s(BATCH_BYTES, times["chosen, scattered"]), "GB/s"))
        for side in list(works)[1:]:
            minimum = ONE_WAY if promised and side == "chosen, scattered" else None
            rows.append(at_least(f"{name}: {side} / plain", ratio_of(times["plain"], times[side]), minimum))
    return rows


def both_ways(bed: Bed, size: str, promised: bool, num_rounds: int) -> list[Row]:
    """Rows of both directions at once, each on a stream and a thread of its own, of scattered slots."""
    ours = at_once([bed.copy("chosen", is_down, scattered=True) for is_down in (True, False)])
    other = torch.zeros_like(bed.plain).pin_memory()
    halves = [(other, bed.device.view(-1)[:BATCH_BYTES]), (bed.device.view(-1)[BATCH_BYTES:], bed.plain)]

    def copies(target: torch.Tensor, source: torch.Tensor) -> Work:
        def copy() -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.current_stream().synchronize()

        return copy

    plain = at_once([copies(*half) for half in halves])
    times = alternate([Side("chosen", ready(ours)), Side("plain", ready(plain))], num_rounds)
    num_bytes = 2 * AT_ONCE * BATCH_BYTES
    return [
        Row(f"{size} both ways: two plain copies", gb_per_s(num_bytes, times["plain"]), "GB/s"),
        at_least(
            f"{size} both ways: chosen, scattered / plain",
            ratio_of(times["plain"], times["chosen"]),
            BOTH_WAYS if promised else None,
        ),
    ]


def at_once(works: Sequence[Work]) -> Work:
    """Work that does all *works* side by side, `AT_ONCE` times each."""

    def run(work: Work) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(AT_ONCE):
                work()

    def run_all() -> None:
        threads = [threading.Thread(target=run, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return run_all


def copies(gpu: torch.device, block_bytes: int, num_rounds: int) -> list[Row]:
    """Rows of copying blocks of one size."""
    size, promised = in_words(block_bytes), block_bytes >= MIN_PROMISED
    with closing(Bed.of(block_bytes, gpu)) as bed:
        print(f"{size}: {bed.memories['chosen'].choice}", flush=True)
        with torch.cuda.stream(torch.cuda.Stream()):
            rows = one_way(bed, size, promised, num_rounds)
        return rows + both_ways(bed, size, promised, num_rounds)


def main() -> None:
    options = gpu_arguments(__doc__.partition("\n")[0])
    gpu = torch.device("cuda", torch.cuda.current_device())
    num_rounds, pinned_bytes = (2, 1 << 30) if options.quick else (7, 32 << 30)
    parts: dict[str, Callable[[], list[Row]]] = {
        **{f"blocks of {in_words(size)}": partial(copies, gpu, size, num_rounds) for size in SIZES},
        "lanes": lambda: lanes(gpu, num_rounds),
        "pinning": lambda: pinning(gpu, pinned_bytes),
        "digests": lambda: digests(num_rounds),
    }
    publish_gpu("gpu_copies", measure("gpu_copies", parts, options.json))


if __name__ == "__main__":
    main()
