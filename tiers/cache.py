"""TieredCache: one prefix cache over the device, host, disk and remote tiers. The entry point of this package."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from kvtier.tiers.computed_prefixes import ComputedPrefixes
from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.device.slot_purge import SlotPurge
from kvtier.tiers.down.drain import Drain
from kvtier.tiers.down.host_spill import HostSpill
from kvtier.tiers.lookups import Lookups
from kvtier.tiers.lower.copies import CleanAhead
from kvtier.tiers.lower.local_purge import limit_per_group
from kvtier.tiers.lower.lower_tiers import Deletion, LowerTiers
from kvtier.tiers.lower.purge import PurgeOrder
from kvtier.tiers.lower.spill_log import SpillLog
from kvtier.tiers.lower.statistics import CacheStatistics, slot_statistics
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.naming.events import EventLog
from kvtier.tiers.naming.groups import AttentionGroup, name_block_size, state_groups
from kvtier.tiers.naming.retention import Retention
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.tiers.pins import Pins
from kvtier.tiers.purge import CachePurge
from kvtier.tiers.residency import GroupTiers, Residency
from kvtier.tiers.up.hit_plans import HitPlans
from kvtier.tiers.up.load_planner import LoadPlanner
from kvtier.tiers.up.promoter import Promoter
from kvtier.tiers.up.promotion import NO_SLOT, Hit, Promotion, Table, Tables
from kvtier.transfer.block_memory import BlockMemory
from kvtier.transfer.transfer_engine import TransferEngine

TAKING_IN_S = 0.0003  # time limit for processing finished copies in a poll, after the first batch


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Settings of a `TieredCache`."""

    retention_tokens: int | None = None  # see `Retention`
    partial_blocks: bool = True  # whether to reuse a part of a block if only its first tokens match
    by_layers: bool = False  # whether host blocks may be loaded layer by layer (`Promotion.gate`)
    # At least this many of the blocks to be evicted next are kept clean (copied to a lower tier). The number is higher
    # if more are allocated during one copy. The default is one prefill chunk's worth of blocks.
    min_clean_ahead: int = 32
    # Whether to spill every block soon after it was computed, for other users of the lower tiers, instead of shortly
    # before its slot is needed.
    copies_all_down: bool = False


