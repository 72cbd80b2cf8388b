"""Opening the disk below an engine: its store in a process of its own, its lanes, its memory as files."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence

from kvtier.connectors.disk_below.disk_below import DiskBelow, TakenAtOnce
from kvtier.connectors.disk_below.mapped_file import open_behind
from kvtier.engine.config import DiskConfig
from kvtier.engine.stores.disk_store import codec_of_others, refuse_small, store_settings
from kvtier.engine.stores.reopening_store import ReopeningStore
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.transfer.lane import Lane, ThreadLane
from kvtier.transfer.transfer_engine import Route

log = logging.getLogger(__name__)

NUM_READERS = 4
MAX_QUEUED_BYTES = 256 << 20  # to be written: so much of an engine's host memory is kept in place by writes
OPENING_WAIT_S = 5.0  # at the start; a store that takes longer joins later


def open_disk_below(
    config: DiskConfig,
    namespace: bytes,
    row_bytes: Callable[[int], int],
    memories: Sequence[memoryview] = (),
    num_groups: int = 1,
) -> DiskBelow:
    """Open the configured store as the disk below an engine; the caller closes it.

    *namespace*: 16 bytes for all that decides the bytes of a row beside its name. *row_bytes*: of a group, for
    *num_groups* of them, numbered from 0. *memories* are what the engine's rows lie in, as a whole: one that is mapped
    from a file, shared, is read and written by the store's process itself, other rows are copied on their way.

    ValueError, with what to do, for a configuration that cannot be used. A folder that cannot be opened is none:
    nothing is held until it can be, and `statistics` says why.
    """
    refuse_small(config, sum(row_bytes(group_id) for group_id in range(num_groups)))
    settings = store_settings(config, codec_of_others(config))
    shared = [file for memory in memories if (file := open_behind(memory)) is not None]
    store = ReopeningStore(settings, shared, timeout_s=config.read_timeout_s)

    def end_store() -> None:
        store.close()
        for memory in shared:
            os.close(memory.file)

    def make_lanes(finished: TakenAtOnce) -> Mapping[Route, Lane]:
        return {
            Route.HOST_TO_DISK: ThreadLane(finished, "store"),
            Route.DISK_TO_HOST: ThreadLane(finished, "load", num_threads=NUM_READERS),
        }

    if not store.wait_opened(OPENING_WAIT_S):
        log.warning("disk %s: %s; nothing is cached there until it opens", config.path, store.standing().why)
    disk = DiskTier(store, namespace, written_bytes_per_day=config.max_written_bytes_per_day, opening=store.opening)
    return DiskBelow(disk, make_lanes, NUM_READERS, MAX_QUEUED_BYTES, row_bytes, end_store)
