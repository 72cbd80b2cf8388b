"""`HostTier`: host memory full of dirty blocks, above a store, and the flush that writes them to disk at shutdown."""

from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from bench.rounds import MIB
from kvtier.store.lmdb.data_file import capacity_within
from kvtier.store.process.channel import SharedMemory
from kvtier.store.process.store_process import NUM_WRITERS, StoreProcess
from kvtier.store.record import digest
from kvtier.store.store_settings import StoreSettings
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.device.eviction_order import NamedSpan
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.lower.local_tiers import LocalTiers
from kvtier.tiers.lower.name_set import NAMESPACE_BYTES
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.groups import FullAttention
from kvtier.transfer.block_memory import CpuMemory
from kvtier.transfer.lane import Finished, ThreadLane
from kvtier.transfer.transfer_engine import Route, TransferEngine

BLOCK_BYTES = MIB
_PROMPT_BLOCKS = 32
_NUM_KINDS = 61  # blocks of different bytes
_FLUSH_TIMEOUT_S = 600.0


class HostTier:
    """The tiers of an engine on a CPU: one device block, *num_bytes* of host memory, and a disk a quarter larger."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self.num_blocks = num_bytes // BLOCK_BYTES
        self._memory = CpuMemory(np.zeros((1, BLOCK_BYTES), np.uint8), self.num_blocks)
        self.blocks = [self._memory.host_block(slot) for slot in range(self.num_blocks)]
        rng = np.random.default_rng(0)
        kinds = [rng.integers(0, 256, BLOCK_BYTES, np.uint8) for _ in range(_NUM_KINDS)]
        for slot, block in enumerate(self.blocks):
            np.copyto(np.frombuffer(block, np.uint8), kinds[slot % _NUM_KINDS])
        self._digests = [digest(kind.data) for kind in kinds]
        settings = StoreSettings(folder, capacity_within(num_bytes * 5 // 4 + 64 * MIB))
        self._store = StoreProcess(settings, [SharedMemory(*self._memory.host_span())])
        self._store.open()
        finished, groups = Finished(), [FullAttention(16)]
        lanes = {route: ThreadLane(finished, route, num_threads=NUM_WRITERS) for route in Route}
        self._transfers = TransferEngine(lanes, finished)
        self._tiers = LocalTiers(groups, [self._memory], self._transfers, DiskTier(self._store, bytes(NAMESPACE_BYTES)))
        self._cache = TieredCache(groups, [self._memory], self._transfers, self._tiers)
        self._number = 0
        while not self._tiers.status.is_indexed:
            self._cache.wait(0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cache.close()
        self._store.close()
        self._memory.close()

    @property
    def pid(self) -> int:
        """The process of the store."""
        assert self._store.pid is not None
        return self._store.pid

    def fill(self) -> None:
        """Give every host slot a new block, which is not on disk."""
        num_left = self.num_blocks
        while num_left:
            slots = self._tiers.reserve(0, min(_PROMPT_BLOCKS, num_left))
            if not slots:
                self._cache.wait(0.01)
                continue
            num_left -= len(slots)
            self._publish(np.array(slots, np.intp))

    def flush(self) -> None:
        """Write all of host memory to disk, as an engine does before it ends."""
        num_left = self._cache.drain.flush(_FLUSH_TIMEOUT_S)
        assert not num_left, f"{num_left} of {self.num_blocks} blocks were not written"

    def _publish(self, slots: Ids) -> None:
        numbers = range(self._number, self._number + len(slots))
        names = [BlockName(sha256(number.to_bytes(8, "big")).digest()) for number in numbers][::-1]
        self._number += len(slots)
        digests = [self._digests[slot % _NUM_KINDS] for slot in slots.tolist()]
        owners = np.zeros(len(slots), np.uint64)
        self._tiers.publish(0, slots, [NamedSpan(0, len(slots), names, None)], digests, owners)
