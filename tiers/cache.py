"""TieredCache: device, host, disk and remote tier as one prefix cache. Start reading here."""

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.slot_ids import ABSENT, Ids
from kvtier.tiers.device.slot_purge import SlotPurge
from kvtier.tiers.down.host_spill import HostSpill
from kvtier.tiers.group_tiers import GroupTiers
from kvtier.tiers.lower.breaker import HUNG_S
from kvtier.tiers.lower.clean_ahead import CleanAhead
from kvtier.tiers.lower.inquiry import NOTHING_TO_ASK, AllOf, Inquiry
from kvtier.tiers.lower.local_purge import limit_per_group
from kvtier.tiers.lower.lower_tiers import LowerTiers, SpillProgress
from kvtier.tiers.lower.purge import PurgeOrder
from kvtier.tiers.lower.spill_log import SpillLog
from kvtier.tiers.lower.statistics import CacheStatistics, slot_statistics
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.naming.events import EventLog
from kvtier.tiers.naming.groups import AttentionGroup, alignment, longest_hit, longest_single, name_block_size
from kvtier.tiers.naming.retention import Retention
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.tiers.pins import Pin, Pins
from kvtier.tiers.purge import CachePurge
from kvtier.tiers.residency import Located, Residency
from kvtier.tiers.up.load_planner import Demand, LoadPlanner, LoadSpeeds, Plan
from kvtier.tiers.up.promoter import Promoter
from kvtier.tiers.up.promotion import NO_SLOT, Hit, Misses, PartialHit, Promotion, Table, Tables
from kvtier.transfer.block_memory import BlockMemory
from kvtier.transfer.transfer_engine import Route, TransferEngine

