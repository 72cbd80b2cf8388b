"""Construction of the disk tier for an engine, which shares the engine's memory with the store's process if it can."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence

from kvtier.connectors.disk_below.disk_below import DiskBelow, InlineQueue
from kvtier.connectors.disk_below.mapped_file import open_backing_file
from kvtier.engine.config import DiskConfig
from kvtier.engine.machine_limits import refuse_more_than_disk
from kvtier.engine.stores.disk_store import codec_of_others, refuse_small, store_settings
from kvtier.engine.stores.reopening_store import ReopeningStore
from kvtier.store.disk_writes import DiskWrites
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.transfer.lane import Lane, ThreadLane
from kvtier.transfer.transfer_engine import Route

log = logging.getLogger(__name__)

NUM_READERS = 4
NUM_WRITERS = 2  # one computes the digests of its blocks while the other one writes
MAX_QUEUED_BYTES = 256 << 20  # max bytes of an engine's host memory that queued writes keep in use
OPENING_WAIT_S = 5.0  # max wait at the start; a store that takes longer is used as soon as it is open


def open_disk_below(
    config: DiskConfig,
    namespace: bytes,
    row_bytes: Callable[[int], int],
    memories: Sequence[memoryview] = (),
    num_groups: int = 1,
    writes: DiskWrites = DiskWrites.DIRECT,
) -> DiskBelow:
    """Open the configured store as a disk tier for an engine. The caller must close it.

    It is not an error if the folder cannot be opened. Until it can be opened, lookups find no blocks and no blocks are
    stored. `statistics` gives the reason.

    Args:
        config: The settings of the store.
        namespace: A 16-byte digest of all that determines a block's bytes besides its name and group, such as the
            model.
        row_bytes: Returns the number of bytes of a block, given its group.
        memories: The regions of memory that contain the engine's blocks. If a region is a shared mapping of a file, the
            store's process accesses it directly. Otherwise bytes are copied between the processes.
        num_groups: Number of groups of blocks, which are numbered from 0. All blocks of a group have the same size.
        writes: How blocks are written if *config* does not say it.

    Raises:
        ValueError: If the configuration cannot be used. The message says what to do.
    """
    refuse_more_than_disk(config)
    refuse_small(config, sum(row_bytes(group_id) for group_id in range(num_groups)))
    settings = store_settings(config, codec_of_others(config), writes=writes)
    shared = [file for memory in memories if (file := open_backing_file(memory)) is not None]
    store = ReopeningStore(settings, shared, timeout_s=config.read_timeout_s)

    def end_store() -> None:
        store.close()
        for memory in shared:
            os.close(memory.file)

    def make_lanes(finished: InlineQueue) -> Mapping[Route, Lane]:
        return {
            Route.HOST_TO_DISK: ThreadLane(finished, "store", num_threads=NUM_WRITERS),
            Route.DISK_TO_HOST: ThreadLane(finished, "load", num_threads=NUM_READERS),
        }

    if not store.wait_opened(OPENING_WAIT_S):
        log.warning("disk %s: %s; nothing is cached there until it opens", config.path, store.standing().why)
    disk = DiskTier(store, namespace, written_bytes_per_day=config.max_written_bytes_per_day, opening=store.opening)
    return DiskBelow(disk, make_lanes, NUM_READERS, MAX_QUEUED_BYTES, row_bytes, end_store)
