"""ReadSource: a tier that blocks are read from into host memory, and what follows when they come or do not."""

from collections.abc import Container, Sequence
from typing import Protocol

from kvtier.store.record import Fault
from kvtier.tiers.lower.breaker import CircuitBreaker
from kvtier.tiers.lower.disk_content import DiskContent
from kvtier.tiers.lower.lower_index import LowerIndex
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.eviction import EvictionCause
from kvtier.tiers.naming.tier import Tier
from kvtier.transfer.transfer_engine import Route


class Readable(Protocol):
    """One tier that can be read from. Lanes' threads call `read` alone; all else is the owner's."""

    @property
    def route(self) -> Route:
        """The route by which its blocks come."""

    @property
    def reading(self) -> CircuitBreaker:
        """The breaker of its reads."""

    @property
    def is_readable(self) -> bool:
        """Whether it can be read from, as far as is known."""

    def key(self, group_id: int, name: BlockName) -> bytes:
        """The key of a block."""

    def read(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> list[bytes | Fault]:
        """Read each key's block into its memory, verified; the digest, or why there is none."""

    def find_any(self, besides: Container[tuple[int, BlockName]]) -> tuple[int, BlockName] | None:
        """Group and name of some block that is there, as far as is known, none of *besides*; None if none was found."""

    def on_failed(self, group_id: int, name: BlockName, fault: Fault) -> None:
        """Take in that a read of the block gave no bytes."""


class ReadSource(Readable, Protocol):
    """A tier from which `Reads` fills host memory."""

    @property
    def tier(self) -> Tier:
        """Which tier it is."""

    def on_hung(self, group_id: int, name: BlockName) -> None:
        """Take in that a read of the block hangs."""

    def on_come(self, group_id: int, slots: Sequence[int], is_late: bool) -> None:
        """Take in that blocks are in these host slots that were not in host memory; *is_late*: after they had hung."""


class ReadableDisk:
    """See `Readable`: the disk."""

    route = Route.DISK_TO_HOST

    def __init__(self, content: DiskContent) -> None:
        self._disk = content.disk
        self.reading = content.disk.reading
        self.key = content.disk.key
        self.read = content.disk.read
        self.find_any = content.disk.index.find_any
        self.on_failed = content.on_read_failed

    @property
    def is_readable(self) -> bool:
        return self._disk.is_readable


class DiskSource(ReadableDisk):
    """See `ReadSource`: the disk below host memory."""

    tier = Tier.DISK

    def __init__(self, index: LowerIndex) -> None:
        super().__init__(index)
        self._index = index

    def on_hung(self, group_id: int, name: BlockName) -> None:
        self._index.remove_from_disk_index(group_id, name, EvictionCause.UNREADABLE)

    def on_come(self, group_id: int, slots: Sequence[int], is_late: bool) -> None:
        if is_late:  # they do not count as being on disk
            self._index.offer_to_disk(group_id, slots)
