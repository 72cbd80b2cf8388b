"""Residency: the tier and slot of each block, updated when blocks enter or leave a tier.

`GroupTiers` is the device state of one attention group: the layers that share one kind of attention and one block
table.
"""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.cleared_blocks import ClearedBlocks
from kvtier.tiers.device.ghosts import NUM_GHOSTS, Ghosts
from kvtier.tiers.device.group_slots import GroupSlots, SlotOwners
from kvtier.tiers.device.partial_matches import PartialMatches
from kvtier.tiers.device.slot_ids import ABSENT, Ids
from kvtier.tiers.lower.lower_tiers import NOWHERE, ON_DISK, ON_REMOTE, Lost, LowerTiers, Places, are_kept, names_at
from kvtier.tiers.lower.spill_log import SpillLog
from kvtier.tiers.naming.block_hash import BlockChain, BlockName, TokenIds
from kvtier.tiers.naming.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog
from kvtier.tiers.naming.groups import AttentionGroup, alignment, name_block_size
from kvtier.tiers.naming.named_blocks import number_of, tenant_of
from kvtier.tiers.naming.tier import EvictionCause, Reason, Tier
from kvtier.transfer.block_memory import BlockMemory
from kvtier.transfer.transfer_engine import Route

# Tier of each place in the lower tiers; a place that is not listed is a host slot.
TIER_OF: dict[int, Tier | None] = {NOWHERE: None, ON_DISK: Tier.DISK, ON_REMOTE: Tier.REMOTE}
SLOTS_AT_ONCE = 256  # device slots checked per call, which takes 0.1 ms of the owner's thread
LOST_AT_ONCE = 512  # lost blocks processed per call, which takes half a millisecond of the owner's thread
LOST_TOGETHER = 8  # time that each `Lost` (blocks lost together) takes in itself, counted in blocks
OnLeftDevice = Callable[["GroupTiers", Ids, Sequence[BlockName], set[BlockName | None], EvictionCause], None]
"""Callback for blocks of a group that have left the device; see `OnForgotten`."""


