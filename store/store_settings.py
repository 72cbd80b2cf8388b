"""`StoreSettings`: the settings with which a store is opened."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.store.codec.cipher import Cipher
from kvtier.store.codec.codec import NO_CODEC, Codec
from kvtier.store.codec.codec_choice import CodecChoice
from kvtier.store.durability import Durability
from kvtier.store.lmdb.lmdb_store import LmdbStore


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The arguments of `LmdbStore`, as a value.

    *owner* is the pid of the process for which the store is opened; None stands for this process. The folder is made
    absolute, because the store may be opened later, or by a process with another working directory.
    """

    folder: Path
    capacity_bytes: int
    codec: Codec | CodecChoice = NO_CODEC
    cipher: Cipher | None = None
    durability: Durability = Durability.PROCESS
    interval_s: float = 10.0
    quotas: Mapping[bytes, int] = field(default_factory=dict)
    owner: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", self.folder.absolute())  # frozen

    def open(self) -> LmdbStore:
        """Open the store. Raises what `LmdbStore` raises."""
        return LmdbStore(
            self.folder,
            self.capacity_bytes,
            self.codec,
            self.cipher,
            self.durability,
            self.interval_s,
            self.quotas,
            self.owner,
        )
