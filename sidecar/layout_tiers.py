"""LayoutTiers: host memory and disk for the chunks of one layout."""

from collections.abc import Callable, Sequence

import numpy as np

from kvtier.engine.observability.tracing.spill_traces import SpillTraces
from kvtier.engine.observability.tracing.trace_context import TraceContext
from kvtier.sidecar.extents import Extents
from kvtier.sidecar.layout import Layout, SlotMemory
from kvtier.sidecar.shared_store import StoreView
from kvtier.tiers.device.ghosts import NUM_GHOSTS, Ghosts
from kvtier.tiers.device.slot_ids import ABSENT, NOTHING, Ids
from kvtier.tiers.lower.local_tiers import LocalFetch, LocalTiers
from kvtier.tiers.lower.lower_tiers import OnFetched, Places, ReadPriority, are_cold
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.naming.tier import EvictionCause, Reason


class LeasedSlots:
    """The host memory of one group of blocks: the extents (parts of host memory) assigned to it. See `Holder`.

    This class leases all slots in other parts of host memory, so that `LocalTiers` cannot use them. A slot that crosses
    the border of an extent is leased too.
    """

    def __init__(self, group_id: int, tiers: LocalTiers, memory: SlotMemory) -> None:
        self._group_id = group_id
        self._tiers = tiers
        self._memory = memory
        self._pool = tiers.index.host[group_id].pool
        self._drained: dict[int, Ids] = {}  # slots taken so far, by extent that is being drained
        is_empty = tiers.withdraw(group_id, np.arange(memory.num_host_slots))
        assert is_empty, "new tiers already have blocks"

    @property
    def num_blank(self) -> int:
        """Number of slots that are available without evicting a chunk."""
        return self._pool.num_blank

    def give(self, extent: int) -> None:
        self._tiers.abandon(self._group_id, self._memory.slots_of(extent))

    def take_back(self, extent: int) -> bool:
        return self._tiers.withdraw(self._group_id, self._memory.slots_of(extent))

    def oldest_extent(self) -> int | None:
        oldest = self._pool.order.oldest(1)
        return self._memory.extents_of(oldest[:1])[0] if len(oldest) else None

    @property
    def num_drained(self) -> int:
        """Number of slots that `drain` has emptied so far, in extents that still belong to this group."""
        return sum(map(len, self._drained.values()))

    def num_leased(self, extent: int) -> int:
        return self._pool.num_leased(self._memory.slots_of(extent))

    def drain(self, extent: int) -> bool:
        slots = self._memory.slots_of(extent)
        drained = self._drained.get(extent, NOTHING)
        drained = np.append(drained, self._tiers.withdraw_idle(self._group_id, np.setdiff1d(slots, drained)))
        self._drained[extent] = drained
        if len(drained) < len(slots):
            return False
        del self._drained[extent]
        return True

    def end_drain(self, extent: int) -> None:
        self._tiers.abandon(self._group_id, self._drained.pop(extent, NOTHING))