TAKING_IN_S = 0.0003  # time limit for processing finished copies in a poll, after the first batch
NOTHING = np.empty(0, np.int32)
NOT_LOOKED_FOR = Located(NOTHING, NOTHING, 0)


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Settings of a `TieredCache`."""

    retention_tokens: int | None = None  # see `Retention`
    partial_blocks: bool = True  # whether to reuse the first tokens of a block that match
    by_layers: bool = False  # whether host blocks may be loaded layer by layer (`Promotion.gate`)
    # Minimum number of blocks at the eviction end that are kept clean: as many as are allocated during one copy. The
    # default, one prefill chunk's worth, applies until copies have been measured.
    min_clean_ahead: int = 32
    # Whether to spill every block soon after it was computed, for other users of the lower tiers, instead of shortly
    # before its slot is needed.
    copies_all_down: bool = False


class TieredCache:
    """A prefix cache over all tiers: finds the longest cached prefix, promotes it to the device, and spills old blocks.

    One thread owns the cache. No method waits for a copy except `wait` and `flush`. The lifecycle of a request is
    `lookup`, `promote`, `poll` until the promotion is done, `allocate` and `commit` while it computes, and `release`. A
    failed, late or corrupt copy leads to a shorter prefix, never to an exception. The bytes are in *memories*, one for
    each attention group.

    Each group has its own block size. A name covers `block_size` tokens, which divides the block sizes of all groups; a
    block has the name of its last tokens.
    """

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        memories: Sequence[BlockMemory],
        transfers: TransferEngine,
        lower: LowerTiers,
        clock: Callable[[], float] = time.monotonic,
        options: CacheOptions = CacheOptions(),
        *,
        events: EventLog | None = None,
        planner: LoadPlanner | None = None,
        spills: SpillLog | None = None,
    ) -> None:
        """Create an empty cache.

        *memories*, one per group, hold the device slots and the host slots that *lower* uses. *events* records blocks
        that enter or leave the device. *planner* decides what is `worth_loading`; without it, everything is. *spills*
        records each batch that was to be spilled from the device.
        """
        self.groups = tuple(groups)
        self.block_size = name_block_size(groups)
        self.alignment = alignment(groups)
        self.lower = lower
        self.residency = Residency(groups, memories, lower, options.partial_blocks, events, clock, spills)
        self._group_tiers = self.residency.groups
        self._forgetting = [group for group in self._group_tiers if group.attention.forgets]
        self._transfers = transfers
        self._clock = clock
        self._planner = planner
        self._retention = Retention(self.groups, options.retention_tokens)
        # At most a quarter of the pool: dirty blocks are skipped within the window, and beyond it the order is strict.
        limit = max(1, min(memory.num_device_slots for memory in memories) // 4)
        self._window = CleanAhead(options.min_clean_ahead, limit, clock)
        self._host_spill = HostSpill(self.residency, transfers, self._window, clock)
        self._promoter = Promoter(self.residency, transfers, clock, self._hand_over, options.by_layers)
        self._hits = self._promoter.hits
        self._pins = Pins(self.residency, self._host_spill, clock)
        self._is_spilled = all(lower.status.num_slots)
        self._copies_all_down = options.copies_all_down
        self._nothing = [0 for _ in groups]
        self._demand = self._nothing  # by group, the device blocks that the promotion waiting for room will use

    def inquire(self, chain: BlockChain, num_tokens: int) -> Inquiry:
        """Query slow tiers (for example the remote store) for the part of the prompt that no faster tier holds.

        Tiers are not queried if computing that part would be faster than the query. Once the inquiry is done, `lookup`
        includes its result.
        """
        if not self.lower.hints.can_ask:
            return NOTHING_TO_ASK
        limit, inquiries = self._limit(chain, num_tokens), list[Inquiry]()
        for group in self._group_tiers:
            names = group.names_in(chain, range(limit // group.block_size))
            start = 0 if group.attention.forgets else self.residency.locate(group, names).num_found
            if start < len(names) and self._is_worth_asking(start * group.block_size, num_tokens):
                inquiries.append(self.lower.hints.inquire(group.id, names[start:]))
        return AllOf(inquiries)

    def lookup(self, chain: BlockChain, num_tokens: int) -> Hit:
        """Return the longest cached prefix of the prompt over all tiers. Leases nothing and has no side effects.

        *chain* holds the names of the prompt's blocks, and *num_tokens* is the prompt's length. The last token must
        always be computed, so the hit has at most *num_tokens* - 1 tokens.
        """
        limit = self._limit(chain, num_tokens)
        located: dict[int, tuple[int, Located]] = {}

        def first_hole(group_id: int, start: int, end: int) -> int:
            group = self._group_tiers[group_id]
            found = self.residency.locate(group, group.names_in(chain, range(start, end)))
            located[group_id] = start, found
            return start + found.num_found

        num_found = longest_hit(limit, self.groups, first_hole)
        device_slots, below = [], []
        for group in self._group_tiers:
            needed = group.needed(num_found)
            start, found = located.get(group.id, (0, NOT_LOOKED_FOR))
            if needed.start < start or start + len(found.device_slots) < needed.stop:
                start, found = needed.start, self.residency.locate(group, group.names_in(chain, needed))
            device_slots.append(found.device_slots[needed.start - start : needed.stop - start])
            below.append(found.below[needed.start - start : needed.stop - start])
        misses = Misses(())
        if num_found < limit:
            ends = {num_found // group.block_size * group.block_size + group.block_size for group in self.groups}
            why = self.residency.miss_reason(chain.names[end // self.block_size - 1] for end in sorted(ends))
            misses = Misses(((limit, why),))
        partial = self._partial_hit(chain, num_found, num_tokens)
        return Hit(chain, limit, num_found, misses, partial, device_slots, below, self.residency.num_changes)

    def make_room(self, hit: Hit) -> bool:
        """Start spilling the dirty blocks that promoting the hit would evict; return True if there is no need to wait.

        Returns True also if waiting would not help. If the result is False, call again after a `poll`. Promoting
        without this call is allowed, but drops dirty blocks.
        """
        is_on_device = all((found != ABSENT).all() for found in self._hits.device_slots(hit))
        if not hit.num_tokens or (is_on_device and not self._host_spill.num_dirty):
            return True
        demand, short = [], []
        rest_tokens = hit.limit - hit.num_tokens
        pairs = zip(self._group_tiers, self._hits.resident_and_missing(hit), strict=True)
        for group, (resident, missing) in pairs:
            demand.append(missing + len(resident))  # the hit's own blocks may be among the oldest
            now = missing + (hit.partial is not None)
            # Then the request takes slots to compute in, before a copy that is started now has been processed. The
            # hit's own blocks may be all the clean ones; once they are leased, no clean block is left.
            soon = min(self._window.depth, -(-rest_tokens // group.block_size) + 1)
            takes = missing or len(resident)
            short.append(max(self._lacking(group, n, resident) for n in (now, now + soon)) if takes else 0)
        if not any(short):
            return True
        self._promoter.keep_warm(hit)
        self._demand = demand
        self._spill()
        # A hit on the device does not wait for the disk: other promotions wait for room in host memory.
        return not self._host_spill.is_making_progress and (is_on_device or not self.lower.status.is_making_room)

    def promote(self, hit: Hit, timeout_s: float | None = None) -> Promotion:
        """Start to bring the hit's blocks to the device, and lease those that are there. Returns at once.

        The promotion is `done` at once or after some `poll`. After *timeout_s* it ends with the blocks that have
        arrived.
        """
        deadline = None if timeout_s is None else self._clock() + timeout_s
        return self._promoter.promote(hit, self._window.num_blocks, deadline)

    def cancel(self, promotion: Promotion) -> None:
        """Cancel a promotion and release all its leases."""
        if not promotion.done:
            self._promoter.give_up(promotion, Reason.DEADLINE)
        self.release(promotion.tables)
        self._promoter.on_released(promotion)

    def poll(self) -> None:
        """Process finished transfers: publish blocks, complete promotions, and start queued copies."""
        self.wait(0.0)

    def wait(self, timeout_s: float) -> None:
        """Wait up to *timeout_s* for a transfer to finish, and process the finished ones.

        Processing stops after `TAKING_IN_S`. The remaining transfers are processed by the next call.
        """
        until: float | None = None

        def should_continue() -> bool:
            nonlocal until
            now = self._clock()
            until = now + TAKING_IN_S if until is None else until  # measured from the first transfer, without the wait
            return now < until

        self._transfers.poll(0.0 if self._promoter.could_start_more else timeout_s, should_continue)
        self._promoter.pump(self._window.num_blocks)
        self.residency.process_lost()
        self._pins.pump()

    def allocate(self, num_slots: Sequence[int]) -> Tables | None:
        """Lease *num_slots* device slots of each group for new blocks; return None if a group has too few.

        Evicts the oldest clean blocks first. A dirty block that must be evicted is dropped and counted. Never waits for
        a copy.
        """
        self.residency.process_lost()
        for wanted, group in zip(num_slots, self._group_tiers, strict=True):
            if wanted > group.pool.num_free:
                return None
        tables: Tables = []
        for wanted, group in zip(num_slots, self._group_tiers, strict=True):
            slots = group.slots.take(wanted, self._window.num_blocks if group.slots.dirty else 0)
            assert slots is not None, "fewer free slots than a moment ago"
            tables.append(array("i", slots))
            group.num_held += wanted
        self._window.on_allocated(max(num_slots))
        return tables

    def commit(self, tables: Tables, chain: BlockChain, start: int, end: int, boundaries: Sequence[int] = ()) -> None:
        """Name the full blocks among a request's computed tokens *start* to *end*, so that later requests find them.

        *tables* are the request's block tables. If another slot already has a block of the same name, its bytes are
        equal and the table gets that slot. So each block is cached once, and a prefix is evicted after the blocks that
        continue it. *boundaries* are the positions where later prompts may resume; see `Retention.kept`.
        """
        for group, table in zip(self._group_tiers, tables, strict=True):
            first, last = start // group.block_size, end // group.block_size
            if not group.attention.forgets:
                if first < last:
                    self._commit_run(group, table, chain, first, _ids(table[first:last]))
                continue
            for blocks in self._retention.kept(group.attention, first, last, boundaries):
                slots = _ids(table[blocks.start : blocks.stop])
                if (slots != NO_SLOT).all():
                    self._commit_run(group, table, chain, blocks.start, slots)
                    continue
                for place in np.flatnonzero(slots != NO_SLOT).tolist():
                    self._commit_run(group, table, chain, blocks.start + place, slots[place : place + 1])

    def commit_tail(self, tables: Tables, chain: BlockChain, num_computed: int) -> None:
        """Offer a request's last, partial block to later requests, which copy it. Call this before `release`.

        So the next turn of a chat finds all computed tokens while the block is on the device. Partial blocks are not
        spilled. If a request continues after all of the block's tokens, it offers a longer block at its end, and this
        one is evicted.
        """
        block_id = num_computed // self.block_size
        token_ids = chain.token_ids[block_id * self.block_size : num_computed]
        if (
            self.residency.partial_group is None
            or not len(token_ids)
            or any(len(table) <= block_id for table in tables)
        ):
            return
        key, name = chain.continued_key(block_id), chain.tail_name(num_computed)
        for group, table in zip(self._group_tiers, tables, strict=True):
            group.commit_tail(table[block_id], name, key, token_ids)

    def forget_read(self, tables: Tables, num_tokens: int) -> None:
        """Release the blocks that no token after *num_tokens* reads (sliding windows, chunks), updating *tables*."""
        for group in self._forgetting:
            table = tables[group.id]
            passed = []
            for block_id in range(min(group.attention.first_needed(num_tokens), len(table)) - 1, -1, -1):
                if table[block_id] == NO_SLOT:
                    break
                passed.append(table[block_id])
                table[block_id] = NO_SLOT
            group.num_held -= len(passed)
            group.pool.release(passed)

    def release(self, tables: Tables) -> None:
        """Release a request's leases, the prefix's tail first, so that the tail is evicted first."""
        for group, table in zip(self._group_tiers, tables, strict=True):
            slots = _ids(table)[::-1]
            leased = slots[slots != NO_SLOT]
            group.num_held -= len(leased)
            group.pool.release(leased)

    def spill(self) -> None:
        """Start spills that are due, from the device to host memory and from there to disk.

        The number of device blocks kept clean in advance depends on the measured speeds. With
        `CacheOptions.copies_all_down`, the other blocks follow while no promotion is in flight. Call this after each
        step, and from time to time while there are no steps.
        """
        now = self._clock()
        for group in self._group_tiers:
            group.slots.ages.look(group.slots.num_evicted, now)
        if self._is_spilled:
            self._spill()
            if self._copies_all_down and not any(self._demand) and not self._promoter.num_waiting:
                self._host_spill.spill_all()
            self._demand = self._nothing

    def flush(self, timeout_s: float, progress: Callable[[int], None] = lambda num_left: None) -> int:
        """Copy every block that no request leases to disk, so that a restart is warm.

        Does nothing without a disk. Waits up to *timeout_s*, but not for copies that hang or for host slots that are
        never released.

        Args:
            timeout_s: Time limit.
            progress: Called with the number of blocks that are left.

        Returns:
            The number of blocks that were not copied.
        """
        below = self.lower.status.spill_progress()
        if not below.has_target:
            return 0
        began_at = self._clock()
        deadline = began_at + timeout_s
        everything = [group.pool.num_slots for group in self._group_tiers]
        # Each block is written once. Otherwise a disk smaller than the tiers above would evict blocks just written.
        stop_at = below.num_done + below.num_left + self._host_spill.num_dirty
        min_num_tokens, moved_at = stop_at, began_at
        while (num_left := below.num_left + self._host_spill.num_dirty) and below.num_done < stop_at:
            if num_left < min_num_tokens or self._host_spill.copies.batches or below.is_busy:
                min_num_tokens, moved_at = min(num_left, min_num_tokens), self._clock()
            if self._clock() >= deadline or not below.is_possible or self._hangs_since(began_at, below):
                break
            if self._clock() - moved_at > HUNG_S:
                break
            progress(num_left)
            self.lower.hints.spill()
            self._host_spill.spill(everything)
            if self._transfers.in_flight:
                self.wait(0.05)
            else:
                time.sleep(0.01)  # copies pause for a while after a failure
                self.poll()
            below = self.lower.status.spill_progress()
        while self._host_spill.copies.batches or below.is_busy:
            if self._clock() >= deadline or self._hangs_since(began_at, below):
                break
            self.wait(0.05)
            below = self.lower.status.spill_progress()
        return num_left

    def junction(self, hit: Hit) -> int | None:
        """Return the length of a prefix, longer than the hit, after which only groups that forget lack blocks, or None.

        Such a prefix was requested a second time, so the forgetting groups' blocks at its end are worth keeping.
        """

        def first_hole(group_id: int, start: int, end: int) -> int:
            group = self._group_tiers[group_id]
            return start + self.residency.locate(group, group.names_in(hit.chain, range(start, end))).num_found

        if self._retention.interval_tokens is None or len(self.groups) == 1:
            return None  # all blocks are kept anyway
        num_tokens = longest_single(hit.limit, self.groups, first_hole)
        return num_tokens if num_tokens > hit.num_tokens else None

    def where(self, chain: BlockChain) -> list[Tier | None]:
        """Return for each name the coldest tier from which a group gets its block; None if any group misses it."""
        result: list[Tier | None] = []
        for place in range(len(chain.names)):
            found = []
            for group in self._group_tiers:
                block_id = place * self.block_size // group.block_size
                names = group.names_in(chain, range(block_id, block_id + 1))
                found.append(self.residency.tier_of(group, names[0]) if names else None)
            tiers = [tier for tier in found if tier is not None]
            result.append(max(tiers, key=lambda tier: tier.depth) if len(tiers) == len(found) else None)
        return result

    def num_leased(self, hit: Hit) -> list[int]:
        """Return by group how many of the hit's blocks are in device slots that are already leased."""
        slots = self._hits.device_slots(hit)
        return [g.pool.num_leased(found[found != ABSENT]) for g, found in zip(self._group_tiers, slots, strict=True)]

    def no_hit(self, chain: BlockChain, num_tokens: int) -> Hit:
        """Return the empty hit of a request that must not read the cache."""
        limit = self._limit(chain, num_tokens)
        return Hit(chain, limit, 0, Misses(((limit, Reason.SKIPPED),)))

    def worth_loading(self, hit: Hit, num_tokens: int, busy_s: float = 0.0) -> Hit:
        """Shorten the hit to the part that is faster to load than to recompute, for a prompt of *num_tokens* tokens.

        *busy_s* is how long the device will first compute for other requests. The request starts a split hit
        (`Hit.start`) with the part that is `on_device`, and promoting the hit loads the rest. Has no side effects.
        """
        return hit if self._planner is None else self._planned(hit, num_tokens, busy_s, self._planner.best)

    def plan_load(self, hit: Hit, num_tokens: int, busy_s: float = 0.0) -> Hit:
        """Return the same as `worth_loading`, and count the plan."""
        return hit if self._planner is None else self._planned(hit, num_tokens, busy_s, self._planner.choose)

    def load_seconds(self, hit: Hit, planner: LoadPlanner) -> float | None:
        """Return the seconds to load the whole hit after the queued loads; None while a lane's speed is unknown."""
        demand = self._hits.demand(hit, self.alignment)
        return 0.0 if demand is None else planner.load_seconds(demand, self._speeds)

    def limit_load(self, hit: Hit, num_tokens: int) -> Hit:
        """Shorten the hit so that at most *num_tokens* tokens must be loaded from lower tiers."""
        limit = self._hits.on_device(hit).num_tokens + num_tokens
        if hit.num_tokens <= limit:
            return hit
        return replace(self._hits.shorter(hit, limit), misses=hit.misses.cut(hit.num_tokens, Reason.SKIPPED))

    def limit_hit(self, hit: Hit, num_tokens: int, reason: Reason) -> Hit:
        """Shorten the hit to the first *num_tokens* tokens; the rest of it is computed for *reason*."""
        num_found = hit.num_tokens + (0 if hit.partial is None else hit.partial.num_tokens)
        if num_found <= num_tokens:
            return hit
        shorter = self._hits.shorter(hit, num_tokens)
        return replace(shorter, partial=None, misses=hit.misses.cut(num_found, reason))

    def on_device(self, hit: Hit) -> Hit:
        """Shorten the hit to the part that is on the device, which can be promoted at once."""
        return self._hits.on_device(hit)

    def computed(self, hit: Hit) -> range:
        """Return the chain's blocks that the request of a split hit computes although they are cached."""
        return self._hits.computed(hit)

    def free_slots(self) -> list[int]:
        """Return by group how many device slots `allocate` could return now."""
        return [max(0, group.pool.num_free) for group in self._group_tiers]

    def num_to_come(self, promotion: Promotion) -> list[int]:
        """Return by group how many blocks of the promotion have only a reserved device slot."""
        return self._promoter.num_to_come(promotion)

    def pin(self, chain: BlockChain, num_tokens: int, max_bytes: int | None = None, start: int = 0) -> Pin | None:
        """Keep the blocks that a prompt needs to resume after *num_tokens* tokens in host memory until `unpin`.

        Blocks before token *start*, which another pin of the caller keeps, are excluded. Blocks in host memory are
        leased at once. Blocks that are only on disk or on the device are copied as soon as nothing more urgent is
        copied.

        Returns None if the blocks have more than *max_bytes* (default: `free_to_pin`). A caller that passes *max_bytes*
        is responsible for the total of its pins.
        """
        whole = self.whole_tokens(chain, num_tokens)
        return self._pins.begin(chain, whole, self.free_to_pin if max_bytes is None else max_bytes, start)

    def whole_tokens(self, chain: BlockChain, num_tokens: int) -> int:
        """Return how many of the first *num_tokens* tokens are in named blocks of all groups, and so can be pinned."""
        return min(num_tokens, len(chain.names) * self.block_size) // self.alignment * self.alignment

    def unpin(self, pin: Pin) -> None:
        """End the pin. Idempotent."""
        self._pins.end(pin)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that all pins need when they are whole."""
        return self._pins.num_bytes

    @property
    def pinnable_bytes(self) -> int:
        """Maximum bytes that may be pinned: half of host memory. The other half is for unpinned blocks."""
        return self.lower.status.host_bytes // 2

    @property
    def free_to_pin(self) -> int:
        """Bytes that may still be pinned; negative if callers have pinned more with their own *max_bytes*."""
        return self.pinnable_bytes - self._pins.num_bytes

    @property
    def knows_disk(self) -> bool:
        """Whether the index of the blocks that were on disk at the start is complete; until then some of them miss."""
        return self.lower.status.is_indexed

    @property
    def num_under_way(self) -> int:
        """Number of transfers that were started and not processed yet, on all routes."""
        return self._transfers.in_flight

    def purge(self, order: PurgeOrder) -> CachePurge:
        """Prepare an eviction requested by an operator. Call `go_on` of the result until it is done.

        Device and host memory hold blocks of one namespace only. To purge another namespace, leave these tiers out.
        """
        device: list[SlotPurge] = []
        block_bytes = [group.memory.block_bytes for group in self._group_tiers]
        if Tier.DEVICE in order.tiers:
            limit = limit_per_group(order.max_bytes, order.max_blocks, block_bytes)
            device = [
                SlotPurge(group.slots, limit, None if order.tenant is None else partial(group.are_of, order.tenant))
                for group in self._group_tiers
            ]
        return CachePurge(order, device, block_bytes, [self.lower.purge(order)], self._clock)

    def spill_rest(self) -> int:
        """Start spilling all dirty blocks, leased or not, from the device to host memory and from there to disk.

        Call again for the rest. Returns the number of blocks that are left, including those in flight; 0 without lower
        tiers.
        """
        if not self._is_spilled:
            return 0
        if not self._promoter.num_waiting:
            self._host_spill.spill_all()
            self.lower.hints.spill()
        return self._host_spill.num_uncopied + self.lower.status.spill_progress().num_left

    def reset(self) -> bool:
        """Evict all blocks from all tiers and end all pins. Waits until the store has deleted this namespace's records.

        Returns False, leaving everything as it was, if any block is leased or in flight, or if the store fails.
        """
        if (
            any(group.num_held for group in self._group_tiers)
            or self._promoter.num_waiting
            or self._transfers.in_flight
        ):
            return False
        if not self.lower.clear():
            return False
        self._pins.end_all()
        self.residency.clear()
        return True

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent: pools, dirty marks, leases, blocks in flight."""
        for _ in self.checks():
            pass

    def checks(self) -> Iterator[str]:
        """Run `check` in parts, and yield a description after each part. Parts may run at different times."""
        for group in self._group_tiers:
            group.slots.check()
            yield f"device, group {group.id}: {group.pool.num_named} blocks in {group.pool.num_slots} slots"
        self.residency.check_tails_first()
        yield "device: no block would be evicted before one that continues it"
        self.lower.status.check()
        yield "host memory and the index of the disk"
        self._promoter.check()
        yield f"promotions: {self._promoter.num_waiting} in flight"
        for group in self._group_tiers:
            under_way = self._host_spill.copies.num_leases(group.pool) + self._promoter.num_leases(group)
            expected = under_way + group.num_held + self._promoter.num_waiting_leases(group)
            assert group.pool.num_leases == expected, f"device: {group.pool.num_leases} leases, not {expected}"
            yield f"device, group {group.id}: {expected} leases"

    def statistics(self) -> CacheStatistics:
        """Return a copy of all statistics."""
        lower = self.lower.status.statistics()
        groups = self._group_tiers
        device = slot_statistics([group.slots for group in groups], [group.memory.block_bytes for group in groups])
        return CacheStatistics(
            {Tier.DEVICE: device, **lower.tiers},
            self._transfers.statistics(),
            self._promoter.num_waiting,
            self._window.num_blocks,
            lower.disk,
            lower.remote,
            lower.admission,
            lower.host_tenants,
        )

    def close(self) -> bool:
        """End the lanes and release the host memory. Call `flush` first to keep all blocks on disk.

        Returns False if a copy hangs. Then the memory stays, and the store must not be closed.
        """
        if not self._transfers.close():
            return False
        for group in self._group_tiers:
            group.memory.close()
        return True

    def _is_worth_asking(self, num_found: int, num_tokens: int) -> bool:
        """Return whether the rest of a prompt takes longer to compute than a query of the remote tier takes."""
        if self._planner is None or not self._planner.prefill.is_known:
            return True
        compute_s = self._planner.compute_seconds(num_found, num_tokens - num_found)
        return compute_s > self.lower.status.read_speed(Tier.REMOTE).latency_s

    def _planned(
        self,
        hit: Hit,
        num_tokens: int,
        busy_s: float,
        choose: Callable[[Demand, int, float, LoadSpeeds], Plan],
    ) -> Hit:
        """Shorten or split the hit according to the plan that *choose*, a method of the planner, returns."""
        demand = self._hits.demand(hit, self.alignment)
        if demand is None:
            return hit
        plan = choose(demand, num_tokens, busy_s, self._speeds)
        if plan.end == hit.num_tokens:
            return replace(hit, start=plan.start) if plan.start else hit
        return replace(self._hits.shorter(hit, plan.end), misses=hit.misses.cut(hit.num_tokens, Reason.COST))

    def _spill(self) -> None:
        """Start the spills that are due, without optional disk writes while a promotion needs room or is in flight."""
        self._host_spill.spill(self._demand)
        if any(self._demand) or self._promoter.num_waiting:
            self.lower.hints.make_room()
        else:
            self.lower.hints.spill()

    def _limit(self, chain: BlockChain, num_tokens: int) -> int:
        limit = min(max(0, num_tokens - 1), len(chain.names) * self.block_size)
        return limit // self.alignment * self.alignment

    def _partial_hit(self, chain: BlockChain, num_found: int, num_tokens: int) -> PartialHit | None:
        """Return the device block that shares the most tokens with the prompt after the hit, if all groups have it."""
        group = self.residency.partial_group
        wanted = chain.token_ids[num_found : min(num_found + self.block_size, num_tokens - 1)]
        if group is None or group.partial_matches is None or not len(wanted):
            return None
        key = chain.continued_key(num_found // self.block_size)
        for slot, num_shared in group.partial_matches.sharing(key, wanted, group.pool):
            name = group.pool.name(slot)
            if name is not None and all(each.pool.find(name) is not None for each in self._group_tiers):
                return PartialHit(name, num_shared, group.partial_matches.is_used_up(slot, num_shared))
        return None

    def _commit_run(self, group: GroupTiers, table: Table, chain: BlockChain, start: int, slots: Ids) -> None:
        """Name the blocks of *table* from *start* on, or replace their slots by those that already hold the blocks."""
        pool = group.pool
        # With the chain's own list, a request forms one run. Not in groups that forget, where two blocks of a window
        # would keep all the names of a long prompt alive.
        is_own = group.block_size == chain.block_size and not group.attention.forgets
        names = chain.names if is_own else group.names_in(chain, range(start, start + len(slots)))
        offset = start if is_own else 0
        taken = pool.commit(slots, names, offset)
        for place in taken:
            holder = pool.find(names[offset + place])
            assert holder is not None, "a name is taken, but no slot has it"
            pool.lease([holder])
            pool.release([table[start + place]])
            table[start + place] = holder
        first = 0
        for end in [*taken, len(slots)]:
            if first < end:
                self.residency.on_committed(group, slots[first:end], chain, start + first)
            first = end + 1

    def _lacking(self, group: GroupTiers, num_slots: int, besides: npt.NDArray[np.int32]) -> int:
        """Return how many of *num_slots* device slots could not be taken now without dropping dirty blocks."""
        num_slots += group.pool.num_reserved  # promotions take their reserved slots first
        horizon = max(0, num_slots - group.pool.num_blank) + self._window.num_blocks
        return max(0, num_slots - group.slots.num_clean(horizon, besides))

    @property
    def _speeds(self) -> LoadSpeeds:
        return {
            Route.DISK_TO_HOST: self.lower.status.read_speed(Tier.DISK),
            Route.REMOTE_TO_HOST: self.lower.status.read_speed(Tier.REMOTE),
            Route.HOST_TO_DEVICE: self._transfers.speed(Route.HOST_TO_DEVICE),
        }

    def _hangs_since(self, began_at: float, below: SpillProgress) -> bool:
        """Return whether spills are in flight but none has ended for `HUNG_S`, counted from *began_at* or later."""
        copies = self._host_spill.copies
        ended_at = [copies.ended_at] * bool(copies.batches) + [below.ended_at] * below.is_busy
        return bool(ended_at) and max(began_at, *ended_at) < self._clock() - HUNG_S

    def _hand_over(self, promotion: Promotion) -> None:
        """Count the leases of a completed promotion as leases of the caller."""
        for group, table in zip(self._group_tiers, promotion.tables, strict=True):
            group.num_held += int(np.count_nonzero(np.array(table, np.int32) != NO_SLOT))


def _ids(slots: Table) -> Ids:
    return np.array(slots, np.intp)
