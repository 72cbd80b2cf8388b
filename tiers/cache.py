"""TieredCache: device, host, disk and remote as one prefix cache. Start here."""

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

TAKING_IN_S = 0.0003  # for which a poll takes in finished copies, after the first batch: every poll is short
NOTHING = np.empty(0, np.int32)
NOT_LOOKED_FOR = Located(NOTHING, NOTHING, 0)


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Settings of a `TieredCache`."""

    retention_tokens: int | None = None  # see `Retention`
    partial_blocks: bool = True  # reuse the first tokens of a block that shares them
    by_layers: bool = False  # whether host blocks may come layer by layer (`Promotion.gate`)
    # Blocks at the eviction end that are kept copied below at the least: as many as are allocated while a copy takes.
    # The default is one prefill chunk's worth, before anything has been measured.
    min_clean_ahead: int = 32
    # Whether every block is copied below soon after it was computed, and not only when its slot is about to be needed:
    # for others that share the tiers below.
    copies_all_down: bool = False


class TieredCache:
    """Finds the longest cached prefix of a prompt, brings it to the device, and keeps what the device has copied below.

    One thread owns it; no method waits for a copy except `wait` and `flush`. A request's life here: `lookup`,
    `promote`, `poll` until the promotion is done, `allocate` and `commit` as it computes, `release`. A failed, late or
    corrupt copy is a shorter prefix, never an exception. The bytes are in *memories*, one for each attention group.

    Each group has a block size of its own. A name stands for `block_size` tokens, which divides all of them; a block
    has the name of its last tokens.
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
        """*memories*, one for each group, have the device slots, and the host slots that *lower* uses. *events*: log
        of blocks that come to the device and leave it. *planner*: says what is `worth_loading`; without one all is.
        *spills*: log of each batch that was to be copied down from the device."""
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
        # At most a quarter of the pool: within the window dirty blocks are skipped, beyond it the order is strict.
        limit = max(1, min(memory.num_device_slots for memory in memories) // 4)
        self._window = CleanAhead(options.min_clean_ahead, limit, clock)
        self._host_spill = HostSpill(self.residency, transfers, self._window, clock)
        self._promoter = Promoter(self.residency, transfers, clock, self._hand_over, options.by_layers)
        self._hits = self._promoter.hits
        self._pins = Pins(self.residency, self._host_spill, clock)
        self._is_spilled = all(lower.num_slots)
        self._copies_all_down = options.copies_all_down
        self._nothing = [0 for _ in groups]
        self._demand = self._nothing  # of the promotion that wants room: device blocks that it reaches, by group

    def inquire(self, chain: BlockChain, num_tokens: int) -> Inquiry:
        """Have tiers asked that cannot tell at once what they have of the prompt, as far as nothing nearer has it and
        computing it would take longer than to ask. Once it is done a `lookup` finds what they have."""
        if not self.lower.can_ask:
            return NOTHING_TO_ASK
        limit, inquiries = self._limit(chain, num_tokens), list[Inquiry]()
        for group in self._group_tiers:
            names = group.names_in(chain, range(limit // group.block_size))
            start = 0 if group.attention.forgets else self.residency.locate(group, names).num_found
            if start < len(names) and self._is_worth_asking(start * group.block_size, num_tokens):
                inquiries.append(self.lower.inquire(group.id, names[start:]))
        return AllOf(inquiries)

    def lookup(self, chain: BlockChain, num_tokens: int) -> Hit:
        """The longest prefix of the prompt that can be resumed, over all tiers at once. Pure; nothing is leased.

        *chain* names the prompt's blocks, *num_tokens* is its length. The last token is always left to compute, so the
        hit ends at *num_tokens* - 1 at the latest.
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
            why = self.residency.why_missing(chain.names[end // self.block_size - 1] for end in sorted(ends))
            misses = Misses(((limit, why),))
        partial = self._partial_hit(chain, num_found, num_tokens)
        return Hit(chain, limit, num_found, misses, partial, device_slots, below, self.residency.num_changes)

    def make_room(self, hit: Hit) -> bool:
        """Start copying down the blocks that promoting the hit would push out; True if there is nothing to wait for.

        True also when nothing more can be done about it. If False, ask again after a `poll`. Promoting without asking
        is allowed, and drops blocks that have no copy below.
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
            # Then its request takes slots to compute in, before a copy that is started now has been taken in. The hit's
            # own blocks may have been all that was copied ahead: leased, they leave it none.
            soon = min(self._window.depth, -(-rest_tokens // group.block_size) + 1)
            takes = missing or len(resident)
            short.append(max(self._lacking(group, n, resident) for n in (now, now + soon)) if takes else 0)
        if not any(short):
            return True
        self._promoter.keep_warm(hit)
        self._demand = demand
        self._spill()
        # A hit on the device waits for no disk: what host memory lacks is another's to wait for.
        return not self._host_spill.is_moving and (is_on_device or not self.lower.is_making_room)

    def promote(self, hit: Hit, timeout_s: float | None = None) -> Promotion:
        """Bring the hit's blocks to the device: lease the ones that are there, copy up the others. Returns at once.

        The promotion is `done` now or after some `poll`. After *timeout_s* it is done with what has arrived.
        """
        deadline = None if timeout_s is None else self._clock() + timeout_s
        return self._promoter.promote(hit, self._window.num_blocks, deadline)

    def cancel(self, promotion: Promotion) -> None:
        """End a promotion that its caller gives up, with all its leases."""
        if not promotion.done:
            self._promoter.give_up(promotion, Reason.DEADLINE)
        self.release(promotion.tables)
        self._promoter.on_released(promotion)

    def poll(self) -> None:
        """Take in what the lanes have finished: publish blocks, finish promotions, go on with queued copies."""
        self.wait(0.0)

    def wait(self, timeout_s: float) -> None:
        """Wait up to *timeout_s* for a copy to finish, and take in what has.

        Taking in ends after `TAKING_IN_S`; the rest stays for the next call, which does not wait.
        """
        until: float | None = None

        def goes_on() -> bool:
            nonlocal until
            now = self._clock()
            until = now + TAKING_IN_S if until is None else until  # the wait for the first does not count
            return now < until

        self._transfers.poll(0.0 if self._promoter.could_start_more else timeout_s, goes_on)
        self._promoter.pump(self._window.num_blocks)
        self.residency.take_in_lost()
        self._pins.pump()

    def allocate(self, num_slots: Sequence[int]) -> Tables | None:
        """Lease that many device slots of each group, for blocks about to be computed; None if one has too few.

        Evicts the oldest blocks that have a copy below; one without a copy that has to go is dropped and counted.
        Never waits for a copy.
        """
        self.residency.take_in_lost()
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

        *tables* are the request's own: where another slot has a block of that name already, its bytes are equal, and
        the table gets that slot. So everything in the order of eviction is in one chain, and a prefix outlives
        what continues it. *boundaries*: where later prompts may resume, see `Retention.kept`.
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
        """Offer a request's last block, which is not full, to later requests, which copy it. Call it before `release`.

        So the next turn of a chat finds all that was computed, as long as it is on the device: such a block is not
        spilled. A request that goes on from all of its tokens offers a longer one at its end; this one is forgotten.
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
        """End the leases on blocks that no token after *num_tokens* reads (sliding windows, chunks), in place."""
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
        """End a request's leases, the prefix's tail first, so that the tail is evicted first."""
        for group, table in zip(self._group_tiers, tables, strict=True):
            slots = _ids(table)[::-1]
            leased = slots[slots != NO_SLOT]
            group.num_held -= len(leased)
            group.pool.release(leased)

    def spill(self) -> None:
        """Keep the device's oldest blocks copied to host memory, as far ahead as the measured speeds ask for, and what
        is in host memory copied to disk. The other blocks follow while no promotion is under way, if that is wanted.
        To be called after each step, and now and then while there is none."""
        now = self._clock()
        for group in self._group_tiers:
            group.slots.ages.look(group.slots.num_evicted, now)
        if self._is_spilled:
            self._spill()
            if self._copies_all_down and not any(self._demand) and not self._promoter.num_waiting:
                self._host_spill.copy_rest_down()
            self._demand = self._nothing

    def flush(self, timeout_s: float, progress: Callable[[int], None] = lambda num_left: None) -> int:
        """Copy every block that no request leases down to disk, so that a restart is warm; the number not copied.

        Waits, up to *timeout_s*, and not for copies that hang, nor for host slots that nobody gives back. *progress*
        gets the number of blocks still to go. Without a disk there is nothing to do.
        """
        below = self.lower.spill_progress()
        if not below.has_target:
            return 0
        began_at = self._clock()
        deadline = began_at + timeout_s
        everything = [group.pool.num_slots for group in self._group_tiers]
        # Each block goes once: a disk smaller than what is above would otherwise push out what was just written.
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
            self.lower.spill()
            self._host_spill.spill(everything)
            if self._transfers.in_flight:
                self.wait(0.05)
            else:
                time.sleep(0.01)  # a lane that failed is being left alone for a while
                self.poll()
            below = self.lower.spill_progress()
        while self._host_spill.copies.batches or below.is_busy:
            if self._clock() >= deadline or self._hangs_since(began_at, below):
                break
            self.wait(0.05)
            below = self.lower.spill_progress()
        return num_left

    def junction(self, hit: Hit) -> int | None:
        """Tokens of the prompt, more than the hit's, after which only groups that forget lack blocks; None if none.

        Such a prefix has come a second time, so the forgetting groups' blocks at its end are worth keeping.
        """

        def first_hole(group_id: int, start: int, end: int) -> int:
            group = self._group_tiers[group_id]
            return start + self.residency.locate(group, group.names_in(hit.chain, range(start, end))).num_found

        if self._retention.interval_tokens is None or len(self.groups) == 1:
            return None  # every block is kept anyway
        num_tokens = longest_single(hit.limit, self.groups, first_hole)
        return num_tokens if num_tokens > hit.num_tokens else None

    def where(self, chain: BlockChain) -> list[Tier | None]:
        """For each name the coldest tier from which a group would get its block; None if no tier has some group's."""
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
        """For each group, how many of the hit's blocks are in device slots that requests lease already."""
        slots = self._hits.device_slots(hit)
        return [g.pool.num_leased(found[found != ABSENT]) for g, found in zip(self._group_tiers, slots, strict=True)]

    def no_hit(self, chain: BlockChain, num_tokens: int) -> Hit:
        """The hit of a request that does not want to read the cache."""
        limit = self._limit(chain, num_tokens)
        return Hit(chain, limit, 0, Misses(((limit, Reason.SKIPPED),)))

    def worth_loading(self, hit: Hit, num_tokens: int, busy_s: float = 0.0) -> Hit:
        """As much of the hit as is faster loaded than computed, for a prompt of *num_tokens*.

        *busy_s*: how long the device will be computing for other requests first. The request begins a split hit
        (`Hit.start`) with what is `on_device` of it; promoting the hit brings the rest. Changes nothing.
        """
        return hit if self._planner is None else self._planned(hit, num_tokens, busy_s, self._planner.best)

    def plan_load(self, hit: Hit, num_tokens: int, busy_s: float = 0.0) -> Hit:
        """`worth_loading`, for a request that goes by it: the plan is counted."""
        return hit if self._planner is None else self._planned(hit, num_tokens, busy_s, self._planner.choose)

    def load_seconds(self, hit: Hit, planner: LoadPlanner) -> float | None:
        """Seconds to bring all of the hit to the device, after what is queued; None while a lane's speed is unknown."""
        demand = self._hits.demand(hit, self.alignment)
        return 0.0 if demand is None else planner.load_seconds(demand, self._speeds)

    def loading_at_most(self, hit: Hit, num_tokens: int) -> Hit:
        """As much of the hit as can be had by loading at most *num_tokens* tokens from colder tiers."""
        limit = self._hits.on_device(hit).num_tokens + num_tokens
        if hit.num_tokens <= limit:
            return hit
        return replace(self._hits.shorter(hit, limit), misses=hit.misses.cut(hit.num_tokens, Reason.SKIPPED))

    def at_most(self, hit: Hit, num_tokens: int, reason: Reason) -> Hit:
        """As much of the hit as is within the first *num_tokens*; what else was found is computed for this *reason*."""
        num_found = hit.num_tokens + (0 if hit.partial is None else hit.partial.num_tokens)
        if num_found <= num_tokens:
            return hit
        shorter = self._hits.shorter(hit, num_tokens)
        return replace(shorter, partial=None, misses=hit.misses.cut(num_found, reason))

    def on_device(self, hit: Hit) -> Hit:
        """As much of the hit as is on the device. Promoting it is done at once."""
        return self._hits.on_device(hit)

    def computed(self, hit: Hit) -> range:
        """The places in the chain of the blocks that a split hit's request computes although they are cached."""
        return self._hits.computed(hit)

    def free_slots(self) -> list[int]:
        """For each group, how many device slots `allocate` could give now."""
        return [max(0, group.pool.num_free) for group in self._group_tiers]

    def num_to_come(self, promotion: Promotion) -> list[int]:
        """For each group, how many blocks of the promotion have no device slot yet; slots are reserved for them."""
        return self._promoter.num_to_come(promotion)

    def pin(self, chain: BlockChain, num_tokens: int, max_bytes: int | None = None, start: int = 0) -> Pin | None:
        """Keep the blocks that a prompt needs to go on after these tokens in host memory, until `unpin`; without those
        before token *start*, which another pin of the caller's keeps.

        Blocks that are there are leased now; blocks on disk or on the device only are copied there as soon as nothing
        more urgent is copied. None if all of them are more than *max_bytes*, by default `free_to_pin`. A caller that
        gives a number of its own answers for the sum of its pins.
        """
        whole = self.whole_tokens(chain, num_tokens)
        return self._pins.begin(chain, whole, self.free_to_pin if max_bytes is None else max_bytes, start)

    def whole_tokens(self, chain: BlockChain, num_tokens: int) -> int:
        """How many of the first *num_tokens* are in blocks of all groups that have a name, and so can be kept."""
        return min(num_tokens, len(chain.names) * self.block_size) // self.alignment * self.alignment

    def unpin(self, pin: Pin) -> None:
        """End the pin; a second time does nothing."""
        self._pins.end(pin)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that all pins take when they are whole."""
        return self._pins.num_bytes

    @property
    def pinnable_bytes(self) -> int:
        """Bytes that may be pinned: half of host memory. The other half is for blocks that come and go."""
        return self.lower.host_bytes // 2

    @property
    def free_to_pin(self) -> int:
        """Bytes that may still be pinned; below 0 while a caller has pinned more by a number of its own."""
        return self.pinnable_bytes - self._pins.num_bytes

    @property
    def knows_disk(self) -> bool:
        """Whether the blocks that were on disk at the start are all known; until then some of them are misses."""
        return self.lower.is_indexed

    @property
    def num_under_way(self) -> int:
        """Copies started and not taken in yet, on all routes."""
        return self._transfers.in_flight

    def purge(self, order: PurgeOrder) -> CachePurge:
        """An eviction that an operator asks for. Nothing has left yet: call its `go_on` until it is done.

        Device and host memory have blocks of one namespace: a caller that means another one leaves these tiers out.
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
        """Start copying down what has no copy below, leased or not, and what is in host memory and not on disk; how
        many blocks are left, those under way too. The rest in the next calls. Without anything below there is nothing
        to do."""
        if not self._is_spilled:
            return 0
        if not self._promoter.num_waiting:
            self._host_spill.copy_rest_down()
            self.lower.spill()
        return self._host_spill.num_uncopied + self.lower.spill_progress().num_left

    def reset(self) -> bool:
        """Forget every block in every tier, and end all pins; False, and nothing changed, while blocks are leased or
        under way, or if the store refuses.

        Waits for the store to delete this namespace's records.
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
        """Raise AssertionError if any two books disagree: pools, marks, leases, blocks under way."""
        for _ in self.checks():
            pass

    def checks(self) -> Iterator[str]:
        """The same in parts, each of which holds at any time: at each step what was found in order."""
        for group in self._group_tiers:
            group.slots.check()
            yield f"device, group {group.id}: {group.pool.num_named} blocks in {group.pool.num_slots} slots"
        self.residency.check_tails_first()
        yield "device: no block would be evicted before one that continues it"
        self.lower.check()
        yield "host memory and the index of the disk"
        self._promoter.check()
        yield f"promotions: {self._promoter.num_waiting} under way"
        for group in self._group_tiers:
            under_way = self._host_spill.copies.num_leases(group.pool) + self._promoter.num_leases(group)
            expected = under_way + group.num_held + self._promoter.num_waiting_leases(group)
            assert group.pool.num_leases == expected, f"device: {group.pool.num_leases} leases, not {expected}"
            yield f"device, group {group.id}: {expected} leases"

    def statistics(self) -> CacheStatistics:
        """Everything counted, by value."""
        lower = self.lower.statistics()
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
        """End the lanes and give up the host memory. `flush` first if the disk should have everything.

        False if a copy hangs: then the memory stays, and the store must not be closed under it.
        """
        if not self._transfers.close():
            return False
        for group in self._group_tiers:
            group.memory.close()
        return True

    def _is_worth_asking(self, num_found: int, num_tokens: int) -> bool:
        """Whether the rest of a prompt takes longer to compute than a remote tier takes to say what it has of it."""
        if self._planner is None or not self._planner.prefill.is_known:
            return True
        compute_s = self._planner.compute_seconds(num_found, num_tokens - num_found)
        return compute_s > self.lower.read_speed(Tier.REMOTE).latency_s

    def _planned(
        self,
        hit: Hit,
        num_tokens: int,
        busy_s: float,
        choose: Callable[[Demand, int, float, LoadSpeeds], Plan],
    ) -> Hit:
        """As much of the hit as *choose* says, which is the planner's."""
        demand = self._hits.demand(hit, self.alignment)
        if demand is None:
            return hit
        plan = choose(demand, num_tokens, busy_s, self._speeds)
        if plan.end == hit.num_tokens:
            return replace(hit, start=plan.start) if plan.start else hit
        return replace(self._hits.shorter(hit, plan.end), misses=hit.misses.cut(hit.num_tokens, Reason.COST))

    def _spill(self) -> None:
        """Start copies down that are due. While a promotion wants room or is under way, nothing is written to disk that
        need not be."""
        self._host_spill.spill(self._demand)
        if any(self._demand) or self._promoter.num_waiting:
            self.lower.make_room()
        else:
            self.lower.spill()

    def _limit(self, chain: BlockChain, num_tokens: int) -> int:
        limit = min(max(0, num_tokens - 1), len(chain.names) * self.block_size)
        return limit // self.alignment * self.alignment

    def _partial_hit(self, chain: BlockChain, num_found: int, num_tokens: int) -> PartialHit | None:
        """The device block that goes on with most of the prompt's tokens after the hit, if all groups have it."""
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
        """Name the blocks of *table* from *start* on, in these slots, or use the slots that have them already."""
        pool = group.pool
        # The chain's own list makes one run of a request. Not where a group forgets: two blocks of a window would keep
        # all the names of a long prompt.
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
        """How many of that many device slots could not be taken now without dropping a block's last copy."""
        num_slots += group.pool.num_reserved  # which promotions take before
        horizon = max(0, num_slots - group.pool.num_blank) + self._window.num_blocks
        return max(0, num_slots - group.slots.num_clean(horizon, besides))

    @property
    def _speeds(self) -> LoadSpeeds:
        return {
            Route.DISK_TO_HOST: self.lower.read_speed(Tier.DISK),
            Route.REMOTE_TO_HOST: self.lower.read_speed(Tier.REMOTE),
            Route.HOST_TO_DEVICE: self._transfers.speed(Route.HOST_TO_DEVICE),
        }

    def _hangs_since(self, began_at: float, below: SpillProgress) -> bool:
        """Whether copies down are under way and hang: none has ended for `HUNG_S`, nor since *began_at*."""
        copies = self._host_spill.copies
        ended_at = [copies.ended_at] * bool(copies.batches) + [below.ended_at] * below.is_busy
        return bool(ended_at) and max(began_at, *ended_at) < self._clock() - HUNG_S

    def _hand_over(self, promotion: Promotion) -> None:
        """Count the leases of a promotion that is done as the caller's."""
        for group, table in zip(self._group_tiers, promotion.tables, strict=True):
            group.num_held += int(np.count_nonzero(np.array(table, np.int32) != NO_SLOT))


def _ids(slots: Table) -> Ids:
    return np.array(slots, np.intp)