class GroupTiers:
    """The device slots of one attention group, and what is known about the blocks in them.

    All blocks of a group have the same size. Owned by the cache's thread.
    """

    def __init__(
        self,
        group_id: int,
        attention: AttentionGroup,
        memory: BlockMemory,
        on_left_device: OnLeftDevice,
        is_spilled: bool,
        is_matched_in_part: bool,
    ) -> None:
        """Create the state of a group without blocks.

        *memory* holds the group's slots. *is_spilled* says whether there are lower tiers, to which device blocks are
        copied. *is_matched_in_part* says whether prompts can use a device block of which only the first tokens match.
        """
        self.id = group_id  # index of the group in all lists by group, such as tables, demands and hits
        self.attention = attention
        self.block_size = attention.block_size
        self.memory = memory
        self.slots = GroupSlots(memory.num_device_slots, is_spilled, partial(on_left_device, self))
        self.pool = self.slots.pool
        self.owners = SlotOwners(memory.num_device_slots)
        self.partial_matches = PartialMatches(memory.num_device_slots, self.block_size) if is_matched_in_part else None
        self.tails: set[BlockName] = set()  # device blocks that are not full; they are not spilled and cause no events
        self.num_held = 0  # leases on device slots held by callers of the cache

    def needed(self, num_tokens: int, start: int = 0) -> range:
        """Return the indices of the blocks that a request reads to resume after *num_tokens* tokens.

        Blocks before token *start* are left out.
        """
        end = num_tokens // self.block_size
        return range(min(end, max(self.attention.first_needed(num_tokens), start // self.block_size)), end)

    def record_origin(self, slots: Ids, tenant: bytes, chain: BlockChain | None, start: int) -> None:
        """Record that *slots* hold blocks of *tenant*: those of *chain* from block *start* on.

        *chain* is None if the blocks' prompt is unknown.
        """
        self.owners.record(slots, tenant)
        if self.partial_matches is not None:
            if chain is not None:
                self.partial_matches.record(slots, chain, start)
            else:
                self.partial_matches.forget(slots)

    def commit_tail(self, slot: int, name: BlockName, key: bytes, token_ids: TokenIds) -> None:
        """Name a partly filled block, which holds *token_ids*, unless another slot already has the name.

        Later prompts find the block by its *key*; see `BlockChain.continued_key`.
        """
        if self.pool.commit([slot], [name]):
            return
        if self.partial_matches is not None:
            self.partial_matches.record_tail(slot, key, token_ids)
        self.tails.add(name)

    def are_of(self, tenant: bytes, slots: Ids) -> npt.NDArray[np.bool_]:
        """Return for each device slot whether its block belongs to *tenant*."""
        own: npt.NDArray[np.bool_] = self.owners.of(slots) == np.uint64(number_of(tenant))
        return own

    def clear(self) -> ClearedBlocks:
        """Evict all device blocks in one short step, without callbacks. Return their data, which the caller frees."""
        cleared = self.slots.clear()
        cleared.leftovers.add(self.tails)
        self.tails = set()
        return cleared


class Located(NamedTuple):
    """Locations of a list of blocks.

    *device_slots* has the device slot of each block, or ABSENT. *below* has the place of each block in the lower tiers.
    *num_found* is the number of blocks before the first one that no tier has.
    """

    device_slots: npt.NDArray[np.int32]
    below: Places
    num_found: int


class Residency:
    """The index of blocks in all tiers: the device's own index, combined with that of the lower tiers.

    It holds no bytes and starts no copies. Owned by the cache's thread.
    """

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        memories: Sequence[BlockMemory],
        lower: LowerTiers,
        partial_blocks: bool,
        events: EventLog | None,
        clock: Callable[[], float],
        spills: SpillLog | None,
    ) -> None:
        """Create an index without blocks on the device.

        *memories* has the device and host slots of each group. *partial_blocks* says whether prompts can use a device
        block of which only the first tokens match.
        """
        in_part = _matched_in_part(groups) if partial_blocks else None
        is_spilled = all(lower.status.num_slots)
        self.groups = [
            GroupTiers(group_id, group, memory, self._on_left_device, is_spilled, group_id == in_part)
            for group_id, (group, memory) in enumerate(zip(groups, memories, strict=True))
        ]
        self.lower = lower
        # The group whose blocks can be found by their first tokens.
        self.partial_group = None if in_part is None else self.groups[in_part]
        self.is_cut_off = False  # whether the lane to the device hangs, so that no block can be promoted
        self.spills = spills  # log of copies from the device to host memory; None without a listener
        self._events = events
        self._clock = clock
        self.ghosts = Ghosts(NUM_GHOSTS)
        self._cleared: deque[tuple[GroupTiers, ClearedBlocks, float]] = deque()  # and the time of their eviction
        self._num_to_remember = 0  # limit on how many of these blocks are still remembered as lost
        self._lost: deque[Lost] = deque()  # blocks that the lower tiers have lost, still to be processed
        self._num_processed = 0  # number of blocks of the first item that have been processed
        self._epoch = lower.status.epoch
        self._marking: Iterator[None] = iter(())  # each step marks some device blocks without lower copies as dirty

    @property
    def num_changes(self) -> int:
        """Version number that grows whenever a block enters or leaves a device or host slot."""
        return sum(group.pool.num_changes for group in self.groups) + self.lower.status.num_changes

    def locate(self, group: GroupTiers, names: Sequence[BlockName]) -> Located:
        """Return the locations of the group's blocks with these names.

        If the first block of a long prompt is not on the device, a few later blocks may be reported only in a lower
        tier, although they are on the device too; see `BlockPool.has_no_run_of`.
        """
        nowhere = np.full(len(names), NOWHERE, np.int32)
        # Look up the first block alone, so that a prompt that was never seen costs only one lookup.
        is_first_here = not names or group.pool.find(names[0]) is not None
        if not is_first_here and (self.is_cut_off or not len(self.lower.find_run(group.id, names[:1]))):
            return Located(nowhere, nowhere, 0)
        if not is_first_here and group.pool.has_no_run_of(names):
            found = self.lower.find_run(group.id, names)
            if len(found) == len(names) or group.pool.find(names[len(found)]) is None:
                below = nowhere.copy()
                below[: len(found)] = found
                return Located(np.full(len(names), ABSENT, np.int32), below, len(found))
        slots = group.pool.find_all(names)
        absent = np.flatnonzero(slots == ABSENT)
        if not len(absent):
            return Located(slots, nowhere, len(names))
        found = nowhere[:0] if self.is_cut_off else self.lower.find_run(group.id, names_at(names, absent))
        if len(found) == len(names):
            return Located(slots, found, len(names))
        nowhere[absent[: len(found)]] = found
        return Located(slots, nowhere, len(names) if len(found) == len(absent) else int(absent[len(found)]))

    def holds(self, group: GroupTiers, names: Sequence[BlockName]) -> npt.NDArray[np.bool_]:
        """Return for each of the group's blocks with these names whether any tier has it."""
        is_here: npt.NDArray[np.bool_] = group.pool.find_all(names) != ABSENT
        if not self.is_cut_off and not is_here.all():
            is_here |= self.lower.find(group.id, names) != NOWHERE
        return is_here

    def count_by_tier(self, group: GroupTiers, names: Sequence[BlockName]) -> Counter[Tier]:
        """Count the group's blocks by the warmest tier that holds each of them."""
        is_below = group.pool.find_all(names) == ABSENT
        places = self.lower.find(group.id, names_at(names, np.flatnonzero(is_below)))
        counts = Counter({Tier.DEVICE: len(names) - len(places)})
        kinds = np.minimum(places, 0)  # 0 for every host slot
        for place, number in zip(*np.unique(kinds, return_counts=True), strict=True):
            if (tier := TIER_OF.get(int(place), Tier.HOST)) is not None:
                counts[tier] += int(number)
        return counts

    def tier_of(self, group: GroupTiers, name: BlockName) -> Tier | None:
        """Return the warmest tier that holds the block; None if no tier does."""
        if group.pool.find(name) is not None:
            return Tier.DEVICE
        place = self.lower.find(group.id, [name]).item()
        return TIER_OF.get(place, Tier.HOST)

    def miss_reason(self, names: Iterable[BlockName]) -> Reason:
        """Return why these blocks are missing: which tier evicted the last copy, or `NEVER_SEEN`.

        The first block whose eviction is remembered decides.
        """
        ghosts = (self.ghosts.find(name) for name in names)
        ghost = next((ghost for ghost in ghosts if ghost is not None), None)
        return Reason.NEVER_SEEN if ghost is None else Reason.evicted_from(ghost.tier)

    def commit_run(self, group: GroupTiers, table: "array[int]", chain: BlockChain, start: int, slots: Ids) -> None:
        """Name the blocks in *slots*. They are the blocks of a request's *table* from block *start* on.

        If another slot already holds a block of the same name, that slot replaces the request's own slot in *table*.
        """
        pool = group.pool
        # With the chain's own list of names, the pool stores a request's blocks as one run (`Runs`). This is not done
        # in groups that forget, where two blocks of a sliding window would keep all names of a long prompt in memory.
        is_own = group.block_size == chain.block_size and not group.attention.forgets
        names = chain.names if is_own else chain.names_of(group.block_size, range(start, start + len(slots)))
        offset = start if is_own else 0
        taken = pool.commit(slots, names, offset)
        for place in taken:
            holder = pool.find(names[offset + place])
            assert holder is not None, "a name is taken, but no slot has it"
            pool.lease([holder])
            pool.release([table[start + place]])
            table[start + place] = holder
        tenant, step, first = tenant_of(chain.extra.cache_salt), group.block_size // chain.block_size, 0
        for end in [*taken, len(slots)]:
            if first < end:
                own = slots[first:end] if taken else slots
                if group.slots.is_spilled:
                    group.slots.dirty.add(own)
                group.record_origin(own, tenant, chain, start + first)
                if self._events is not None:
                    new = chain.names[(start + first + 1) * step - 1 : (start + end) * step : step]
                    _tell_stored(self._events, group, new, chain, start + first)
            first = end + 1

    def publish(
        self,
        group: GroupTiers,
        slots: Sequence[int],
        names: Sequence[BlockName],
        tenants: Sequence[bytes],
        chain: BlockChain | None,
        start: int,
    ) -> list[int]:
        """Name blocks that were loaded to the device, so that lookups find them. Return the device slot of each block.

        This is the block's slot in *slots*, or another slot if the same block was computed there in the meantime. The
        caller has leased *slots*. The blocks are those of *chain* from block *start* on. *chain* is None if no request
        waits for them any more.
        """
        pool, ids, used = group.pool, np.array(slots, np.intp), list(slots)
        if chain is not None and chain.block_size == group.block_size:
            taken = pool.commit(slots, chain.names, start)
        else:
            taken = pool.commit(slots, list(names))
        for place in taken:
            holder = pool.find(names[place])
            assert holder is not None, "a name is taken, but no slot has it"
            used[place] = holder
        places = [place for place in range(len(ids)) if place not in taken] if taken else range(len(ids))
        is_one_piece = not taken and tenants.count(tenants[0]) == len(tenants)
        for piece in [slice(0, len(ids))] if is_one_piece else [slice(place, place + 1) for place in places]:
            group.record_origin(ids[piece], tenants[piece.start], chain, start + piece.start)
            if self._events is not None:
                _tell_stored(self._events, group, names[piece], chain, start + piece.start)
        # A block that has left the lower tiers in the meantime has its last copy on the device.
        is_below = are_kept(self.lower.find(group.id, names))
        if not is_below.all():
            group.slots.on_copies_lost([slots[place] for place in places if not is_below[place]])
        return used

    def process_lost(self) -> None:
        """Mark device blocks as dirty if the lower tiers have lost their copies, so that they are copied again.

        Each call processes at most `LOST_AT_ONCE` lost blocks, and later calls process the rest. When
        `LowerStatus.epoch` has changed, the lower tiers may have lost any block. Then all device blocks are checked,
        some at each call.
        """
        self._lost.extend(self.lower.pop_lost())
        num_left = LOST_AT_ONCE
        while self._lost and num_left > 0:
            lost, start = self._lost[0], self._num_processed
            names = lost.names[start : start + num_left] if start or len(lost.names) > num_left else lost.names
            self._num_processed += len(names)
            num_left -= len(names) + LOST_TOGETHER
            if self._num_processed == len(lost.names):
                self._lost.popleft()
                self._num_processed = 0
            self._process_lost(lost._replace(names=names))
        if self._epoch != self.lower.status.epoch:
            self._epoch = self.lower.status.epoch
            self._marking = self._mark_uncopied()
        next(self._marking, None)

    def clear(self) -> None:
        """Evict all device blocks in one short step, after the lower tiers have evicted theirs.

        Later calls of `remember_cleared` remember the blocks as lost, and free their data.
        """
        self.process_lost()
        now = self._clock()
        self._cleared.extend((group, group.clear(), now) for group in self.groups)
        self._num_to_remember = NUM_GHOSTS
        self._marking = iter(())
        if self._events is not None:
            self._events.append(AllBlocksCleared())

    def remember_cleared(self) -> None:
        """Remember as lost some of the blocks that `clear` has evicted, and free their data.

        Does nothing until `process_lost` has remembered the lost blocks of the lower tiers. So a block that was also on
        the device is remembered as lost from the device.
        """
        if not self._cleared or self._lost or self.lower.status.clearing.is_losing:
            return
        group, cleared, at = self._cleared[0]
        names = cleared.pop()
        if names is None:
            self._cleared.popleft()
        elif self._num_to_remember > 0 and names:
            self._num_to_remember -= len(names)
            if not group.pool.has_none(names):  # some were computed again
                names = [name for name in names if group.pool.find(name) is None]
            self.ghosts.remember(names, Tier.DEVICE, EvictionCause.CLEARED, at)

    def check_tails_first(self) -> None:
        """Raise AssertionError if a device block would be evicted before a block that continues it.

        A prefix must be evicted from its end, so that all blocks before a cached block are cached too. Groups that
        forget (sliding windows, recurrent states) are not checked, because they release the beginning of a prefix
        first.
        """
        for group in self.groups:
            if group.partial_matches is None or group.attention.forgets:
                continue
            for slot, parent in group.partial_matches.parents(group.pool):
                place, parents_place = group.pool.order.place(slot), group.pool.order.place(parent)
                if place is not None and parents_place is not None:
                    assert place < parents_place, "a parent is evicted before its child"

    def _process_lost(self, lost: Lost) -> None:
        group_id, names, tier, cause = lost
        group = self.groups[group_id]
        if group.pool.has_none(names):
            self.ghosts.remember(names, tier, cause, self._clock())
            return
        slots = group.pool.find_all(names)
        is_here = slots != ABSENT
        if cause is EvictionCause.QUOTA:  # a second copy would push out other blocks of the same tenant
            self.ghosts.remember(names, tier, cause, self._clock())
            return
        on_lost = group.slots.on_evicted_below if cause.is_wanted else group.slots.on_copies_lost
        on_lost(slots[is_here])
        self.ghosts.remember(list(compress(names, (~is_here).tolist())), tier, cause, self._clock())

    def _on_left_device(
        self,
        group: GroupTiers,
        slots: Ids,
        names: Sequence[BlockName],
        were_dirty: set[BlockName | None],
        cause: EvictionCause,
    ) -> None:
        """Log that blocks have left the device, and remember those that neither host memory nor the disk has."""
        if not names:
            return
        if not group.slots.is_spilled:
            self.ghosts.remember(names, Tier.DEVICE, cause, self._clock())
        elif were_dirty or not self.lower.status.is_readable:  # otherwise all were clean and are found below
            gone = list(compress(names, (~are_kept(self.lower.find(group.id, names))).tolist()))
            if were_dirty and cause is not EvictionCause.CLEARED:
                dropped = [name for name in gone if name in were_dirty]
                group.slots.dropped_spills += len(dropped)
                if self.spills is not None and dropped:
                    self.spills.on_dropped(Route.DEVICE_TO_HOST, dropped, cause)
            self.ghosts.remember(gone, Tier.DEVICE, cause, self._clock())
        if group.tails and (tails := group.tails.intersection(names)):
            group.tails -= tails
            names = [name for name in names if name not in tails]
        if self._events is not None and names:
            self._events.append(BlockRemoved(Tier.DEVICE, group.id, names, cause))

    def _mark_uncopied(self) -> Iterator[None]:
        """Mark the device blocks without a copy in the lower tiers as dirty; yield after each `SLOTS_AT_ONCE` slots."""
        for group in self.groups:
            pool = group.pool
            for first in range(0, pool.num_slots if pool.num_named else 0, SLOTS_AT_ONCE):
                slots = range(first, min(first + SLOTS_AT_ONCE, pool.num_slots))
                there = [(slot, name) for slot in slots if (name := pool.name(slot)) is not None]
                is_kept = are_kept(self.lower.find(group.id, [name for _, name in there]))
                uncopied = list(compress(there, (~is_kept).tolist()))
                group.slots.on_copies_lost([slot for slot, name in uncopied if name not in group.tails])
                yield


def _tell_stored(
    events: EventLog, group: GroupTiers, names: Sequence[BlockName], chain: BlockChain | None, start: int
) -> None:
    """Log an event that the device holds these blocks.

    They are the blocks of *chain* from block *start* on; *chain* is None if the blocks' prompt is unknown.
    """
    size = group.block_size
    if chain is None:
        events.append(BlockStored(Tier.DEVICE, group.id, names, size))
        return
    first = start * size
    parent = chain.parent(first // chain.block_size) if start else None
    token_ids = chain.token_ids[first : first + len(names) * size]
    events.append(BlockStored(Tier.DEVICE, group.id, names, size, parent, token_ids, first, chain.extra))


def _matched_in_part(groups: Sequence[AttentionGroup]) -> int | None:
    """Return the id of the group in which a block is found even if only its first tokens match a prompt.

    Returns None if requests cannot resume in the middle of a block, or if the groups' block sizes differ.
    """
    if name_block_size(groups) != alignment(groups) or not all(group.resumes_inside for group in groups):
        return None
    return next((group_id for group_id, group in enumerate(groups) if not group.forgets), 0)
