"""Promoter: brings a hit's blocks up, disk -> host -> device, each verified on the way, and tells who waits."""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress

import numpy as np
import numpy.typing as npt

from kvtier.store.record import Fault, digest
from kvtier.tiers.block_hash import BlockChain, BlockName
from kvtier.tiers.block_pool import ABSENT
from kvtier.tiers.breaker import Attempt, BreakerState
from kvtier.tiers.disk_tier import DiskTier
from kvtier.tiers.groups import AttentionGroup, longest_hit
from kvtier.tiers.promotion import NO_SLOT, Arrival, Hit, Promotion
from kvtier.tiers.residency import Residency, SlotTier
from kvtier.tiers.tenants import NOBODY, Ties, tenant_of
from kvtier.tiers.tier import Reason, Tier
from kvtier.transfer.block_memory import BlockMemory
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

REASONS = {  # any other fault: corrupt
    Fault.MISSING: Reason.EVICTED_FROM_DISK,
    Fault.IO_ERROR: Reason.FAILED,
    Fault.KEY: Reason.FAILED,
}
BATCH_BYTES = 4 << 20  # small enough that reading, verifying and uploading overlap


def read_blocks(
    disk: DiskTier, memory: BlockMemory, keys: Sequence[bytes], host_slots: Sequence[int]
) -> list[bytes | Fault]:
    """A reader's work: fill the host slots from disk, verified; each block's digest or fault."""
    return disk.read(keys, [memory.host_block(slot) for slot in host_slots])


def upload_blocks(
    memory: BlockMemory, host_slots: Sequence[int], digests: Sequence[bytes], device_slots: Sequence[int]
) -> list[bool]:
    """An uploader's work: copy to the device those host blocks that still are what arrived there."""
    good = [digest(memory.host_block(slot)) == known for slot, known in zip(host_slots, digests, strict=True)]
    memory.to_device(
        [slot for slot, is_good in zip(host_slots, good, strict=True) if is_good],
        [slot for slot, is_good in zip(device_slots, good, strict=True) if is_good],
    )
    return good


