"""Opens the store under test, by kind and level of durability."""

import sys
import time
from enum import StrEnum
from pathlib import Path

from bench.store.blocks import Slots
from kvtier.store.blob_store import BlobStore
from kvtier.store.disk_writes import DiskWrites
from kvtier.store.durability import Durability
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.process.channel import SharedMemory
from kvtier.store.process.store_process import SWITCH_INTERVAL_S, StoreProcess
from kvtier.store.store_settings import StoreSettings

WARM_S = 0.7  # the store's process enters the shared memory in its page table meanwhile


class Kind(StrEnum):
    """The process in which the store works."""

    INLINE = "inline"  # in the process that asks
    CHILD = "child"  # in a process of its own, over the memory of the one that asks


# THE STORE UNDER TEST: all of bench/store/ opens its stores here.
def open_store(
    kind: Kind,
    level: Durability,
    folder: Path,
    capacity_bytes: int,
    slots: Slots,
    writes: DiskWrites = DiskWrites.DIRECT,
) -> BlobStore:
    """Open the store in *folder*. All blocks that are put or read lie in *slots*."""
    if kind is Kind.INLINE:
        return LmdbStore(folder, capacity_bytes, durability=level, writes=writes)
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as the engine does
    settings = StoreSettings(folder, capacity_bytes, durability=level, writes=writes)
    store = StoreProcess(settings, [SharedMemory(slots.fd, slots.address, slots.num_bytes)])
    store.open()
    time.sleep(WARM_S)
    return store