class LayoutTiers:
    """The tiers of one layout (`LocalTiers`). Which parts of host memory (extents) belong to them changes over time.

    Call this class for everything that needs host slots, because it acquires more extents if necessary. For everything
    else, call *tiers*. Owned by the sidecar's thread.
    """

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
        """Create the tiers, at first without host memory. They acquire parts of it from *extents* when they need slots.

        *memories* says for each group where slots lie in host memory. *store* is the layout's part of the store on
        disk, or None without a disk. Reads from disk time out after *read_timeout_s*. *traces* records the copies to
        disk for tracing.
        """
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
        self._held = [LeasedSlots(group_id, tiers, memory) for group_id, memory in enumerate(memories)]

    def reserve(self, group_id: int, num_slots: int) -> list[int]:
        """Lease up to *num_slots* host slots for the caller to fill; see `LowerTiers.reserve`."""
        self._get_room(group_id, num_slots)
        slots = self.tiers.reserve(group_id, num_slots)
        self.touch(group_id, np.array(slots, np.intp))
        return slots

    def room_for(self, group_id: int, places: Places) -> int:
        """Make room in host memory to fetch chunks, which were just found at *places*.

        Returns how many of the chunks fit, counted from the first. The caller must not fetch the chunks after these:
        the reads may evict them from host memory, so their *places* become wrong.
        """
        in_host = places[places >= 0].astype(np.intp)
        self._get_room(group_id, len(places) - len(in_host))
        pool = self.tiers.index.host[group_id].pool
        return min(len(places), pool.num_free + pool.num_leased(in_host))

    def fetch(self, group_id: int, blocks: NamedBlocks, on_fetched: OnFetched) -> LocalFetch:
        """Fetch chunks that `room_for` has just made room for; see `LowerTiers.fetch`."""
        places = self.tiers.find(group_id, blocks.names)
        self.touch(group_id, places[places >= 0].astype(np.intp))
        return self.tiers.fetch(group_id, blocks, on_fetched)

    def fetch_any(
        self,
        group_id: int,
        blocks: NamedBlocks,
        places: Places,
        on_fetched: OnFetched,
        priority: ReadPriority,
    ) -> LocalFetch:
        """Fetch blocks into host memory, and make room there if necessary.

        *places* is the result that `LowerTiers.find` has just returned for the blocks.
        """
        in_host = places[places >= 0].astype(np.intp)
        self.touch(group_id, in_host)
        if len(in_host) == len(places):
            return self.tiers.fetch(group_id, blocks, on_fetched, places)
        # At least one slot, because a block whose place is unknown is looked for on disk too.
        self._get_room(group_id, max(1, int(np.count_nonzero(are_cold(places)))))
        return self.tiers.fetch(group_id, blocks, on_fetched, priority=priority)

    def refresh(self, group_id: int, names: Sequence[BlockName], were_read: Sequence[bool]) -> None:
        """Record that these chunks were used; see `LowerTiers.refresh`."""
        places = self.tiers.index.host[group_id].pool.find_all(names)
        self.touch(group_id, places[places != ABSENT].astype(np.intp))
        self.tiers.refresh(group_id, names, were_read)

    def touch(self, group_id: int, slots: Ids) -> None:
        """Record that these slots were just used. Other layouts then take this part of host memory last."""
        for extent in self.memories[group_id].extents_of(slots):
            self._extents.touch(extent)

    def poll(self) -> None:
        """Advance the reads and writes in flight, and start copies to disk."""
        if self._store is not None and (gone := self._store.pop_evicted()):
            self.tiers.on_gone_from_disk(gone, EvictionCause.LAYOUT)
        if self._store is not None and (cleared := self._store.take_cleared()):
            self.tiers.on_gone_from_disk(cleared, EvictionCause.CLEARED)
        self.tiers.time_out_reads(self.read_timeout_s)
        self.tiers.poll()
        self._remember_lost()  # used only to explain misses, because engines may have copies of these chunks
        self.tiers.hints.spill()
        self.trace_spills()

    def add_traced(self, traceparent: str, names: Sequence[BlockName]) -> None:
        """Include the writes of these chunks to disk in the trace that the W3C header *traceparent* names.

        A header that is invalid, or whose trace is not sampled, is ignored.
        """
        span = TraceContext.of(traceparent)
        if self._traces is not None and span is not None and span.is_sampled:
            self._traces.add(span, names)

    def trace_spills(self) -> None:
        """Export the tracing spans of the writes to disk since the last call."""
        if self._traces is not None:
            self._traces.go_on()

    def clear(self) -> None:
        """Evict every chunk of the layout.

        Leased slots stay until they are released, and reads in flight still complete.
        """
        self.num_clears += 1
        self.tiers.forget_all()
        self._remember_lost()

    def num_slots(self, group_id: int) -> int:
        """Return how many slots in host memory a group has now."""
        memory = self.memories[group_id]
        return sum(len(memory.slots_of(extent)) for extent in self._extents.extents_of(self._held[group_id]))

    @property
    def held_bytes(self) -> int:
        """Number of bytes of host memory that are assigned to this layout now."""
        return sum(len(self._extents.extents_of(held)) for held in self._held) * self._extents.extent_bytes

    @property
    def is_being_indexed(self) -> bool:
        """True if this process is still indexing the chunks on disk, after its start."""
        return self.tiers.index.disk.is_open and not self.tiers.status.is_indexed

    @property
    def num_leased(self) -> int:
        """Number of chunks leased now plus number of slots reserved now, in all groups together."""
        pools = [host.pool for host in self.tiers.index.host]
        return sum(
            pool.num_leases - (memory.num_host_slots - self.num_slots(group_id)) - held.num_drained
            for group_id, (pool, memory, held) in enumerate(zip(pools, self.memories, self._held, strict=True))
        )

    @property
    def num_unsaved(self) -> int:
        """Number of chunks that must still be written to disk, because they are only in host memory."""
        progress = self.tiers.status.spill_progress()
        return progress.num_left if progress.has_target else 0

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        self.tiers.status.check()
        self._extents.check()

    def miss_reason(self, name: BlockName) -> Reason:
        """Return why a chunk is in no tier: which tier evicted the last copy, that it was damaged, or never stored.

        If the eviction is no longer remembered, the chunk counts as never stored.
        """
        ghost = self.ghosts.find(name)
        if ghost is None:
            return Reason.NEVER_SEEN
        return Reason.CORRUPT if ghost.cause is EvictionCause.CORRUPT else Reason.evicted_from(ghost.tier)

    def _remember_lost(self) -> None:
        for _, names, tier, cause in self.tiers.pop_lost():
            self.ghosts.remember(names, tier, cause, self._clock())

    def _get_room(self, group_id: int, num_slots: int) -> None:
        slots = self._held[group_id]
        while slots.num_blank < num_slots and self._extents.acquire(slots):
            pass
