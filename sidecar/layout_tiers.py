"""LayoutTiers: host memory and disk for the chunks of one layout."""

from collections.abc import Callable, Sequence

import numpy as np

from kvtier.engine.observability.tracing.spill_traces import SpillTraces
from kvtier.engine.observability.tracing.trace_context import TraceContext
from kvtier.sidecar.extents import Extents
from kvtier.sidecar.layout import Layout, SlotMemory
from kvtier.sidecar.shared_store import StoreView
from kvtier.tiers.device.ghosts import NUM_GHOSTS, Ghosts
from kvtier.tiers.device.slot_ids import ABSENT, Ids
from kvtier.tiers.lower.local_tiers import LocalFetch, LocalTiers
from kvtier.tiers.lower.lower_tiers import OnFetched, Places, are_cold
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.eviction import EvictionCause
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.naming.tier import Reason


class HeldSlots:
    """See `Holder`: the slots of one group. Those that lie in other holders' extents, or across the end of one, are
    leased from the tiers, so that the tiers give them to no block."""

    def __init__(self, group_id: int, tiers: LocalTiers, memory: SlotMemory) -> None:
        self._group_id = group_id
        self._tiers = tiers
        self._memory = memory
        self._pool = tiers.index.host[group_id].pool
        is_empty = tiers.withdraw(group_id, np.arange(memory.num_host_slots))
        assert is_empty, "tiers that are new have blocks"

    @property
    def num_blank(self) -> int:
        """Slots that can be had without evicting a chunk."""
        return self._pool.num_blank

    def give(self, extent: int) -> None:
        self._tiers.abandon(self._group_id, self._memory.slots_of(extent))

    def take_back(self, extent: int) -> bool:
        return self._tiers.withdraw(self._group_id, self._memory.slots_of(extent))

    def oldest_extent(self) -> int | None:
        oldest = self._pool.order.oldest(1)
        return self._memory.extents_of(oldest[:1])[0] if len(oldest) else None


