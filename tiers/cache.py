"""TieredCache: device, host and disk as one prefix cache. Start here."""

import time
from collections.abc import Callable, Sequence

from kvtier.tiers.block_hash import BlockName
from kvtier.tiers.block_pool import BlockPool
from kvtier.tiers.clean_ahead import CleanAhead
from kvtier.tiers.disk_tier import DiskTier
from kvtier.tiers.groups import AttentionGroup, longest_hit
from kvtier.tiers.promoter import Promoter
from kvtier.tiers.promotion import NO_SLOT, Hit, Promotion
from kvtier.tiers.residency import Residency, SlotTier
from kvtier.tiers.spiller import Spiller
from kvtier.tiers.statistics import CacheStatistics, TierStatistics
from kvtier.tiers.tier import Reason, Tier
from kvtier.transfer.block_memory import BlockMemory
from kvtier.transfer.transfer_engine import Route, TransferEngine

LEAST_CLEAN_AHEAD = 32  # blocks; one prefill chunk's worth before anything has been measured
MAX_FAILURES = 3  # writes in a row, after which a flush gives up
Tables = list[list[int]]  # [group][block] -> device slot, or NO_SLOT


class TieredCache:
    """Which block is where, what goes down, what comes up.

    One thread owns it; no method waits for a copy except `wait` and `flush`. A request's life here: `lookup`,
    `promote`, `poll` until the promotion is done, `allocate` and `commit` as it computes, `release`. A failed, late or
    corrupt copy is a shorter prefix, never an exception. The bytes are the *memories*', one for each group.
    """

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        memories: Sequence[BlockMemory],
        transfers: TransferEngine,
        disk: DiskTier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.groups = tuple(groups)
        self.block_size = groups[0].block_size
        self._memories = memories
        self._transfers = transfers
        self._clock = clock
        device = SlotTier(Tier.DEVICE, [BlockPool(memory.num_device_slots) for memory in memories])
        with_host = all(memory.num_host_slots for memory in memories)
        host = SlotTier(Tier.HOST, [BlockPool(memory.num_host_slots) for memory in memories]) if with_host else None
        if disk is not None and host is None:
            raise ValueError(
                "disk tier: needs a host tier to land in; give the host some capacity or leave out the disk"
            )
        self._residency = Residency(device, host, disk)
        # At most a quarter of the pool: within the window dirty blocks are skipped, beyond it the order is strict.
        most = max(1, min(memory.num_device_slots for memory in memories) // 4)
        self._window = CleanAhead(LEAST_CLEAN_AHEAD, most, clock)
        self._spiller = Spiller(self._residency, memories, transfers, self._window, clock)
        self._promoter = Promoter(self.groups, self._residency, memories, transfers, clock, self._hand_over)
        # For the promotion that wants room, by group: how many device blocks it reaches, and how many are dirty.
        self._wanted, self._short = [0 for _ in groups], [0 for _ in groups]
        self._num_held = [0 for _ in groups]  # leases that callers hold, by group

    def lookup(self, names: Sequence[BlockName], num_tokens: int) -> Hit:
        """The longest prefix of the prompt that can be resumed, over all tiers at once. Pure; nothing is leased.

        *names* are those of the prompt's full blocks, *num_tokens* its length. The last token is always left to
        compute, so the hit ends at *num_tokens* - 1 at the latest.
        """
        names = names[: max(0, num_tokens - 1) // self.block_size]

        def holds(group_id: int, block_id: int) -> bool:
            return self._residency.tier_of(group_id, names[block_id]) is not None

        num_blocks = longest_hit(len(names), self.groups, holds)
        if num_blocks == len(names):
            return Hit(names, num_blocks, Reason.LAST_BLOCK)
        return Hit(names, num_blocks, self._residency.why_missing(names[num_blocks]))

    def where(self, names: Sequence[BlockName]) -> list[Tier | None]:
        """For each block the coldest tier that a group must fetch it from; None if some group has it nowhere."""
        result: list[Tier | None] = []
        for name in names:
            tiers = [self._residency.tier_of(group_id, name) for group_id in range(len(self.groups))]
            found = [tier for tier in tiers if tier is not None]
            result.append(max(found, key=lambda tier: tier.depth) if len(found) == len(tiers) else None)
        return result

    def num_leased(self, hit: Hit) -> list[int]:
        """For each group, how many of the hit's blocks are in device slots that somebody leases already."""
        counts = []
        for pool, group in zip(self._residency.device.pools, self.groups, strict=True):
            needed = hit.names[group.first_needed(hit.num_blocks * self.block_size) : hit.num_blocks]
            slots = [slot for name in needed if (slot := pool.find(name)) is not None]
            counts.append(sum(not pool.is_free(slot) for slot in slots))
        return counts

    def no_hit(self, names: Sequence[BlockName]) -> Hit:
        """The hit of a request that does not want to read the cache."""
        return Hit(names, 0, Reason.SKIPPED)

    def make_room(self, hit: Hit) -> bool:
        """Whether promoting the hit would now push out no block without a copy below; if not, such copies are started.

        Also True when nothing more can be done about it. Ask again after a `poll`; promoting without asking is
        allowed, and drops what is in the way.
        """
        device, window = self._residency.device, self._window.num_blocks
        demand, short = [], []
        for group_id, (resident, missing) in enumerate(self._promoter.resident_and_missing(hit)):
            demand.append(missing + len(resident))  # the hit's own blocks may be among the oldest
            clean = 0
            if missing:
                clean = self._residency.num_clean(device, group_id, demand[-1] + window, besides=resident)
            short.append(max(0, missing - clean))
        if not any(short):
            return True
        self._promoter.keep_warm(hit)
        self._wanted, self._short = demand, short
        self._spill()
        return not self._spiller.is_moving()

    def promote(self, hit: Hit, timeout_s: float | None = None) -> Promotion:
        """Bring the hit's blocks up to the device: lease what is there, copy the rest. Returns at once.

        The promotion is `done` now or after some `poll`. After *timeout_s* it is done with what has arrived.
        """
        deadline = None if timeout_s is None else self._clock() + timeout_s
        return self._promoter.promote(hit, self._window.num_blocks, deadline)

    def cancel(self, promotion: Promotion) -> None:
        """End a promotion that nobody waits for any more, with all its leases."""
        if not promotion.done:
            self._promoter.give_up(promotion, Reason.DEADLINE)
        self.release(promotion.tables)

    def free_slots(self) -> list[int]:
        """For each group, how many device slots `allocate` could give now."""
        return [pool.num_free for pool in self._residency.device.pools]

    def poll(self) -> None:
        """Take in what the lanes have finished: publish blocks, finish promotions, go on with queued copies."""
        self.wait(0.0)

    def wait(self, timeout_s: float) -> None:
        """Like `poll`, but wait up to *timeout_s* for a copy to finish."""
        self._transfers.poll(timeout_s)
        self._promoter.pump(self._window.num_blocks)

    def allocate(self, num_slots: Sequence[int]) -> Tables | None:
        """Lease that many device slots of each group, for blocks about to be computed; None if one has too few.

        Evicts the oldest blocks that have a copy below; a dirty one that has to go is dropped and counted. Never
        waits for a copy.
        """
        pools = self._residency.device.pools
        if any(wanted > pool.num_free for wanted, pool in zip(num_slots, pools, strict=True)):
            return None
        tables: Tables = []
        for group_id, wanted in enumerate(num_slots):
            slots = self._residency.take(self._residency.device, group_id, wanted, self._window.num_blocks)
            assert slots is not None, "fewer free slots than a moment ago"
            tables.append(slots)
            self._num_held[group_id] += wanted
        self._window.allocated(max(num_slots))
        return tables

    def commit(self, tables: Tables, names: Sequence[BlockName], start: int, end: int) -> None:
        """Name the computed blocks *start* to *end* of a request, so that they can be found.

        A block whose name another slot has already stays unnamed: its bytes are equal, one copy is enough.
        """
        for group_id, (pool, table) in enumerate(zip(self._residency.device.pools, tables, strict=True)):
            for block_id in range(start, end):
                slot = table[block_id]
                if slot == NO_SLOT or pool.name(slot) is not None:
                    continue
                if pool.commit(slot, names[block_id]):
                    self._residency.device.dirty[group_id][slot] = None

    def release(self, tables: Tables) -> None:
        """End a request's leases, the prefix's tail first, so that the tail is evicted first."""
        for group_id, (pool, table) in enumerate(zip(self._residency.device.pools, tables, strict=True)):
            leased = [slot for slot in reversed(table) if slot != NO_SLOT]
            self._num_held[group_id] -= len(leased)
            pool.release(leased)

    def forget_read(self, tables: Tables, num_tokens: int) -> None:
        """End the leases on blocks that no token after *num_tokens* reads (sliding windows, chunks), in place."""
        for group_id, (group, table) in enumerate(zip(self.groups, tables, strict=True)):
            passed = []
            for block_id in range(min(group.first_needed(num_tokens), len(table)) - 1, -1, -1):
                if table[block_id] == NO_SLOT:
                    break
                passed.append(table[block_id])
                table[block_id] = NO_SLOT
            self._num_held[group_id] -= len(passed)
            self._residency.device.pools[group_id].release(passed)

    def spill(self) -> None:
        """Keep the device's oldest blocks copied to host memory, as far ahead as the measured speeds ask for, and what
        is in host memory copied to disk."""
        self._spill()
        self._wanted, self._short = [0 for _ in self.groups], [0 for _ in self.groups]

    def flush(self, timeout_s: float, progress: Callable[[int], None] = lambda num_left: None) -> int:
        """Copy every block that is nobody's lease down to disk, so that a restart is warm; the number left over.

        Waits, up to *timeout_s*. *progress* gets the number of blocks still to go. Without a disk there is nothing
        to do.
        """
        deadline = self._clock() + timeout_s
        everything = [memory.num_device_slots for memory in self._memories]
        # Each block goes once: a disk smaller than what is above would otherwise push out what was just written.
        stop_at = self._spiller.num_stored + self._spiller.num_dirty()
        while (num_left := self._spiller.num_dirty()) and self._spiller.num_stored < stop_at:
            if self._clock() >= deadline or self._spiller.num_failed_in_a_row[Route.HOST_TO_DISK] >= MAX_FAILURES:
                break
            progress(num_left)
            self._spiller.spill_host()
            self._spiller.spill_device(everything)
            if self._transfers.in_flight:
                self.wait(0.05)
            else:
                time.sleep(0.01)  # a lane that failed is being left alone for a while
        while self._transfers.in_flight and self._clock() < deadline:
            self.wait(0.05)
        return num_left

    def reset(self) -> bool:
        """Forget every block in every tier; False, and nothing changed, while blocks are leased or under way.

        Waits for the store to delete this namespace's records.
        """
        if any(self._num_held) or self._transfers.in_flight:
            return False
        for tier in self._slot_tiers():
            for group_id, pool in enumerate(tier.pools):
                pool.evict(pool.cached_slots())
                tier.dirty[group_id].clear()
        for digests in self._residency.digests:
            digests.clear()
        if self._residency.disk is not None:
            self._residency.disk.clear()
        return True

    @property
    def num_under_way(self) -> int:
        """Copies started and not taken in yet, on all routes."""
        return self._transfers.in_flight

    def check(self) -> None:
        """Raise AssertionError if any two books disagree: pools, marks, leases, blocks under way."""
        self._residency.check()
        self._promoter.check()
        for tier in self._slot_tiers():
            for group_id, pool in enumerate(tier.pools):
                expected = self._spiller.num_leases(tier, group_id) + self._promoter.num_leases(tier, group_id)
                if tier.tier is Tier.DEVICE:
                    expected += self._num_held[group_id] + self._promoter.num_waiting_leases(group_id)
                assert pool.num_leases == expected, f"{tier.tier}: {pool.num_leases} leases, {expected} accounted for"

    def statistics(self) -> CacheStatistics:
        """Everything counted, by value."""
        tiers = {tier.tier: self._slot_statistics(tier) for tier in self._slot_tiers()}
        if self._residency.disk is not None:
            tiers[Tier.DISK] = self._residency.disk.statistics()
        return CacheStatistics(tiers, self._transfers.statistics(), self._promoter.num_waiting, self._window.num_blocks)

    def close(self) -> bool:
        """End the lanes and give up the host memory. `flush` first if the disk should have everything.

        False if a copy hangs: then the memory stays, and the store must not be closed under it.
        """
        if not self._transfers.close():
            return False
        for memory in self._memories:
            memory.close()
        return True

    def _spill(self) -> None:
        self._spiller.spill_device(self._wanted)
        # Writing to disk yields to loads, unless it is what they wait for.
        is_quiet = not self._promoter.num_waiting and not any(self._short)
        if is_quiet or not self._spiller.host_is_roomy(self._short):
            self._spiller.spill_host()

    def _slot_tiers(self) -> list[SlotTier]:
        return [tier for tier in (self._residency.device, self._residency.host) if tier is not None]

    def _slot_statistics(self, tier: SlotTier) -> TierStatistics:
        block_bytes = [memory.block_bytes for memory in self._memories]
        return TierStatistics(
            num_blocks=sum(pool.num_named for pool in tier.pools),
            num_bytes=sum(pool.num_named * size for pool, size in zip(tier.pools, block_bytes, strict=True)),
            capacity_bytes=sum(pool.num_slots * size for pool, size in zip(tier.pools, block_bytes, strict=True)),
            num_evicted=tier.num_evicted,
            dropped_spills=tier.dropped_spills,
            corrupt=dict(tier.corrupt),
        )

    def _hand_over(self, promotion: Promotion) -> None:
        """A promotion is done: its leases are the caller's from here on."""
        for group_id, table in enumerate(promotion.tables):
            self._num_held[group_id] += sum(slot != NO_SLOT for slot in table)
