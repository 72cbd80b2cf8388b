"""LayoutTiers: host memory and disk for the chunks of one layout."""

from collections.abc import Sequence

import numpy as np

from kvtier.engine.sidecar.chunk_memory import ChunkMemory
from kvtier.engine.sidecar.extents import Extents
from kvtier.engine.sidecar.layout import Layout
from kvtier.engine.sidecar.shared_store import StoreView
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.lower.local_tiers import LocalTiers
from kvtier.tiers.lower.lower_tiers import Fetch, OnFetched
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.named_blocks import NamedBlocks


class RankSlots:
    """See `Holder`: the slots of one rank. Those that lie in other holders' extents are leased from the tiers, so that
    the tiers give them to no chunk."""

    def __init__(self, rank: int, tiers: LocalTiers, memory: ChunkMemory) -> None:
        self._rank = rank
        self._tiers = tiers
        self._memory = memory
        self._pool = tiers.index.host[rank].pool
        is_empty = tiers.withdraw(rank, np.arange(memory.num_host_slots))
        assert is_empty, "tiers that are new have blocks"

    @property
    def num_blank(self) -> int:
        """Slots that can be had without evicting a chunk."""
        return self._pool.num_blank

    def give(self, extent: int) -> None:
        self._tiers.abandon(self._rank, self._memory.slots_of(extent))

    def take_back(self, extent: int) -> bool:
        return self._tiers.withdraw(self._rank, self._memory.slots_of(extent))

    def oldest_extent(self) -> int | None:
        oldest = self._pool.order.oldest(1)
        return int(oldest[0]) // self._memory.slots_per_extent if len(oldest) else None


class LayoutTiers:
    """One group of `LocalTiers` for each rank, in whose name the engine's ranks store and load: *tiers* is asked by
    rank in place of group. What takes host slots is asked of this class, since it gets the layout more memory. Owned by
    the sidecar's thread."""

    def __init__(
        self,
        layout: Layout,
        tiers: LocalTiers,
        memories: Sequence[ChunkMemory],
        extents: Extents,
        store: StoreView | None,
        read_timeout_s: float,
    ) -> None:
        """*memories* by rank; *store* is the disk's view of this layout, None without a disk. A read from it that takes
        *read_timeout_s* is given up."""
        self.layout = layout
        self.tiers = tiers
        self.memories = memories
        self.read_timeout_s = read_timeout_s
        self.num_clears = 0
        self._extents = extents
        self._store = store
        self._ranks = [RankSlots(rank, tiers, memory) for rank, memory in enumerate(memories)]

    def reserve(self, rank: int, num_slots: int) -> list[int]:
        """See `LowerTiers.reserve`."""
        self._get_room(rank, num_slots)
        slots = self.tiers.reserve(rank, num_slots)
        self.touch(rank, np.array(slots, np.intp))
        return slots

    def find_run(self, rank: int, names: Sequence[BlockName]) -> int:
        """How many of the first chunks are below and have room in host memory side by side. What is read of them takes
        the slots of others, of chunks of the same prompt that come later too."""
        places = self.tiers.find_run(rank, names)
        in_host = places[places >= 0].astype(np.intp)
        self._get_room(rank, len(places) - len(in_host))
        pool = self.tiers.index.host[rank].pool
        return min(len(places), pool.num_free + pool.num_leased(in_host))

    def fetch(self, rank: int, blocks: NamedBlocks, on_fetched: OnFetched) -> Fetch:
        """See `LowerTiers.fetch`; for the first chunks that `find_run` has just found."""
        places = self.tiers.find(rank, blocks.names)
        self.touch(rank, places[places >= 0].astype(np.intp))
        return self.tiers.fetch(rank, blocks, on_fetched)

    def touch(self, rank: int, slots: Ids) -> None:
        """The chunks in these slots are used now: their extents are taken from the layout last."""
        for extent in self.memories[rank].extents_of(slots):
            self._extents.touch(extent)

    def poll(self) -> None:
        """Go on with all that is under way, and with copies to disk."""
        if self._store is not None and (gone := self._store.take_gone()):
            self.tiers.index.on_written(0, (), gone)
        self.tiers.time_out_reads(self.read_timeout_s)
        self.tiers.poll()
        self.tiers.take_lost()  # no copies above rely on it: engines ask each time
        self.tiers.spill()

    def clear(self) -> None:
        """Forget every chunk of the layout. What is leased stays where it is until it is released, and what is being
        read from disk still comes."""
        self.num_clears += 1
        self.tiers.forget_all()
        self.tiers.take_lost()

    def num_slots(self, rank: int) -> int:
        """Slots of a rank in extents that are its own now."""
        return len(self._extents.extents_of(self._ranks[rank])) * self.memories[rank].slots_per_extent

    @property
    def held_bytes(self) -> int:
        """Bytes of the segment that are this layout's now."""
        return sum(len(self._extents.extents_of(rank)) for rank in self._ranks) * self._extents.extent_bytes

    @property
    def is_being_indexed(self) -> bool:
        """Whether chunks are on disk of which this process does not know yet: its start was a moment ago."""
        return self.tiers.index.disk.is_open and not self.tiers.is_indexed

    @property
    def num_leased(self) -> int:
        """Chunks and reserved slots of all ranks that are leased now."""
        pools = [host.pool for host in self.tiers.index.host]
        return sum(
            pool.num_leases - (memory.num_host_slots - self.num_slots(rank))
            for rank, (pool, memory) in enumerate(zip(pools, self.memories, strict=True))
        )

    @property
    def num_unsaved(self) -> int:
        """Chunks that are in host memory only, and are to be written to disk."""
        progress = self.tiers.spill_progress()
        return progress.num_left if progress.has_target else 0

    def check(self) -> None:
        """Raise AssertionError if any two books disagree."""
        self.tiers.check()
        self._extents.check()

    def _get_room(self, rank: int, num_slots: int) -> None:
        slots = self._ranks[rank]
        while slots.num_blank < num_slots and self._extents.acquire(slots):
            pass
