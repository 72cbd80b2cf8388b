"""Measures promotions and spills of a lane, with the digest of every block, and digests alone, by threads."""

import queue
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from bench.report import Row
from bench.rounds import KIB, MIB, Side, Work, alternate, at_least, gb_per_s, ratio_of, ready, seconds
from kvtier.store.process.store_process import SWITCH_INTERVAL_S
from kvtier.store.record import digest
from kvtier.transfer.cuda.lane import CudaLane
from kvtier.transfer.cuda.memory import CudaMemory
from kvtier.transfer.lane import Finished, Transfer

BLOCK_BYTES = 512 * KIB
NUM_BLOCKS = 1024
NUM_BYTES = NUM_BLOCKS * BLOCK_BYTES
NUM_THREADS = (1, 2, 4, 8)
BATCH_BYTES = (4 * MIB, 16 * MIB)
PROMISED = (4, 16 * MIB, "released")  # threads, batch and lock of the engine's lanes
MIN = 0.92
DEADLINE_S = 60.0

T = TypeVar("T")
Digest = Callable[[Any], bytes]
# "kept": in pieces, holding the interpreter's lock. "released": a whole block at once, without the lock.
DIGESTS: dict[str, Digest] = {"kept": digest, "released": xxhash.xxh3_128_digest}


def lanes(gpu: torch.device, num_rounds: int) -> list[Row]:
    """Rows of copying half a GiB of scattered blocks, each verified before it goes up or digested after coming down."""
    device = torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8, device=gpu)
    memory = CudaMemory(device, NUM_BLOCKS)
    memory.wait_prepared(DEADLINE_S)
    plain = torch.zeros(NUM_BYTES, dtype=torch.uint8, pin_memory=True)
    rng = np.random.default_rng(1)
    above, below = rng.permutation(NUM_BLOCKS).tolist(), rng.permutation(NUM_BLOCKS).tolist()
    memory.to_host(above, below)
    known = [digest(memory.host_block(slot)) for slot in range(NUM_BLOCKS)]
    rows = []
    for is_down in (True, False):
        sides, opened = [_plain(device, plain, is_down)], []
        for num_threads in NUM_THREADS:
            finished: Finished = queue.SimpleQueue()
            lane = CudaLane(finished, f"bench-{num_threads}", gpu, NUM_BLOCKS, num_threads)
            opened.append(lane)
            for batch_bytes in BATCH_BYTES:
                for kind, take_digest in DIGESTS.items():
                    works = _works(memory, above, below, known, batch_bytes // BLOCK_BYTES, take_digest, is_down)
                    name = f"{num_threads} threads, {batch_bytes // MIB} MiB, lock {kind}"
                    sides.append(Side(name, ready(partial(_run, works, lane, finished))))
        times = alternate(sides, num_rounds)
        direction = "spill" if is_down else "promote"
        rows.append(Row(f"{direction} with digests: plain copy", gb_per_s(NUM_BYTES, times["plain"]), "GB/s"))
        promised = f"{PROMISED[0]} threads, {PROMISED[1] // MIB} MiB, lock {PROMISED[2]}"
        for name in list(times)[1:]:
            ratio = ratio_of(times["plain"], times[name])
            minimum = MIN if name == promised else None
            rows.append(at_least(f"{direction} with digests: {name} / plain", ratio, minimum))
        for lane in opened:
            lane.close()
    memory.close()
    return rows


def digests(num_rounds: int) -> list[Row]:
    """Rows of digests by threads, alone and beside a thread that computes in Python, and of the speed left to that."""
    blocks = np.random.default_rng(0).integers(0, 256, (NUM_BLOCKS // 4, BLOCK_BYTES), dtype=np.uint8)
    rows = []
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with _Spinner() as spinner:
        undisturbed, _ = spinner.speed_during(partial(time.sleep, 0.5))
        for kind, take_digest in DIGESTS.items():
            for num_threads in NUM_THREADS:
                work = _digests_by(num_threads, take_digest, blocks)
                name = f"digests of 512 KiB, lock {kind}, {num_threads} threads"
                speed, times = spinner.speed_during(partial(_times, work, num_rounds))
                rows.append(Row(f"{name}, beside a busy thread", gb_per_s(blocks.nbytes, times), "GB/s"))
                rows.append(Row(f"{name}: the busy thread is left", 100 * speed / undisturbed, "%"))
    for kind, take_digest in DIGESTS.items():
        for num_threads in NUM_THREADS:
            times = _times(_digests_by(num_threads, take_digest, blocks), num_rounds)
            name = f"digests of 512 KiB, lock {kind}, {num_threads} threads, alone"
            rows.append(Row(name, gb_per_s(blocks.nbytes, times), "GB/s"))
    return rows


class _Spinner:
    """A thread that counts in Python without a pause."""

    def __init__(self) -> None:
        self._count = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._spin, daemon=True)

    def __enter__(self) -> "_Spinner":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def speed_during(self, work: Callable[[], T]) -> tuple[float, T]:
        """Counts a second while *work* goes on, and what it returned."""
        started, before = time.perf_counter(), self._count
        result = work()
        return (self._count - before) / (time.perf_counter() - started), result

    def _spin(self) -> None:
        while not self._stop.is_set():
            self._count += 1


def _digests_by(num_threads: int, take_digest: Digest, blocks: npt.NDArray[np.uint8]) -> Work:
    """Work that takes the digests of all *blocks* by *num_threads* threads."""

    def digest_share(share: npt.NDArray[np.int64]) -> None:
        for block_id in share:
            take_digest(blocks[block_id].data)

    def side_by_side() -> None:
        shares = np.array_split(np.arange(len(blocks)), num_threads)
        threads = [threading.Thread(target=digest_share, args=(share,)) for share in shares]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return side_by_side


def _times(work: Work, num_rounds: int) -> list[float]:
    """Seconds of *work* in each round. A first round is left out."""
    return [seconds(work) for _ in range(num_rounds + 1)][1:]


def _plain(device: torch.Tensor, plain: torch.Tensor, is_down: bool) -> Side:
    flat = device.view(-1)
    target, source = (plain, flat) if is_down else (flat, plain)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.current_stream().synchronize()

    return Side("plain", ready(copy))


def _works(
    memory: CudaMemory,
    above: list[int],
    below: list[int],
    known: list[bytes],
    num_blocks: int,
    take_digest: Digest,
    is_down: bool,
) -> list[Callable[[], object]]:
    """The work of a spill (*is_down*) or promotion that a lane gets, batch by batch."""

    def spill(upper: list[int], lower: list[int]) -> list[bytes]:
        memory.to_host(upper, lower)
        return [take_digest(memory.host_block(slot)) for slot in lower]

    def promote(upper: list[int], lower: list[int]) -> None:
        good = [take_digest(memory.host_block(slot)) == known[slot] for slot in lower]
        assert all(good), "a block has changed"
        memory.to_device(lower, upper)

    work = spill if is_down else promote
    parts = [slice(start, start + num_blocks) for start in range(0, NUM_BLOCKS, num_blocks)]
    return [partial(work, above[part], below[part]) for part in parts]


def _run(works: list[Callable[[], object]], lane: CudaLane, finished: Finished) -> None:
    for work in works:
        lane.submit(Transfer(work, 0, lambda transfer: None))
    for _ in works:
        transfer = finished.get(timeout=DEADLINE_S)
        if transfer.error is not None:
            raise transfer.error
