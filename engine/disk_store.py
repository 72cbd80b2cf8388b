"""The disk tier's store as the configuration asks for it."""

from collections.abc import Sequence
from pathlib import Path

from kvtier.engine.config import DiskConfig
from kvtier.engine.runner import ModelRunner
from kvtier.store.channel import SharedMemory
from kvtier.store.codec import NO_CODEC, Codec, ZstdPlaneCodec
from kvtier.store.data_file import BESIDES_BYTES, capacity_within, map_bytes
from kvtier.store.durability import Durability
from kvtier.store.store_process import StoreProcess
from kvtier.store.store_settings import StoreSettings
from kvtier.transfer.block_memory import BlockMemory

LEAST_BLOCKS = 8  # of all groups together; with less, LMDB's index alone fills the store


def open_store(config: DiskConfig, runner: ModelRunner, memories: Sequence[BlockMemory]) -> StoreProcess:
    """A store, in a process of its own, whose folder stays within the configured capacity. What opening raises;
    ValueError, with what to do, for a capacity that holds next to nothing."""
    least = LEAST_BLOCKS * sum(runner.block_bytes)
    capacity_bytes = capacity_within(config.capacity)
    if capacity_bytes < least:
        raise ValueError(
            f"disk capacity: {config.capacity} bytes for blocks of {sum(runner.block_bytes)}; "
            f"use {disk_bytes(least)} or more"
        )
    codec: Codec = ZstdPlaneCodec(runner.model.dtype.itemsize) if config.codec == "zstd" else NO_CODEC
    settings = StoreSettings(
        Path(config.path),
        capacity_bytes,
        codec,
        durability=Durability(config.durability),
        interval_s=config.checkpoint_s,
    )
    return StoreProcess(settings, [SharedMemory(*memory.host_span()) for memory in memories])


def disk_bytes(stored_bytes: int) -> int:
    """The capacity to configure for a disk that holds that much."""
    return map_bytes(stored_bytes) + BESIDES_BYTES
