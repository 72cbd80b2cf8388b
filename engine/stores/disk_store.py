"""The disk tier of an engine, built from its configuration: store, codec, cipher and write budget."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from kvtier.engine.config import DiskConfig, RemoteConfig, TenantConfig
from kvtier.engine.stores.reopening_store import ReopeningStore
from kvtier.store.codec.cipher import Cipher
from kvtier.store.codec.codec import CODECS, NO_CODEC, Codec
from kvtier.store.codec.codec_choice import CodecChoice
from kvtier.store.disk_writes import DiskWrites
from kvtier.store.durability import Durability
from kvtier.store.lmdb.data_file import capacity_within, max_bytes
from kvtier.store.process.channel import SharedMemory
from kvtier.store.store_settings import StoreSettings
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.lower.ssd_life import SsdLife
from kvtier.tiers.naming.named_blocks import tenant_of
from kvtier.tiers.naming.namespace import Namespace
from kvtier.transfer.block_memory import BlockMemory

BACKGROUND_NICENESS = 10  # of writers that no request waits for: computing goes first
MIN_BLOCKS = 8  # of all groups together; with fewer, LMDB's index alone fills the store
_ELEMENT_BYTES = {"torch.bfloat16": 2, "torch.float16": 2, "torch.float32": 4}
_ELEMENTS = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}


def open_store(
    config: DiskConfig, dtype: str, memories: Sequence[BlockMemory], tenants: Mapping[str, TenantConfig]
) -> ReopeningStore:
    """Start to open the configured store in a process of its own, and return before it is open.

    If the folder cannot be opened, no error is raised, and `ReopeningStore` tries again.

    Raises:
        ValueError: If the capacity is less than `MIN_BLOCKS` blocks, or the encryption key cannot be read.
    """
    block_bytes = sum(memory.block_bytes for memory in memories)
    refuse_small(config, block_bytes)
    settings = store_settings(config, codec_of(config, dtype), tenants, writer_niceness=BACKGROUND_NICENESS)
    return ReopeningStore(settings, [SharedMemory(*memory.host_span()) for memory in memories])


def refuse_small(config: DiskConfig, block_bytes: int) -> None:
    """Raise ValueError if the capacity holds fewer than `MIN_BLOCKS` blocks of *block_bytes*."""
    if capacity_within(config.capacity) < MIN_BLOCKS * block_bytes:
        raise ValueError(
            f"disk capacity: {config.capacity} bytes are too few for blocks of {block_bytes} bytes; "
            f"use {max_bytes(MIN_BLOCKS * block_bytes)} or more"
        )


def store_settings(
    config: DiskConfig,
    codec: Codec | CodecChoice,
    tenants: Mapping[str, TenantConfig] = MappingProxyType({}),
    writes: DiskWrites = DiskWrites.DIRECT,
    writer_niceness: int = 0,
) -> StoreSettings:
    """Return the settings of the configured store. *writes* is used if the configuration does not say how to write.

    Raises the errors of `cipher_of`.
    """
    return StoreSettings(
        Path(config.path),
        capacity_within(config.capacity),
        codec,
        cipher_of(config),
        Durability(config.durability),
        config.checkpoint_s,
        {tenant_of(salt): quota.disk for salt, quota in tenants.items() if quota.disk is not None},
        writes=writes if config.writes is None else DiskWrites(config.writes),
        reserve_bytes=config.min_free,
        writer_niceness=writer_niceness,
    )


def codec_of_others(config: DiskConfig | RemoteConfig) -> Codec | CodecChoice:
    """Return the codec for blocks of other engines, such as vLLM. Raises ValueError for a lossy codec.

    The blocks' dtype is not known here. So the codec is made for elements of two bytes, as in most KV caches. Other
    elements are compressed less well.
    """
    if config.codec == "none":
        return NO_CODEC
    if config.codec == "fp8":
        raise ValueError('codec "fp8" would change the blocks of other engines; use none, zstd or auto')
    compressed = CODECS["zstd-plane-2"]
    return compressed if config.codec == "zstd" else CodecChoice(compressed)


def with_rounding_of(namespace: Namespace, disk: DiskConfig | None) -> Namespace:
    """Return *namespace* marked as rounded if the disk's codec is lossy, else marked as exact.

    A lossy codec rounds the blocks on the disk. Rounded blocks may later be copied to other tiers, and no tier records
    which blocks are rounded. So all tiers of an engine with such a disk use a separate namespace, in which engines with
    exact blocks find nothing.
    """
    if disk is None:
        return namespace
    codec = codec_of(disk, namespace.dtype)
    is_exact = isinstance(codec, CodecChoice) or codec.is_lossless
    return replace(namespace, kv_quantization="none" if is_exact else disk.codec)


def disk_tier(store: ReopeningStore, config: DiskConfig, namespace: Namespace) -> DiskTier:
    """Return the disk tier that keeps the blocks of *namespace* in *store*.

    The id of the encryption key becomes part of the namespace, so blocks stored under another key are misses.

    Raises:
        ValueError: If `namespace.kv_quantization` does not match the codec in *config*, see `with_rounding_of`.
    """
    if with_rounding_of(namespace, config) != namespace:
        raise ValueError(
            f"disk: codec {config.codec} does not fit a namespace with kv_quantization {namespace.kv_quantization!r}; "
            "pass the namespace that with_rounding_of(namespace, config) returns"
        )
    cipher = store.settings.cipher
    namespace = replace(namespace, encryption_key_id="" if cipher is None else cipher.key_id.hex())
    tier = DiskTier(
        store,
        namespace.digest,
        written_bytes_per_day=config.max_written_bytes_per_day,
        opening=store.opening,
    )
    if config.endurance is not None:
        tier.life = SsdLife(config.endurance / 1e12, tier.clock, tier.latest.written_bytes_total)
    return tier


def cipher_of(config: DiskConfig | RemoteConfig) -> Cipher | None:
    """Return the configured cipher; None if blocks are not to be encrypted.

    Raises:
        ValueError: If the encryption key cannot be read.
        MissingExtra: If the package for encryption is not installed.
    """
    if config.encryption_key_file is not None:
        return Cipher.from_file(Path(config.encryption_key_file).expanduser())
    if config.encryption_key_command is not None:
        return Cipher.from_command(config.encryption_key_command)
    return None


def refuse_lossy(config: DiskConfig | RemoteConfig | None, tier: str) -> None:
    """Raise ValueError if the codec of *tier* is lossy, because its blocks hold recurrent states.

    A lossy codec rounds the elements of a block, which have one dtype. The states of a model have several.
    """
    if config is not None and config.codec == "fp8":
        raise ValueError(
            f'{tier}.codec "fp8" cannot round recurrent states; use "none", "zstd" or "auto" for this model'
        )


def codec_of(config: DiskConfig | RemoteConfig, dtype: str) -> Codec | CodecChoice:
    """Return the codec for blocks with elements of *dtype*."""
    if config.codec == "none":
        return NO_CODEC
    if config.codec == "fp8":
        return CODECS[f"fp8-{_ELEMENTS[dtype]}"]
    compressed = CODECS[f"zstd-plane-{_ELEMENT_BYTES[dtype]}"]
    return compressed if config.codec == "zstd" else CodecChoice(compressed)