class TieredCache:
    """A prefix cache over all tiers: finds the longest cached prefix, promotes it to the device, and spills old blocks.

    For each request, the engine calls `lookup`, `promote`, and `poll` until the promotion is done. It calls `allocate`
    and `commit` while the request computes, and finally `release`. A failed, late or corrupt copy leads to a shorter
    prefix, never to an exception. One thread owns the cache. Only `wait`, `close` and `Drain.flush` wait for copies.

    A block is *leased* while requests use it, and then *free*. `commit` gives it a *name*, by which lookups find it. It
    is *dirty* until it has been copied to a lower tier, and *clean* from then on. The life of a block in its slot:

        allocate          commit               release                     slot needed
        blank ----> computing ----> leased, named ----> free, named -------------------> gone, if nothing below has it
                                    ^                    |                            |
                                    |                    | spill (copied down)        | if it was spilled
                                    |                    v                            v
                                    +--- promote --- free, named, clean ----------> found below: host, disk, remote
                                    ^                                                 |
                                    +------------------ promote (copied up) ----------+

    Four attributes offer further operations: `lookups` (what is cached where), `plans` (how much of a hit to load),
    `pins` (prefixes kept in host memory) and `drain` (copies before the process ends).

    An attention group is the set of layers that share one kind of attention and one block table. Each group has its own
    block memory and block size. A block's name is the hash of its prompt up to the end of the block. Names are computed
    after every `block_size` tokens of a prompt. The block size of each group is a multiple of this number.
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

        *memories* are the device and host memory of each group; *lower* uses the same host memory. *events* records
        blocks that enter or leave the device. *planner* decides what is worth loading (None: everything). *spills*
        records which blocks were copied from the device to host memory, and which were evicted without a copy.
        """
        self.groups = tuple(groups)
        self.block_size = name_block_size(groups)
        self.lower = lower
        self.residency = Residency(groups, memories, lower, options.partial_blocks, events, clock, spills)
        self._group_tiers = self.residency.groups
        self._forgetting = [group for group in self._group_tiers if group.attention.forgets]
        self._transfers = transfers
        self._clock = clock
        self._retention = Retention(self.groups, options.retention_tokens)
        self._windows = _windows([memory.num_device_slots for memory in memories], options.min_clean_ahead, clock)
        self._host_spill = HostSpill(self.residency, transfers, self._windows, clock)
        self._promoter = Promoter(self.residency, transfers, self._windows, clock, options.by_layers)
        self._hits = self._promoter.hits
        knows_prefixes = options.retention_tokens is None or not all(group.forgets for group in groups)
        self._computed = None if knows_prefixes else ComputedPrefixes()
        self.lookups = Lookups(groups, self.residency, self._retention, planner, self._computed)
        self.plans = HitPlans(self._group_tiers, self._hits, lower, transfers, planner)
        self.pins = Pins(self.residency, self._host_spill, clock)
        self.drain = Drain(
            self._group_tiers,
            self._host_spill,
            lower,
            transfers,
            self.wait,
            lambda: bool(self._promoter.num_waiting),
            clock,
        )
        self._is_spilled = all(lower.status.num_slots)
        self._copies_all_down = options.copies_all_down
        self._nothing = [0 for _ in groups]
        self._demand = self._nothing  # by group: number of device slots that the hit given to `make_room` will use

    def lookup(self, chain: BlockChain, num_tokens: int) -> Hit:
        """Return the longest cached prefix of a prompt of *num_tokens* tokens; see `Lookups.lookup`."""
        return self.lookups.lookup(chain, num_tokens)

    def make_room(self, hit: Hit) -> bool:
        """Start spilling the dirty blocks that loading the hit would evict, and return whether to promote the hit now.

        Returns False if the caller should wait for these spills: call this method again after a `poll`. Promoting the
        hit without waiting is allowed, but loses the dirty blocks, because they have no other copy.
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
            # Right after the promotion, the request allocates slots for the tokens that it computes. A spill started
            # only then would be too late. Once the hit's own blocks are leased, there may be no other clean blocks.
            soon = min(self._windows[group.id].depth, -(-rest_tokens // group.block_size) + 1)
            takes = missing or len(resident)
            short.append(max(self._lacking(group, n, resident) for n in (now, now + soon)) if takes else 0)
        if not any(short):
            return True
        self._promoter.keep_warm(hit)
        self._demand = demand
        self._spill()
        # Writes to disk, which make room in host memory, delay only hits that must be loaded.
        return not self._host_spill.is_making_progress and (is_on_device or not self.lower.status.is_making_room)

    def promote(self, hit: Hit, timeout_s: float | None = None) -> Promotion:
        """Lease the hit's blocks that are on the device, and start to load the others. Does not wait for them.

        Call `poll` until the promotion is `done`. After *timeout_s* (None: no limit), the promotion ends with the part
        of the prefix that has been loaded so far.
        """
        deadline = None if timeout_s is None else self._clock() + timeout_s
        return self._promoter.promote(hit, deadline)

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
        """Wait up to *timeout_s* for a transfer to finish, and process finished transfers.

        Processing stops after about `TAKING_IN_S` seconds. The next call processes the remaining transfers.
        """
        until: float | None = None

        def should_continue() -> bool:
            nonlocal until
            now = self._clock()
            until = now + TAKING_IN_S if until is None else until  # measured from the first transfer, without the wait
            return now < until

        self._transfers.poll(0.0 if self._promoter.could_start_more else timeout_s, should_continue)
        self._promoter.pump()
        self.residency.process_lost()
        self.residency.remember_cleared()
        self.pins.pump()

    def allocate(self, num_slots: Sequence[int]) -> Tables | None:
        """Lease *num_slots* device slots of each group for new blocks; return None if a group has too few.

        Evicts the oldest clean blocks first. If too few blocks are clean, evicts dirty blocks as well; these are lost,
        and counted in the statistics. Never waits for a copy.
        """
        self.residency.process_lost()
        for wanted, group in zip(num_slots, self._group_tiers, strict=True):
            if wanted > group.pool.num_free:
                return None
        tables: Tables = []
        for wanted, group in zip(num_slots, self._group_tiers, strict=True):
            window = self._windows[group.id]
            table = group.slots.take(wanted, window.num_blocks if group.slots.dirty else 0)
            assert table is not None, "fewer free slots than a moment ago"
            tables.append(table)
            group.num_held += wanted
            window.on_allocated(wanted)
        return tables

    def chunk_end(self, num_computed: int, boundaries: Sequence[int]) -> int | None:
        """Return the position that a chunk after *num_computed* tokens should not pass; see `Retention.next_end`."""
        return self._retention.next_end(num_computed, boundaries)

    def commit(self, tables: Tables, chain: BlockChain, start: int, end: int, boundaries: Sequence[int] = ()) -> None:
        """Name a request's full blocks within its computed tokens *start* to *end*, so that lookups find them.

        *tables* are the request's block tables. If another slot already holds a block of the same name, the two blocks
        have the same content, so the table is changed to refer to that slot. *boundaries* are the token positions where
        later prompts may resume; see `Retention.kept`.
        """
        if self._computed is not None:
            self._computed.add(chain.names[start // self.block_size : end // self.block_size])
        for group, table in zip(self._group_tiers, tables, strict=True):
            first, last = start // group.block_size, end // group.block_size
            if not group.attention.forgets:
                if first < last:
                    slots = np.frombuffer(table[first:last], np.int32).astype(np.intp)
                    self.residency.commit_run(group, table, chain, first, slots)
                continue
            for blocks in self._retention.kept(group.attention, first, last, boundaries):
                slots = np.array(table[blocks.start : blocks.stop], np.intp)
                if (slots != NO_SLOT).all():
                    self.residency.commit_run(group, table, chain, blocks.start, slots)
                    continue
                for place in np.flatnonzero(slots != NO_SLOT).tolist():
                    self.residency.commit_run(group, table, chain, blocks.start + place, slots[place : place + 1])

    def commit_state(self, tables: Tables, chain: BlockChain, num_computed: int) -> None:
        """Name the recurrent states of a request at the end of its last full block. Call this before `release`.

        The next turn of a chat can then resume there, after most of the answer, even if `commit` names few states. The
        request must have committed *num_computed* tokens.
        """
        for group, table in zip(self._group_tiers, tables, strict=True):
            block_id = num_computed // group.block_size - 1
            if not group.attention.keeps_states or not 0 <= block_id < len(table):
                continue
            if (slot := table[block_id]) != NO_SLOT and group.pool.name(slot) is None:
                self.residency.commit_run(group, table, chain, block_id, np.array([slot], np.intp))

    def commit_tail(self, tables: Tables, chain: BlockChain, num_computed: int) -> None:
        """Make a request's last, partial block available to later requests, which copy it. Call this before `release`.

        The next turn of a chat can then reuse all computed tokens, as long as the block is on the device. Partial
        blocks are not spilled. Once a request has copied all tokens of a partial block, the original is evicted unless
        it is in use.
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
        """Release the blocks that no token after the first *num_tokens* attends to, and clear them in *tables*.

        Only groups with limited attention have such blocks, for example groups with a sliding window. A recurrent state
        at the end of the last full block stays leased, because `commit_state` may name it.
        """
        for group in self._forgetting:
            table = tables[group.id]
            passed = []
            for block_id in _leased_before(table, group.attention, num_tokens):
                passed.append(table[block_id])
                table[block_id] = NO_SLOT
            group.num_held -= len(passed)
            group.pool.release(passed)

    def release(self, tables: Tables) -> None:
        """Release a request's leases, those of its last blocks first, so that these blocks are evicted first."""
        for group, table in zip(self._group_tiers, tables, strict=True):
            slots = np.array(table, np.intp)[::-1]
            leased = slots[slots != NO_SLOT]
            group.num_held -= len(leased)
            group.pool.release(leased)

    def spill(self) -> None:
        """Start the copies that are due, from the device to host memory and from there to disk.

        Device blocks are due shortly before they are evicted; how early depends on the measured speeds. With
        `CacheOptions.copies_all_down`, the other blocks are copied too while no promotion is in flight. Call this after
        each engine step, and from time to time while the engine is idle.
        """
        now = self._clock()
        for group in self._group_tiers:
            group.slots.ages.look(group.slots.num_evicted, now)
        if self._is_spilled:
            self._spill()
            if self._copies_all_down and not any(self._demand) and not self._promoter.num_waiting:
                self._host_spill.spill_all()
            self._demand = self._nothing

    def free_slots(self) -> list[int]:
        """Return for each attention group how many device slots `allocate` could lease now."""
        return [max(0, group.pool.num_free) for group in self._group_tiers]

    def num_to_come(self, promotion: Promotion) -> list[int]:
        """Return for each group how many of the promotion's blocks have not started to load yet."""
        return self._promoter.num_to_come(promotion)

    @property
    def num_in_flight(self) -> int:
        """Number of copies in flight between all tiers."""
        return self._transfers.in_flight

    @property
    def deletion(self) -> Deletion:
        """State of the deletion of disk records that the last `reset` has started."""
        return self.lower.status.clearing.deletion

    def purge(self, order: PurgeOrder) -> CachePurge:
        """Prepare to evict the blocks that an operator's *order* selects. Call `go_on` of the result until it is done.

        The blocks in device and host memory all belong to this cache's namespace, and are purged whatever namespace
        *order* names. So an order for another namespace must not include these two tiers.
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

    def reset(self) -> bool:
        """Evict all blocks from all tiers and end all pins, in one short step.

        Later lookups find none of these blocks. Later polls delete their records on disk. A process that starts before
        `deletion` is `DONE` would still find some of these records.

        Returns False if any block is leased or in flight, or if the disk is known to fail. Then nothing is evicted.
        """
        if (
            any(group.num_held for group in self._group_tiers)
            or self._promoter.num_waiting
            or self._transfers.in_flight > self.lower.status.clearing.num_in_flight
        ):
            return False
        if not self.lower.clear():
            return False
        self.pins.end_all()
        self.residency.clear()
        return True

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping of slots, dirty blocks, leases or copies is inconsistent."""
        for _ in self.checks():
            pass

    def checks(self) -> Iterator[str]:
        """Run `check` in parts, and yield a description after each part. Other calls may come between two parts."""
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
        device = slot_statistics(
            [group.slots for group in groups], [group.memory.block_bytes for group in groups], state_groups(self.groups)
        )
        return CacheStatistics(
            {Tier.DEVICE: device, **lower.tiers},
            self._transfers.statistics(),
            max(window.num_blocks for window in self._windows),
            lower.disk,
            lower.remote,
            lower.admission,
            lower.host_tenants,
        )

    def close(self) -> bool:
        """End the copy threads and release the host memory. Call `Drain.flush` first to save all blocks.

        Returns False if a copy hangs. Then the memory is not released, and the store must not be closed.
        """
        if not self._transfers.close():
            return False
        for group in self._group_tiers:
            group.memory.close()
        return True

    def _spill(self) -> None:
        """Start the spills that are due.

        While a promotion needs room or is in flight, disk writes are started only to free host slots.
        """
        self._host_spill.spill(self._demand)
        if any(self._demand) or self._promoter.num_waiting:
            self.lower.hints.make_room()
        else:
            self.lower.hints.spill()

    def _lacking(self, group: GroupTiers, num_slots: int, besides: npt.NDArray[np.int32]) -> int:
        """Return how many of *num_slots* device slots could be taken now only by evicting dirty blocks.

        The slots in *besides* are about to be leased, so they do not count as available.
        """
        num_slots += group.pool.num_reserved  # promotions take their reserved slots first
        horizon = max(0, num_slots - group.pool.num_blank) + self._windows[group.id].num_blocks
        return max(0, num_slots - group.slots.num_clean(horizon, besides))


