"""`StoreSettings`: the arguments for opening a store of blocks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.store.codec.cipher import Cipher
from kvtier.store.codec.codec import NO_CODEC, Codec
from kvtier.store.codec.codec_choice import CodecChoice
from kvtier.store.disk_writes import DiskWrites
from kvtier.store.durability import Durability
from kvtier.store.lmdb.lmdb_store import LmdbStore


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The arguments for opening an `LmdbStore`, so that it can be opened later or by another process.

    *folder* is made absolute, because that process may have another working directory. *owner* is the pid
    that the store's lock file names as its owner (None: the process that opens the store). *writer_niceness* is added
    to the niceness of the threads that store blocks, if the store has a process of its own.
    """

    folder: Path
    capacity_bytes: int
    codec: Codec | CodecChoice = NO_CODEC
    cipher: Cipher | None = None
    durability: Durability = Durability.PROCESS
    interval_s: float = 10.0
    quotas: Mapping[bytes, int] = field(default_factory=dict)
    owner: int | None = None
    writes: DiskWrites = DiskWrites.DIRECT
    reserve_bytes: int = 0
    writer_niceness: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", self.folder.absolute())  # frozen

    def open(self) -> LmdbStore:
        """Open the store. Raises the same exceptions as `LmdbStore`."""
        return LmdbStore(
            self.folder,
            self.capacity_bytes,
            self.codec,
            self.cipher,
            self.durability,
            self.interval_s,
            self.quotas,
            self.owner,
            self.writes,
            self.reserve_bytes,
        )