class LayoutTiers:
    """The `LocalTiers` of one layout, in its extents of the segment. What takes host slots is asked of this class,
    since it gets the layout more memory; everything else of *tiers*. Owned by the sidecar's thread."""

    def __init__(
        self,
        layout: Layout,
        tiers: LocalTiers,
        memories: Sequence[SlotMemory],
        extents: Extents,
        store: StoreView | None,
        read_timeout_s: float,
        clock: Callable[[], float],
        traces: SpillTraces | None = None,
    ) -> None:
        """*memories* by group; *store* is the disk's view of this layout, None without a disk. A read from it that
        takes *read_timeout_s* is given up. *traces*: of the copies to disk; None: nobody asks for them."""
        self.layout = layout
        self.tiers = tiers
        self.memories = memories
        self.read_timeout_s = read_timeout_s
        self._clock = clock
        self._traces = traces
        self.num_clears = 0
        self._extents = extents
        self._store = store
        self.ghosts = Ghosts(NUM_GHOSTS)
        self._held = [HeldSlots(group_id, tiers, memory) for group_id, memory in enumerate(memories)]

    def reserve(self, group_id: int, num_slots: int) -> list[int]:
        """See `LowerTiers.reserve`."""
        self._get_room(group_id, num_slots)
        slots = self.tiers.reserve(group_id, num_slots)
        self.touch(group_id, np.array(slots, np.intp))
        return slots

    def find_run(self, group_id: int, names: Sequence[BlockName]) -> int:
        """How many of the first chunks are below and have room in host memory side by side. What is read of them takes
        the slots of others, of chunks of the same prompt that come later too."""
        return self.room_for(group_id, self.tiers.find_run(group_id, names))

    def room_for(self, group_id: int, places: Places) -> int:
        """Get room in host memory for these blocks, side by side, and return how many of the first ones have it. For
        blocks that have just been found at *places*."""
        in_host = places[places >= 0].astype(np.intp)
        self._get_room(group_id, len(places) - len(in_host))
        pool = self.tiers.index.host[group_id].pool
        return min(len(places), pool.num_free + pool.num_leased(in_host))

    def fetch(self, group_id: int, blocks: NamedBlocks, on_fetched: OnFetched) -> LocalFetch:
        """See `LowerTiers.fetch`; for the first chunks that `find_run` has just found."""
        places = self.tiers.find(group_id, blocks.names)
        self.touch(group_id, places[places >= 0].astype(np.intp))
        return self.tiers.fetch(group_id, blocks, on_fetched)

    def fetch_any(
        self, group_id: int, blocks: NamedBlocks, places: Places, on_fetched: OnFetched, now: bool
    ) -> LocalFetch:
        """As `fetch`, for any blocks, that `LowerTiers.find` has just found at *places*; not *now*: as
        `LowerTiers.fetch_later`."""
        in_host = places[places >= 0].astype(np.intp)
        self.touch(group_id, in_host)
        if len(in_host) == len(places):
            return self.tiers.fetch(group_id, blocks, on_fetched, places)
        # One slot at least: a block of which nothing is known is looked for on disk too.
        self._get_room(group_id, max(1, int(np.count_nonzero(are_cold(places)))))
        begin = self.tiers.fetch if now else self.tiers.fetch_later
        return begin(group_id, blocks, on_fetched)

    def refresh(self, group_id: int, names: Sequence[BlockName], were_read: Sequence[bool]) -> None:
        """See `LowerTiers.refresh`."""
        places = self.tiers.index.host[group_id].pool.find_all(names)
        self.touch(group_id, places[places != ABSENT].astype(np.intp))
        self.tiers.refresh(group_id, names, were_read)

    def touch(self, group_id: int, slots: Ids) -> None:
        """The chunks in these slots are used now: their extents are taken from the layout last."""
        for extent in self.memories[group_id].extents_of(slots):
            self._extents.touch(extent)

    def poll(self) -> None:
        """Go on with all that is under way, and with copies to disk."""
        if self._store is not None and (gone := self._store.take_gone()):
            self.tiers.on_gone_from_disk(gone, EvictionCause.LAYOUT)
        if self._store is not None and (cleared := self._store.take_cleared()):
            self.tiers.on_gone_from_disk(cleared, EvictionCause.CLEARED)
        self.tiers.time_out_reads(self.read_timeout_s)
        self.tiers.poll()
        self._remember_lost()  # no copies above rely on it: engines ask each time
        self.tiers.spill()
        self.trace_spills()

    def add_traced(self, traceparent: str, names: Sequence[BlockName]) -> None:
        """Take in that these chunks are those of the request whose span W3C's header *traceparent* names. One whose
        trace is not sampled is passed over, and what is no such header."""
        span = TraceContext.of(traceparent)
        if self._traces is not None and span is not None and span.is_sampled:
            self._traces.add(span, names)

    def trace_spills(self) -> None:
        """Send spans of what was written to disk since the last call."""
        if self._traces is not None:
            self._traces.go_on()

    def clear(self) -> None:
        """Forget every chunk of the layout. What is leased stays where it is until it is released, and what is being
        read from disk still comes."""
        self.num_clears += 1
        self.tiers.forget_all()
        self._remember_lost()

    def num_slots(self, group_id: int) -> int:
        """Slots of a group in extents that are its own now."""
        memory = self.memories[group_id]
        return sum(len(memory.slots_of(extent)) for extent in self._extents.extents_of(self._held[group_id]))

    @property
    def held_bytes(self) -> int:
        """Bytes of the segment that are this layout's now."""
        return sum(len(self._extents.extents_of(held)) for held in self._held) * self._extents.extent_bytes

    @property
    def is_being_indexed(self) -> bool:
        """Whether chunks are on disk of which this process does not know yet: its start was a moment ago."""
        return self.tiers.index.disk.is_open and not self.tiers.is_indexed

    @property
    def num_leased(self) -> int:
        """Chunks and reserved slots of all groups that are leased now."""
        pools = [host.pool for host in self.tiers.index.host]
        return sum(
            pool.num_leases - (memory.num_host_slots - self.num_slots(group_id))
            for group_id, (pool, memory) in enumerate(zip(pools, self.memories, strict=True))
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

    def why_missing(self, name: BlockName) -> Reason:
        """Why a chunk is not here: which tier dropped its last copy, if that is remembered."""
        ghost = self.ghosts.find(name)
        return Reason.NEVER_SEEN if ghost is None else Reason.evicted_from(ghost.tier)

    def _remember_lost(self) -> None:
        for _, names, tier, cause in self.tiers.take_lost():
            self.ghosts.remember(names, tier, cause, self._clock())

    def _get_room(self, group_id: int, num_slots: int) -> None:
        slots = self._held[group_id]
        while slots.num_blank < num_slots and self._extents.acquire(slots):
            pass