class Promoter:
    """Leases every source, then takes destinations, then copies. Owned by the cache's thread.

    A block is under way once, however many requests want it. A batch that finds its lane full waits here, in order.
    """

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        residency: Residency,
        memories: Sequence[BlockMemory],
        transfers: TransferEngine,
        clock: Callable[[], float],
        hand_over: Callable[[Promotion], None],
    ) -> None:
        self._groups = groups
        self._residency = residency
        self._memories = memories
        self._transfers = transfers
        self._clock = clock
        self._hand_over = hand_over
        self._arrivals: list[dict[BlockName, Arrival]] = [{} for _ in groups]
        self._to_read: deque[Arrival] = deque()
        self._to_upload: deque[Arrival] = deque()
        self._still_reading: set[Arrival] = set()  # for nobody any more; each leases its host slot
        self._reads: list[Attempt] = []  # under way
        self._waiting: set[Promotion] = set()

    @property
    def num_waiting(self) -> int:
        """Promotions that are not done."""
        return len(self._waiting)

    def promote(self, hit: Hit, window: int, deadline: float | None = None) -> Promotion:
        """Start bringing the hit up; done at once if all of it is on the device."""
        why_no_more = hit.why_no_more
        if hit.as_of != self._residency.num_changes and self._residency.disk is None:
            shorter = self._shorter(hit, hit.num_tokens)  # with a disk, what has left the tiers above is asked of it
            if shorter.num_tokens < hit.num_tokens:
                why_no_more = self._residency.why_missing([hit.chain.names[shorter.num_blocks]])
            hit = shorter
        slots = self.device_slots(hit)
        while (deficit := self._deficit(hit, slots)) > 0:
            hit, why_no_more = self._shorter(hit, hit.num_tokens - deficit), Reason.CAPACITY
            slots = self.device_slots(hit)
        promotion = Promotion(
            hit.chain,
            hit.limit,
            hit.num_tokens,
            [array("i", [NO_SLOT]) * needed.start for needed in self.needed(hit.num_tokens)],
            bytearray(hit.num_blocks),
            why_no_more,
            deadline,
        )
        missing = self._lease_what_is_there(promotion, slots)
        self._copy_partial(promotion, hit, missing, window)
        for group_id, blocks in enumerate(missing):
            taken = self._residency.take(self._residency.device, group_id, len(blocks), window) if blocks else []
            assert taken is not None, "a promotion was measured too short"
            for block_id, slot in zip(blocks, taken, strict=True):
                self._send(promotion, group_id, block_id, slot)
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

    def resident_and_missing(self, hit: Hit) -> list[tuple[set[int], int]]:
        """For each group: the device slots that the hit's blocks are in already, and how many slots it would take."""
        result = []
        slots = self.device_slots(hit)
        for group_id, (found, needed) in enumerate(zip(slots, self.needed(hit.num_tokens), strict=True)):
            absent = self._absent(group_id, hit.chain, needed, found)
            missing = sum(name not in self._arrivals[group_id] for _, name in absent)
            result.append((set(found[found != ABSENT].tolist()), missing))
        return result

    def keep_warm(self, hit: Hit) -> None:
        """Make the hit's host blocks the last to be evicted there: they are wanted, only not yet."""
        self._refresh_host(hit.chain, hit.num_tokens)

    def pump(self, window: int) -> None:
        """Hand queued blocks to lanes that have room, and end promotions whose time is over."""
        while self._to_read and self._submit_read(window):
            pass
        while self._to_upload and self._submit_upload():
            pass
        now = self._clock()
        for promotion in [late for late in self._waiting if late.deadline is not None and late.deadline <= now]:
            if self._residency.disk is not None and any(arrival.source is Tier.DISK for arrival in promotion.waiting):
                for attempt in self._reads:  # or every request to come would wait as long
                    self._residency.disk.reading.hung(attempt)
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
        self._drop(unwanted)
        self._finish_if_arrived(promotion)

    def num_leases(self, tier: SlotTier, group_id: int) -> int:
        """Leases that blocks under way hold on a pool, beside those of the promotions that wait."""
        arrivals = self._arrivals[group_id].values()
        if tier is self._residency.device:
            return len(arrivals)
        late = sum(arrival.group_id == group_id for arrival in self._still_reading)
        return late + sum(arrival.host_slot is not None for arrival in arrivals)

    def num_waiting_leases(self, group_id: int) -> int:
        """Leases on device slots that belong to promotions not done yet."""
        return sum(slot != NO_SLOT for promotion in self._waiting for slot in promotion.tables[group_id])

    def check(self) -> None:
        """Raise AssertionError if a block under way can be found already, or a promotion waits for nothing."""
        for group_id, arrivals in enumerate(self._arrivals):
            pool = self._residency.device.pools[group_id]
            for arrival in arrivals.values():
                assert pool.name(arrival.device_slot) is None, "a block can be found before its bytes are there"
                assert not pool.is_free(arrival.device_slot), "a block arrives in a slot that is free"
        under_way = {arrival for arrivals in self._arrivals for arrival in arrivals.values()}
        for promotion in self._waiting:
            assert promotion.waiting, "a promotion waits for nothing"
            assert promotion.waiting <= under_way, "a promotion waits for a block that is not under way"

    def needed(self, num_tokens: int) -> list[range]:
        """For each group, the blocks that a request reads which goes on after that many tokens."""
        ends = [num_tokens // group.block_size for group in self._groups]
        return [
            range(min(end, group.first_needed(num_tokens)), end) for group, end in zip(self._groups, ends, strict=True)
        ]

    def _absent(
        self, group_id: int, chain: BlockChain, needed: range, slots: npt.NDArray[np.int32]
    ) -> list[tuple[int, BlockName]]:
        """The needed blocks that are not on the device, with their names."""
        absent = np.flatnonzero(slots == ABSENT).tolist()
        if not absent:
            return []
        names = chain.names_of(self._groups[group_id].block_size, needed)
        return [(needed.start + i, names[i]) for i in absent]

    def _deficit(self, hit: Hit, slots: Sequence[npt.NDArray[np.int32]]) -> int:
        """How many tokens fewer the hit must have, for the group that lacks most slots to hold it on the device."""
        worst = 0
        for group_id, (found, needed) in enumerate(zip(slots, self.needed(hit.num_tokens), strict=True)):
            absent = self._absent(group_id, hit.chain, needed, found)
            if absent:
                pool, arrivals = self._residency.device.pools[group_id], self._arrivals[group_id]
                present = found[found != ABSENT]
                taken = sum(name not in arrivals for _, name in absent) + len(present) - pool.num_leased(present)
                worst = max(worst, (taken - pool.num_free) * self._groups[group_id].block_size)
        return worst

    def _shorter(self, hit: Hit, num_tokens: int) -> Hit:
        """The same hit with at most that many tokens, and no partial block."""

        def first_hole(group_id: int, start: int, end: int) -> int:
            names = hit.chain.names_of(self._groups[group_id].block_size, range(start, end))
            return start + self._residency.locate(group_id, names)[1]

        longest = longest_hit(max(0, num_tokens), self._groups, first_hole)
        if longest == hit.num_tokens:
            return replace(hit, as_of=-1)
        return replace(hit, num_tokens=longest, partial=None, as_of=-1)

    def _lease_what_is_there(self, promotion: Promotion, slots: Sequence[npt.NDArray[np.int32]]) -> list[list[int]]:
        """Lease device blocks and join arrivals, in all groups, before a slot is taken; the blocks that are neither."""
        missing: list[list[int]] = []
        for group_id, (found, needed) in enumerate(zip(slots, self.needed(promotion.num_tokens), strict=True)):
            promotion.tables[group_id].frombytes(found.tobytes())
            absent = self._absent(group_id, promotion.chain, needed, found)
            self._residency.device.pools[group_id].lease(found[found != ABSENT] if absent else found)
            missing.append([])
            for block_id, name in absent:
                if (arrival := self._arrivals[group_id].get(name)) is not None:
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

    def _send(self, promotion: Promotion, group_id: int, block_id: int, device_slot: int) -> None:
        """Put one block under way into *device_slot*, whose lease becomes the transfer's; its host copy is leased."""
        (name,) = promotion.chain.names_of(self._groups[group_id].block_size, range(block_id, block_id + 1))
        host = self._residency.host
        host_slot = host.pools[group_id].find(name) if host is not None else None
        if host is None or host_slot is None:
            arrival = Arrival(
                group_id, name, device_slot, Tier.DISK, ties=self._ties(promotion.chain, group_id, block_id)
            )
            self._to_read.append(arrival)
        else:
            host.pools[group_id].lease([host_slot])
            known = self._residency.digests[group_id][host_slot]
            arrival = Arrival(group_id, name, device_slot, Tier.HOST, host_slot, digest=known)
            self._to_upload.append(arrival)
        self._arrivals[group_id][name] = arrival
        self._join(promotion, block_id, arrival)

    def _ties(self, chain: BlockChain, group_id: int, block_id: int) -> Ties:
        """A block's ties. No parent where a group forgets: it needs no more than its window."""
        group, tenant = self._groups[group_id], tenant_of(chain.extra.cache_salt)
        if group.forgets or block_id == 0:
            return Ties(None, tenant)
        return Ties(chain.names_of(group.block_size, range(block_id - 1, block_id))[0], tenant)

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

    def _batch(self, queue: deque[Arrival]) -> list[Arrival]:
        """The first blocks in the queue that are of one group, up to a batch."""
        group_id = queue[0].group_id
        most = max(1, BATCH_BYTES // self._memories[group_id].block_bytes)
        batch: list[Arrival] = []
        while queue and queue[0].group_id == group_id and len(batch) < most:
            batch.append(queue.popleft())
        return batch

    def _submit_read(self, window: int) -> bool:
        residency = self._residency
        assert residency.host is not None, "blocks come from disk through the host tier"
        assert residency.disk is not None, "a block to read without a disk"
        attempt = residency.disk.reading.begin()
        if attempt is None:
            self._give_up_reading()
            return False
        group_id = self._to_read[0].group_id
        pool = residency.host.pools[group_id]
        batch = self._batch(self._to_read)
        slots = residency.take_clean(residency.host, group_id, len(batch), window)
        if not slots and not self._transfers.num_pending(Route.HOST_TO_DISK):  # no spill will make room
            slots = residency.take(residency.host, group_id, min(len(batch), pool.num_free), window) or []
        self._to_read.extendleft(reversed(batch[len(slots) :]))
        batch = batch[: len(slots)]
        if not batch:
            residency.disk.reading.withdrawn(attempt)
            return False
        for arrival, slot in zip(batch, slots, strict=True):
            arrival.host_slot = slot
        keys = [residency.disk.key(group_id, arrival.name) for arrival in batch]
        memory, disk = self._memories[group_id], residency.disk
        submitted = self._transfers.submit(
            Route.DISK_TO_HOST,
            lambda: read_blocks(disk, memory, keys, slots),
            len(batch) * memory.block_bytes,
            lambda transfer: self._landed_in_host(batch, transfer, attempt),
        )
        for arrival in batch:
            arrival.is_reading = submitted
        if submitted:
            self._reads.append(attempt)
        else:
            residency.disk.reading.withdrawn(attempt)
            for arrival in batch:
                arrival.host_slot = None
            pool.release(slots)
            self._to_read.extendleft(reversed(batch))
        return submitted

    def _give_up_reading(self) -> None:
        """The disk is to be left alone. What is queued fails, unless a probe is under way and may succeed."""
        disk = self._residency.disk
        if disk is not None and disk.reading.state is BreakerState.OPEN:
            queued, self._to_read = list(self._to_read), deque()
            for arrival in queued:
                self._resolve(arrival, Reason.FAILED)

    def _submit_upload(self) -> bool:
        batch = self._batch(self._to_upload)
        memory = self._memories[batch[0].group_id]
        host_slots = [arrival.host_slot for arrival in batch if arrival.host_slot is not None]
        digests = [arrival.digest for arrival in batch]
        device_slots = [arrival.device_slot for arrival in batch]
        submitted = self._transfers.submit(
            Route.HOST_TO_DEVICE,
            lambda: upload_blocks(memory, host_slots, digests, device_slots),
            len(batch) * memory.block_bytes,
            lambda transfer: self._landed_on_device(batch, transfer),
        )
        if not submitted:
            self._to_upload.extendleft(reversed(batch))
        return submitted

    def _landed_in_host(self, batch: Sequence[Arrival], transfer: Transfer, attempt: Attempt) -> None:
        host, disk = self._residency.host, self._residency.disk
        assert host is not None, "a block was read without a host tier"
        assert disk is not None, "a block was read without a disk"
        outcomes = transfer.result if transfer.error is None else [Fault.IO_ERROR] * len(batch)
        self._reads.remove(attempt)
        if isinstance(transfer.error, LaneClosed):
            disk.reading.withdrawn(attempt)
        elif Fault.IO_ERROR in outcomes:
            disk.reading.failed(attempt)
        else:
            disk.reading.succeeded(attempt)
        for arrival, outcome in zip(batch, outcomes, strict=True):
            assert arrival.host_slot is not None, "a block was read into no slot"
            arrival.is_reading = False
            failure = None
            if isinstance(outcome, Fault):
                failure = REASONS.get(outcome, Reason.CORRUPT)
                disk.faults[outcome.value] += outcome is not Fault.MISSING
                if outcome is not Fault.IO_ERROR:
                    self._residency.not_on_disk(arrival.group_id, arrival.name)
                self._residency.lost(arrival.group_id, arrival.name)
            else:
                arrival.digest = outcome
                self._residency.came_to_host(arrival.group_id, arrival.host_slot, arrival.name, outcome, arrival.ties)
            if arrival in self._still_reading:
                self._still_reading.discard(arrival)
                host.pools[arrival.group_id].release([arrival.host_slot])
            elif failure is None:
                self._to_upload.append(arrival)
            else:
                self._resolve(arrival, failure)

    def _landed_on_device(self, batch: Sequence[Arrival], transfer: Transfer) -> None:
        host = self._residency.host
        assert host is not None, "a block was uploaded without a host tier"
        outcomes = transfer.result if transfer.error is None else [None] * len(batch)
        for arrival, is_good in zip(batch, outcomes, strict=True):
            if is_good:
                if host.pools[arrival.group_id].find(arrival.name) is not None:  # else it was evicted on purpose
                    self._publish(arrival)
                self._resolve(arrival, None)
            elif is_good is None:
                self._resolve(arrival, Reason.FAILED)
            else:
                host.corrupt[Fault.CORRUPT.value] += 1
                assert arrival.host_slot is not None, "a block was uploaded from no slot"
                self._residency.evict(host, arrival.group_id, [arrival.host_slot])
                self._resolve(arrival, Reason.CORRUPT)
        for tenant in {arrival.ties.tenant for arrival in batch}:  # what came from disk has made host memory fuller
            self._residency.keep_quota(batch[0].group_id, tenant)

    def _publish(self, arrival: Arrival) -> None:
        """The block is on the device: name it, or let those who waited use the one that was computed meanwhile."""
        promotion, block_id = arrival.waiters[0] if arrival.waiters else (None, 0)
        chain = None if promotion is None else promotion.chain
        tenant = (
            self._residency.ties[arrival.group_id][arrival.host_slot].tenant
            if arrival.host_slot is not None
            else NOBODY
        )
        slot = self._residency.came_up(arrival.group_id, arrival.device_slot, arrival.name, tenant, chain, block_id)
        if slot != arrival.device_slot:
            pool = self._residency.device.pools[arrival.group_id]
            for waiter, place in arrival.waiters:
                pool.lease([slot])
                pool.release([arrival.device_slot])
                waiter.tables[arrival.group_id][place] = slot

    def _resolve(self, arrival: Arrival, failure: Reason | None) -> None:
        """The block has arrived, or never will: the transfer's leases end, and who waited learns of it."""
        del self._arrivals[arrival.group_id][arrival.name]
        if arrival.host_slot is not None and self._residency.host is not None:
            self._residency.host.pools[arrival.group_id].release([arrival.host_slot])
        pool = self._residency.device.pools[arrival.group_id]
        pool.release([arrival.device_slot])
        for promotion, block_id in arrival.waiters:
            promotion.waiting.discard(arrival)
            if failure is not None:
                self._leave_out(promotion, arrival, block_id, failure)
            self._finish_if_arrived(promotion)

    def _drop(self, unwanted: set[Arrival]) -> None:
        """Nobody waits for these blocks any more. Queued ones are not started; those being read free their device slot
        now, since the read, however slow, needs only the host slot."""
        queued = unwanted.intersection([*self._to_read, *self._to_upload])
        if queued:
            self._to_read = deque(arrival for arrival in self._to_read if arrival not in queued)
            self._to_upload = deque(arrival for arrival in self._to_upload if arrival not in queued)
        for arrival in queued:
            self._resolve(arrival, None)
        for arrival in unwanted - queued:
            if arrival.is_reading:
                del self._arrivals[arrival.group_id][arrival.name]
                self._residency.device.pools[arrival.group_id].release([arrival.device_slot])
                self._still_reading.add(arrival)

    def _leave_out(self, promotion: Promotion, arrival: Arrival, block_id: int, failure: Reason) -> None:
        promotion.tables[arrival.group_id][block_id] = NO_SLOT
        promotion.why_no_more = failure
        promotion.is_cut = True
        self._residency.device.pools[arrival.group_id].release([arrival.device_slot])

    def _finish_if_arrived(self, promotion: Promotion) -> None:
        """Once nothing is under way: cut the prefix at what cannot be resumed, and hand its leases to the caller."""
        if promotion.waiting or promotion.done:
            return
        if promotion.is_cut:
            self._cut(promotion)
        promotion.done = True
        if promotion.depths.count(Tier.DEVICE.depth, 0, promotion.num_blocks) < promotion.num_blocks:
            self._refresh_host(promotion.chain, promotion.num_tokens)
            self._touch_on_disk(promotion)
        self._waiting.discard(promotion)
        self._hand_over(promotion)

    def _cut(self, promotion: Promotion) -> None:
        """Shorten the prefix to what can be resumed with the blocks that did arrive."""
        tables = promotion.tables

        def first_hole(group_id: int, start: int, end: int) -> int:
            return next((i for i in range(start, end) if tables[group_id][i] == NO_SLOT), end)

        usable = longest_hit(promotion.num_tokens, self._groups, first_hole)
        for group_id, needed in enumerate(self.needed(usable)):
            table = tables[group_id]
            unneeded = [slot for i, slot in enumerate(table) if slot != NO_SLOT and i not in needed]
            self._residency.device.pools[group_id].release(unneeded[::-1])
            tables[group_id] = array("i", [NO_SLOT]) * needed.start + table[needed.start : needed.stop]
            # Meanwhile somebody may have filled the hole, and left: what is behind it must not outlive that.
            behind = range(needed.stop, promotion.num_tokens // self._groups[group_id].block_size)
            names = promotion.chain.names_of(self._groups[group_id].block_size, behind)
            slots = self._residency.device.pools[group_id].find_all(names)[::-1]
            self._residency.device.pools[group_id].refresh(slots[slots != ABSENT])
        promotion.num_tokens, promotion.num_copied = usable, 0

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