def _leased_before(table: Table, attention: AttentionGroup, num_tokens: int) -> list[int]:
    """Return the blocks with a slot to release after *num_tokens* tokens, the last ones first; see `forget_read`."""
    if not attention.keeps_states:
        end = min(attention.first_needed(num_tokens), len(table))
        return list(takewhile(lambda block_id: table[block_id] != NO_SLOT, range(end - 1, -1, -1)))
    end = min(num_tokens // attention.block_size - 1, len(table))
    if end <= 0:
        return []
    # Only blocks at the ends of chunks have slots, so the search cannot stop at the first block without one.
    found: list[int] = np.flatnonzero(np.frombuffer(table, np.int32)[:end] != NO_SLOT)[::-1].tolist()
    return found


def _windows(num_slots: Sequence[int], min_clean_ahead: int, clock: Callable[[], float]) -> list[CleanAhead]:
    """Return the window of each group, given the number of its device slots.

    A window is the part of the eviction order, from its front, that is kept clean. Within the window, evictions skip
    dirty blocks; beyond it, they follow the order strictly. So it is at most a quarter of the pool. Pools with fewer
    slots than the largest one have shorter windows, because fewer of their slots are allocated.
    """
    largest = max(num_slots)
    return [CleanAhead(-(-min_clean_ahead * count // largest), max(1, count // 4), clock) for count in num_slots]
