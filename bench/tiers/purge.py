"""How long does a step wait for an operator's reset? Each call of a purge is timed, over pools of a million blocks.

Documents of 1,024 blocks of two tenants fill device and host memory, and a part of them a store on disk; the blocks
are small, since nothing here depends on their bytes. The store is in a process of its own, as an engine has it. Then
one tenant is evicted from every tier, and then all, part by part, as the engine's thread does it between two steps.
The disk's part is a lane's, so only what that thread does is timed: its own processor time, as other programs may be
running beside it; with the engine's care of garbage.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.report import Row, arguments, publish
from bench.rounds import at_most
from kvtier.engine.garbage import Garbage
from kvtier.store.codec.seal import charged_bytes
from kvtier.store.process.store_process import StoreProcess
from kvtier.store.store_settings import StoreSettings
from kvtier.tiers.cache import CacheOptions, TieredCache
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.lower.local_tiers import lower_tiers
from kvtier.tiers.lower.name_set import NAMESPACE_BYTES
from kvtier.tiers.lower.purge import PurgeOrder
from kvtier.tiers.naming.block_hash import BlockChain, ExtraKeys
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.naming.named_blocks import tenant_of
from kvtier.tiers.naming.tier import Tier
from kvtier.transfer.block_memory import CpuMemory
from kvtier.transfer.lane import Finished, ThreadLane
from kvtier.transfer.transfer_engine import Route, TransferEngine

BLOCK_SIZE = 4  # tokens
BLOCK_BYTES = 64
DOCUMENT = 1024  # blocks
PAUSE_S = 0.002  # between two calls, as the servers have it
MAX_S = 0.005  # that a call may take: a thirtieth of a step of a small model on a CPU


class Filled:
    """Tiers that are full of the documents of the tenants *a* and *b*, by turns."""

    def __init__(self, folder: Path, num_device: int, num_host: int, num_disk: int) -> None:
        finished = Finished()
        lanes = {route: ThreadLane(finished, route) for route in Route}
        groups, self.transfers = [FullAttention(BLOCK_SIZE)], TransferEngine(lanes, finished)
        memory = CpuMemory(np.zeros((num_device, BLOCK_BYTES), np.uint8), num_host)
        disk_bytes = num_disk * charged_bytes(BLOCK_BYTES)
        self.store = StoreProcess(StoreSettings(folder / "store", 2 * disk_bytes))
        self.store.open()
        disk = DiskTier(self.store, bytes(NAMESPACE_BYTES), written_bytes_per_day=num_disk * BLOCK_BYTES)
        lower = lower_tiers(groups, [memory], self.transfers, disk)
        self.cache = TieredCache(groups, [memory], self.transfers, lower, options=CacheOptions(copies_all_down=True))
        for number in range(num_host // DOCUMENT):
            self.compute("ab"[number % 2], number)
            self.copy_all_down()

    def compute(self, tenant: str, number: int) -> None:
        """Have a document's blocks named in device slots, and let go of them."""
        chain = BlockChain(BLOCK_SIZE, ExtraKeys(cache_salt=tenant))
        chain.extend([number] * (DOCUMENT * BLOCK_SIZE))
        while (tables := self.cache.allocate([DOCUMENT])) is None:
            self.cache.wait(0.01)
        self.cache.commit(tables, chain, 0, DOCUMENT * BLOCK_SIZE)
        self.cache.release(tables)

    def copy_all_down(self) -> None:
        """Until every block has a copy in host memory, and on disk while that may be written to."""
        while self.cache.drain.spill_rest():
            self.cache.wait(0.01)

    def close(self) -> None:
        self.cache.close()
        self.store.close()


@dataclass(frozen=True)
class Calls:
    """What a purge's calls took, and what it evicted."""

    seconds: npt.NDArray[np.float64]  # [call]
    total_s: float
    counted_s: float  # that counting what is leased took
    num_blocks: int


def purged(filled: Filled, order: PurgeOrder) -> Calls:
    """Carry the order out."""
    purge = filled.cache.purge(order)
    seconds: list[float] = []
    began_at = time.perf_counter()
    is_done = False
    while not is_done:
        before = time.thread_time()
        is_done = purge.go_on()
        seconds.append(time.thread_time() - before)
        filled.cache.poll()
        time.sleep(PAUSE_S)
    total_s = time.perf_counter() - began_at
    before = time.thread_time()
    outcome = purge.outcome()
    counted_s = time.thread_time() - before
    return Calls(np.array(seconds), total_s, counted_s, sum(each.num_blocks for each in outcome.values()))


def rows_of(what: str, calls: Calls) -> list[Row]:
    """The figures of one purge."""
    return [
        Row(f"{what}: blocks that left", calls.num_blocks, "blocks"),
        Row(f"{what}: a call, median", 1e3 * float(np.median(calls.seconds)), "ms"),
        Row(f"{what}: a call, 99th percentile", 1e3 * float(np.percentile(calls.seconds, 99)), "ms"),
        at_most(f"{what}: the longest call", 1e3 * float(calls.seconds.max()), "ms", 1e3 * MAX_S),
        Row(f"{what}: counting what is leased", 1e3 * calls.counted_s, "ms"),
        Row(f"{what}: in all", calls.total_s, "s"),
    ]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--blocks", type=int, help="of host memory (1,048,576); half as many of the device")
    parser.add_argument("--disk-blocks", type=int, help="that are on disk (65,536)")
    options = parser.parse_args()
    num_blocks = options.blocks or options.effort.of(1 << 20, quick=4096)
    num_on_disk = options.disk_blocks or options.effort.of(1 << 16, quick=512)
    with tempfile.TemporaryDirectory() as folder, Garbage():
        filled = Filled(Path(folder), num_blocks // 2, num_blocks, num_on_disk)
        purged(filled, PurgeOrder(tenant=tenant_of("a"), max_blocks=512))  # numpy imports a part of itself late
        rows = rows_of("a tenant", purged(filled, PurgeOrder(tenant=tenant_of("a"))))
        memory = frozenset({Tier.DEVICE, Tier.HOST})
        rows += rows_of("the rest of memory", purged(filled, PurgeOrder(memory)))
        filled.close()
    publish("purge", rows, options.json)


if __name__ == "__main__":
    main()
