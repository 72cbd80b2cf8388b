"""Promoter: gives a hit device slots, has what is missing brought up, and tells who waits."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress

import numpy as np
import numpy.typing as npt

from kvtier.tiers.arrivals import Arrivals
from kvtier.tiers.block_hash import BlockChain, BlockName
from kvtier.tiers.block_pool import ABSENT
from kvtier.tiers.groups import AttentionGroup, longest_hit
from kvtier.tiers.landings import Landings
from kvtier.tiers.load_planner import Demand
from kvtier.tiers.promotion import COMPUTED, NO_SLOT, Arrival, Hit, Promotion
from kvtier.tiers.residency import Residency, SlotTier
from kvtier.tiers.tier import Reason, Tier
from kvtier.transfer.block_memory import BlockMemory
from kvtier.transfer.transfer_engine import Route, TransferEngine


class Promoter:
    """Leases every source, then takes destinations, then has them filled (`Arrivals`). Owned by the cache's thread."""

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        residency: Residency,
        memories: Sequence[BlockMemory],
        transfers: TransferEngine,
        clock: Callable[[], float],
        landings: Landings,
        hand_over: Callable[[Promotion], None],
        by_layers: bool,
    ) -> None:
        self._groups = groups
        self._residency = residency
        self._memories = memories
        self._transfers = transfers
        self._clock = clock
        self._hand_over = hand_over
        self._by_layers = by_layers
        self._landings = landings
        self._arrivals = Arrivals(groups, residency, memories, transfers, landings, self._resolved, clock)
        self._waiting: set[Promotion] = set()

    @property
    def num_waiting(self) -> int:
        """Promotions that are not done."""
        return len(self._waiting)

    def promote(self, hit: Hit, window: int, deadline: float | None = None) -> Promotion:
        """Start bringing the hit up; done at once if all of it is on the device."""
        is_out_of_date = hit.as_of != self._residency.num_changes and self._residency.disk is None
        if is_out_of_date or self._residency.is_cut_off:
            shorter = self.shorter(hit, hit.num_tokens)  # with a disk, what has left the tiers above is asked of it
            if shorter.num_tokens < hit.num_tokens:
                why = self._residency.why_missing([hit.chain.names[shorter.num_blocks]])
                shorter = replace(shorter, misses=hit.misses.cut(hit.num_tokens, why))
            hit = shorter
        slots = self._slots_from_start(hit)
        while (deficit := self._deficit(hit, slots)) > 0:
            misses = hit.misses.cut(hit.num_tokens, Reason.CAPACITY)
            hit = replace(self.shorter(hit, hit.num_tokens - deficit), misses=misses)
            slots = self._slots_from_start(hit)
        promotion = Promotion(
            hit.chain,
            hit.limit,
            hit.num_tokens,
            [array("i", [NO_SLOT]) * needed.start for needed in self.needed(hit.num_tokens, hit.start)],
            bytearray(hit.num_blocks),
            hit.misses,
            deadline,
            hit.start,
        )
        if hit.start:
            computed = range(self.on_device(hit).num_blocks, hit.start // hit.chain.block_size)
            promotion.depths[computed.start : computed.stop] = bytes([COMPUTED]) * len(computed)
        missing = self._lease_what_is_there(promotion, slots)
        self._copy_partial(promotion, hit, missing, window)
        started: list[Arrival] = []
        for group_id, blocks in enumerate(missing):
            taken = self._residency.take(self._residency.device, group_id, len(blocks), window) if blocks else []
            assert taken is not None, "a promotion was measured too short"
            for block_id, slot in zip(blocks, taken, strict=True):
                started.append(self._arrivals.start(hit.chain, group_id, block_id, slot))
                self._join(promotion, block_id, started[-1])
        if self._by_layers and not hit.start and started and len(started) == len(promotion.waiting):
            promotion.gate = self._arrivals.by_layers(started)
        if promotion.waiting:
            self._count_unneeded_with_next(promotion)
            self._waiting.add(promotion)
            self.pump(window)
        self._finish_if_arrived(promotion)
        return promotion

    def device_slots(self, hit: Hit) -> Sequence[npt.NDArray[np.int32]]:
        """For each group the device slots of the blocks that the hit needs, ABSENT for those further down."""
        if hit.as_of == self._residency.num_changes:
            return hit.device_slots
        return [
            pool.find_all(hit.chain.names_of(group.block_size, needed))
            for pool, group, needed in zip(
                self._residency.device.pools, self._groups, self.needed(hit.num_tokens), strict=True
            )
        ]

    def on_device(self, hit: Hit) -> Hit:
        """As much of the hit as is on the device."""
        starts = [
            absent[0][0] * group.block_size
            for group_id, (group, found, needed) in enumerate(
                zip(self._groups, self.device_slots(hit), self.needed(hit.num_tokens), strict=True)
            )
            if (absent := self._absent(group_id, hit.chain, needed, found))
        ]
        return self.shorter(replace(hit, start=0), min(starts, default=hit.num_tokens))

    def resident_and_missing(self, hit: Hit) -> list[tuple[set[int], int]]:
        """For each group: the device slots that the hit's blocks are in already, and how many slots it would take."""
        result = []
        slots = self.device_slots(hit)
        for group_id, (found, needed) in enumerate(zip(slots, self.needed(hit.num_tokens), strict=True)):
            absent = self._absent(group_id, hit.chain, needed, found)
            missing = sum(self._arrivals.find(group_id, name) is None for _, name in absent)
            result.append((set(found[found != ABSENT].tolist()), missing))
        return result

    def demand(self, hit: Hit, step: int) -> Demand | None:
        """What the hit's prefixes have to move, those that end at a multiple of *step* tokens; None if nothing.

        Where a group forgets, every prefix is taken to need as much of its blocks as the whole hit.
        """
        absent = [
            self._absent(group_id, hit.chain, needed, found)
            for group_id, (found, needed) in enumerate(
                zip(self.device_slots(hit), self.needed(hit.num_tokens), strict=True)
            )
        ]
        firsts = [
            0 if group.forgets else blocks[0][0] * group.block_size // step
            for group, blocks in zip(self._groups, absent, strict=True)
            if blocks
        ]
        if not firsts:
            return None
        start = min(firsts)
        ends = np.arange(start, hit.num_tokens // step + 1, dtype=np.float64) * step
        moved = np.zeros((2, len(ends)))  # from disk, to the device
        for group_id, (group, blocks) in enumerate(zip(self._groups, absent, strict=True)):
            if blocks:
                # The first prefix that needs each block.
                places = np.array([block_id for block_id, _ in blocks]) * group.block_size // step + 1 - start
                places = np.ones_like(places) if group.forgets else places
                for row, num_bytes in enumerate(self._to_move(group_id, [name for _, name in blocks])):
                    moved[row] += np.bincount(places, num_bytes, len(ends))
        disk_bytes, device_bytes = moved.cumsum(axis=1)
        arrivals, transfers = self._arrivals, self._transfers
        return Demand(
            ends,
            disk_bytes,
            device_bytes,
            self._landings.queued_bytes + transfers.pending_bytes(Route.DISK_TO_HOST),
            arrivals.queued_to_upload + transfers.pending_bytes(Route.HOST_TO_DEVICE),
        )

    def keep_warm(self, hit: Hit) -> None:
        """Make the hit's host blocks the last to be evicted there: they are wanted, only not yet."""
        self._refresh_host(hit.chain, hit.num_tokens)

    def pump(self, window: int) -> None:
        """Go on with what is queued, and end promotions whose time is over."""
        self._landings.pump(window)
        self._arrivals.pump()
        if not self._waiting:
            return
        now = self._clock()
        for promotion in [late for late in self._waiting if late.deadline is not None and late.deadline <= now]:
            if any(arrival.landing is not None for arrival in promotion.waiting):
                self._landings.hung()
            if self._arrivals.hang(promotion.waiting):
                self._uploads_hang()
            self.give_up(promotion, Reason.DEADLINE)

    def give_up(self, promotion: Promotion, reason: Reason) -> None:
        """Stop waiting: what has not arrived is left out."""
        unwanted: set[Arrival] = set()
        for arrival in promotion.waiting:
            (block_id,) = [block_id for waiter, block_id in arrival.waiters if waiter is promotion]
            arrival.waiters.remove((promotion, block_id))
            self._leave_out(promotion, arrival, block_id, reason)
            if not arrival.waiters:
                unwanted.add(arrival)
        promotion.waiting.clear()
        self._arrivals.drop(unwanted)
        self._finish_if_arrived(promotion)

    def _uploads_hang(self) -> None:
        """All that is brought up goes by one lane: nobody waits behind what holds it up."""
        for promotion in list(self._waiting):
            self.give_up(promotion, Reason.DEADLINE)
        self._arrivals.hung()

    def released(self, promotion: Promotion) -> None:
        """A promotion's leases have ended before its caller had the beginning of a split prefix: what is on the device
        of that, whoever left it there, must outlive the rest."""
        for group_id in range(len(self._groups) if promotion.start else 0):
            self._refresh_device(promotion, group_id, 0)

    def num_leases(self, tier: SlotTier, group_id: int) -> int:
        """Leases that blocks under way hold on a pool, beside those of the promotions that wait for them."""
        return self._arrivals.num_leases(tier, group_id)

    def num_waiting_leases(self, group_id: int) -> int:
        """Leases on device slots that belong to promotions not done yet."""
        return sum(slot != NO_SLOT for promotion in self._waiting for slot in promotion.tables[group_id])

    def check(self) -> None:
        """Raise AssertionError if a block under way can be found already, or a promotion waits for what is not."""
        self._arrivals.check()
        under_way = set(self._arrivals)
        for promotion in self._waiting:
            assert promotion.waiting, "a promotion waits for nothing"
            assert promotion.waiting <= under_way, "a promotion waits for a block that is not under way"

    def needed(self, num_tokens: int, start: int = 0) -> list[range]:
        """For each group, the blocks that a request reads which goes on after that many tokens, but for those before
        *start*."""
        result = []
        for group in self._groups:
            end = num_tokens // group.block_size
            result.append(range(min(end, max(group.first_needed(num_tokens), start // group.block_size)), end))
        return result

    def _slots_from_start(self, hit: Hit) -> list[npt.NDArray[np.int32]]:
        """`device_slots` without those before the start of a split hit."""
        whole = zip(self.device_slots(hit), self.needed(hit.num_tokens), strict=True)
        parts = self.needed(hit.num_tokens, hit.start)
        return [found[part.start - needed.start :] for (found, needed), part in zip(whole, parts, strict=True)]

    def _absent(
        self, group_id: int, chain: BlockChain, needed: range, slots: npt.NDArray[np.int32]
    ) -> list[tuple[int, BlockName]]:
        """The needed blocks that are not on the device, with their names."""
        absent = np.flatnonzero(slots == ABSENT).tolist()
        if not absent:
            return []
        names = chain.names_of(self._groups[group_id].block_size, needed)
        return [(needed.start + i, names[i]) for i in absent]

    def _to_move(
        self, group_id: int, names: Sequence[BlockName]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """For each of the blocks, none on the device, the bytes to read from disk and those to copy to the device."""
        host, block_bytes = self._residency.host, self._memories[group_id].block_bytes
        in_host = np.full(len(names), ABSENT) if host is None else host.pools[group_id].find_all(names)
        disk_bytes = np.where(in_host == ABSENT, block_bytes, 0)
        device_bytes = np.full(len(names), block_bytes)
        for place, name in enumerate(names):
            if self._arrivals.find(group_id, name) is not None:  # counted with what is queued, which it waits for
                disk_bytes[place] = min(disk_bytes[place], 1)
                device_bytes[place] = 1
        return disk_bytes, device_bytes

    def _deficit(self, hit: Hit, slots: Sequence[npt.NDArray[np.int32]]) -> int:
        """How many tokens fewer the hit must have, for the group that lacks most slots to hold it on the device."""
        worst = 0
        parts = self.needed(hit.num_tokens, hit.start)
        for group_id, (found, needed) in enumerate(zip(slots, parts, strict=True)):
            absent = self._absent(group_id, hit.chain, needed, found)
            if absent:
                pool = self._residency.device.pools[group_id]
                present = found[found != ABSENT]
                new = sum(self._arrivals.find(group_id, name) is None for _, name in absent)
                taken = new + len(present) - pool.num_leased(present)
                worst = max(worst, (taken - pool.num_free) * self._groups[group_id].block_size)
        return worst

    def shorter(self, hit: Hit, num_tokens: int) -> Hit:
        """The same hit with at most that many tokens, and no partial block; of a split one its beginning stays."""

        def first_hole(group_id: int, start: int, end: int) -> int:
            names = hit.chain.names_of(self._groups[group_id].block_size, range(start, end))
            return start + self._residency.locate(group_id, names)[1]

        longest = max(hit.start, longest_hit(max(0, num_tokens), self._groups, first_hole))
        if longest == hit.num_tokens:
            return replace(hit, as_of=-1)
        return replace(hit, num_tokens=longest, partial=None, as_of=-1)

    def _lease_what_is_there(self, promotion: Promotion, slots: Sequence[npt.NDArray[np.int32]]) -> list[list[int]]:
        """Lease device blocks and join arrivals, in all groups, before a slot is taken; the blocks that are neither."""
        missing: list[list[int]] = []
        parts = self.needed(promotion.num_tokens, promotion.start)
        for group_id, (found, needed) in enumerate(zip(slots, parts, strict=True)):
            promotion.tables[group_id].frombytes(found.tobytes())
            absent = self._absent(group_id, promotion.chain, needed, found)
            self._residency.device.pools[group_id].lease(found[found != ABSENT] if absent else found)
            missing.append([])
            for block_id, name in absent:
                if (arrival := self._arrivals.find(group_id, name)) is not None:
                    self._join(promotion, block_id, arrival)
                else:
                    missing[-1].append(block_id)
        return missing

    def _copy_partial(self, promotion: Promotion, hit: Hit, missing: Sequence[Sequence[int]], window: int) -> None:
        """Copy the block that shares the prompt's next tokens into one of the request's own, in all groups or in none.

        The copy is on the stream that computes: what wrote the block comes before it, what goes on from it after.
        """
        if hit.partial is None:
            return
        pools = self._residency.device.pools
        sources = [slot for pool in pools if (slot := pool.find(hit.partial.name)) is not None]
        if len(sources) < len(pools):
            return
        for pool, source in zip(pools, sources, strict=True):  # lent: a word in common makes no document a recent one
            pool.lend([source])
        if all(pool.num_free > len(blocks) for pool, blocks in zip(pools, missing, strict=True)):
            for group_id, source in enumerate(sources):
                target = self._residency.take(self._residency.device, group_id, 1, window)
                assert target is not None, "fewer free slots than a moment ago"
                self._memories[group_id].copy(source, target[0])
                promotion.tables[group_id].append(target[0])
            promotion.num_copied = hit.partial.num_tokens
        for pool, source in zip(pools, sources, strict=True):
            pool.put_back([source])
        if promotion.num_copied and hit.partial.is_used_up:
            for group_id, (pool, source) in enumerate(zip(pools, sources, strict=True)):
                if pool.is_free(source):
                    self._residency.evict(self._residency.device, group_id, [source])

    def _join(self, promotion: Promotion, block_id: int, arrival: Arrival) -> None:
        self._residency.device.pools[arrival.group_id].lease([arrival.device_slot])
        promotion.tables[arrival.group_id][block_id] = arrival.device_slot
        step = self._groups[arrival.group_id].block_size // promotion.chain.block_size
        for place in range(block_id * step, (block_id + 1) * step):
            promotion.depths[place] = max(promotion.depths[place], arrival.source.depth)
        promotion.waiting.add(arrival)
        arrival.waiters.append((promotion, block_id))

    def _count_unneeded_with_next(self, promotion: Promotion) -> None:
        starts = zip(self.needed(promotion.num_tokens), self._groups, strict=True)
        first = min(needed.start * group.block_size for needed, group in starts) // promotion.chain.block_size
        if first < promotion.num_blocks:
            promotion.depths[:first] = bytes([promotion.depths[first]]) * first

    def _resolved(self, arrival: Arrival, failure: Reason | None) -> None:
        """A block has arrived, or never will."""
        for promotion, block_id in arrival.waiters:
            promotion.waiting.discard(arrival)
            if failure is not None:
                self._leave_out(promotion, arrival, block_id, failure)
            self._finish_if_arrived(promotion)

    def _leave_out(self, promotion: Promotion, arrival: Arrival, block_id: int, failure: Reason) -> None:
        promotion.tables[arrival.group_id][block_id] = NO_SLOT
        promotion.failure = failure
        self._residency.device.pools[arrival.group_id].release([arrival.device_slot])

    def _finish_if_arrived(self, promotion: Promotion) -> None:
        """Once nothing is under way: cut the prefix at what cannot be resumed, and hand its leases to the caller."""
        if promotion.waiting or promotion.done:
            return
        if promotion.failure is not None:
            self._cut(promotion, promotion.failure)
        promotion.done = True
        if promotion.depths.count(Tier.DEVICE.depth, 0, promotion.num_blocks) < promotion.num_blocks:
            self._refresh_host(promotion.chain, promotion.num_tokens)
            self._touch_on_disk(promotion)
        self._waiting.discard(promotion)
        self._hand_over(promotion)

    def _cut(self, promotion: Promotion, failure: Reason) -> None:
        """Shorten the prefix to what can be resumed with the blocks that did arrive."""
        tables = promotion.tables

        def first_hole(group_id: int, start: int, end: int) -> int:
            start = max(start, promotion.start // self._groups[group_id].block_size)
            return next((i for i in range(start, end) if tables[group_id][i] == NO_SLOT), end)

        usable = longest_hit(promotion.num_tokens, self._groups, first_hole)
        for group_id, needed in enumerate(self.needed(usable)):
            table = tables[group_id]
            unneeded = [slot for i, slot in enumerate(table) if slot != NO_SLOT and i not in needed]
            self._residency.device.pools[group_id].release(unneeded[::-1])
            tables[group_id] = array("i", [NO_SLOT]) * needed.start + table[needed.start : needed.stop]
            # Meanwhile somebody may have filled the hole, and left: what is behind it must not outlive that.
            self._refresh_device(promotion, group_id, 0 if promotion.start else needed.stop)
        promotion.misses = promotion.misses.cut(promotion.num_tokens, failure)
        promotion.num_tokens, promotion.num_copied = usable, 0

    def _refresh_device(self, promotion: Promotion, group_id: int, start: int) -> None:
        """Make the prefix's device blocks from *start* on that nobody leases the most recent, its tail the least."""
        size, pool = self._groups[group_id].block_size, self._residency.device.pools[group_id]
        slots = pool.find_all(promotion.chain.names_of(size, range(start, promotion.num_tokens // size)))[::-1]
        pool.refresh(slots[slots != ABSENT])

    def _refresh_host(self, chain: BlockChain, num_tokens: int) -> None:
        """Make these blocks the most recent in host memory, the prefix's tail still being evicted first of them."""
        if self._residency.host is None:
            return
        for group_id, needed in enumerate(self.needed(num_tokens)):
            pool = self._residency.host.pools[group_id]
            slots = pool.find_all(chain.names_of(self._groups[group_id].block_size, needed))[::-1]
            in_host = slots[slots != ABSENT]
            pool.refresh(in_host)
            self._residency.used_in_host(group_id, in_host.tolist())

    def _touch_on_disk(self, promotion: Promotion) -> None:
        """Make what came from disk the most recent there; not done while the lane to disk is full."""
        disk = self._residency.disk
        if disk is None or Tier.DISK.depth not in promotion.depths[: promotion.num_blocks]:
            return
        keys = []
        for group_id, needed in enumerate(self.needed(promotion.num_tokens)):
            size = self._groups[group_id].block_size
            step = size // promotion.chain.block_size
            names = promotion.chain.names_of(size, needed)
            from_disk = [promotion.depths[(i + 1) * step - 1] == Tier.DISK.depth for i in needed]
            keys += [disk.key(group_id, name) for name in reversed(list(compress(names, from_disk)))]
        self._transfers.submit(Route.HOST_TO_DISK, lambda: disk.touch(keys), 0, lambda transfer: None)
