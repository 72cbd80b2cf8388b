"""Promoter: gives a hit device slots, has what is missing brought up, and tells who waits."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.block_pool import ABSENT
from kvtier.tiers.lower.lower_tiers import Places
from kvtier.tiers.naming.groups import AttentionGroup, alignment, longest_hit
from kvtier.tiers.naming.named_blocks import BlockIds, names_of
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.tiers.residency import Residency
from kvtier.tiers.up.backlog import Backlogs
from kvtier.tiers.up.load_planner import Demand
from kvtier.tiers.up.promotion import COMPUTED, NO_SLOT, Hit, Promotion, Upload
from kvtier.tiers.up.refreshes import Refreshes
from kvtier.tiers.up.uploads import Uploads
from kvtier.transfer.block_memory import BlockMemory
from kvtier.transfer.transfer_engine import Route, TransferEngine

PART = 48  # blocks put under way at once: half a millisecond's work
MOST_UNDER_WAY = 160  # blocks of one promotion: 8 MiB if they are of 52 KiB, and little to give up


class Promoter:
    """Leases every source, then takes destinations, then has them filled (`Uploads`), a part at a time: the rest is a
    promotion's backlog. Owned by the cache's thread."""

    def __init__(
        self,
        groups: Sequence[AttentionGroup],
        residency: Residency,
        memories: Sequence[BlockMemory],
        transfers: TransferEngine,
        clock: Callable[[], float],
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
        self._alignment = alignment(groups)
        self._uploads = Uploads(residency, memories, transfers, self._resolved, clock)
        self._backlogs = Backlogs(groups, residency, self._uploads.landed)
        self._refreshes = Refreshes(residency.lower)
        self._waiting: set[Promotion] = set()
        # Blocks under way of promotions that are to come layer by layer, until none is in the backlog: then they start.
        self._kept_back: dict[Promotion, list[Upload]] = {}
        self.could_start_more = False  # but for `PART`

    @property
    def num_waiting(self) -> int:
        """Promotions that are not done."""
        return len(self._waiting)

    def promote(self, hit: Hit, window: int, deadline: float | None = None) -> Promotion:
        """Start bringing the hit up; done at once if all of it is on the device."""
        if hit.as_of != self._residency.num_changes or self._residency.is_cut_off:
            shorter = self.shorter(hit, hit.num_tokens)
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
        blocks = self._lease_what_is_there(promotion, slots)
        below = self._below(hit, blocks)
        self._backlogs.add(promotion, blocks, below)
        self._note_depths(promotion, blocks, below)
        self._copy_partial(promotion, hit, window)
        if promotion in self._backlogs or promotion.waiting:
            is_all_to_come = promotion in self._backlogs and not promotion.waiting
            if self._by_layers and is_all_to_come and not hit.start and all((places >= 0).all() for places in below):
                self._kept_back[promotion] = []
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
        end = hit.num_tokens
        for group, found, needed in zip(self._groups, self.device_slots(hit), self.needed(hit.num_tokens), strict=True):
            absent = found == ABSENT
            if absent.any():
                end = min(end, (needed.start + int(absent.argmax())) * group.block_size)
        return self.shorter(replace(hit, start=0), end)

    def resident_and_missing(self, hit: Hit) -> list[tuple[npt.NDArray[np.int32], int]]:
        """For each group: the device slots that the hit's blocks are in already, and how many slots it would take."""
        result = []
        slots = self.device_slots(hit)
        for group_id, (found, needed) in enumerate(zip(slots, self.needed(hit.num_tokens), strict=True)):
            absent = _absent(found, needed)
            missing = len(absent) - int(np.count_nonzero(self._are_coming(hit, group_id, absent)))
            result.append((found[found != ABSENT], missing))
        return result

    def demand(self, hit: Hit, step: int) -> Demand | None:
        """What the hit's prefixes have to move, those that end at a multiple of *step* tokens; None if nothing.

        Where a group forgets, every prefix is taken to need as much of its blocks as the whole hit.
        """
        absent = [
            _absent(found, needed)
            for found, needed in zip(self.device_slots(hit), self.needed(hit.num_tokens), strict=True)
        ]
        firsts = [
            0 if group.forgets else int(ids[0]) * group.block_size // step
            for group, ids in zip(self._groups, absent, strict=True)
            if len(ids)
        ]
        if not firsts:
            return None
        start = min(firsts)
        ends = np.arange(start, hit.num_tokens // step + 1, dtype=np.float64) * step
        moved = np.zeros((2, len(ends)))  # from disk, to the device
        for group_id, (ids, below) in enumerate(zip(absent, self._below(hit, absent), strict=True)):
            if len(ids):
                # The first prefix that needs each block.
                places = ids * self._groups[group_id].block_size // step + 1 - start
                places = np.ones_like(places) if self._groups[group_id].forgets else places
                for row, num_bytes in enumerate(self._to_move(hit, group_id, ids, below)):
                    moved[row] += np.bincount(places, num_bytes, len(ends))
        disk_bytes, device_bytes = moved.cumsum(axis=1)
        queued_disk_bytes = self._residency.lower.queued_read_bytes()
        queued_device_bytes = self._uploads.queued_to_upload + self._transfers.pending_bytes(Route.HOST_TO_DEVICE)
        for group_id, memory in enumerate(self._memories):
            num_read, num_copied = self._backlogs.num_queued(group_id)
            queued_disk_bytes += num_read * memory.block_bytes
            queued_device_bytes += num_copied * memory.block_bytes
        return Demand(ends, disk_bytes, device_bytes, queued_disk_bytes, queued_device_bytes)

    def keep_warm(self, hit: Hit) -> None:
        """Make the hit's host blocks the last to be evicted there: they are wanted, only not yet. Not those of a hit
        that is out of date, which have been."""
        if hit.as_of != self._residency.num_changes:
            return
        for group_id, (places, needed) in enumerate(zip(hit.below, self.needed(hit.num_tokens), strict=True)):
            self._residency.lower.keep(group_id, places)
            self._refreshes.add(hit.chain, group_id, self._groups[group_id].block_size, needed)
        self._refreshes.go_on()

    def pump(self, window: int) -> None:
        """Go on with what is queued, and end promotions whose time is over."""
        self._residency.lower.poll()
        if self._waiting:
            self._start_more(window)
        self._uploads.pump()
        self._refreshes.go_on()
        if not self._waiting:
            self.could_start_more = False
            return
        now = self._clock()
        for promotion in [late for late in self._waiting if late.deadline is not None and late.deadline <= now]:
            for fetch in {upload.fetch for upload in promotion.waiting if upload.host_slot is None}:
                fetch.time_out()
            if self._uploads.hang(promotion.waiting):
                self._uploads_hang()
            self.give_up(promotion, Reason.DEADLINE)

    def give_up(self, promotion: Promotion, reason: Reason) -> None:
        """Stop waiting: what has not arrived is left out."""
        if self._backlogs.drop(promotion):
            promotion.failure = reason
        left: list[list[tuple[int, Upload]]] = [[] for _ in self._groups]
        for upload in promotion.waiting:
            place = next(i for i, (waiter, _) in enumerate(upload.waiters) if waiter is promotion)
            left[upload.group_id].append((upload.waiters.pop(place)[1], upload))
        promotion.waiting.clear()
        for group_id, blocks in enumerate(left):
            if blocks:
                promotion.failure = reason
                blocks.sort(key=lambda block: block[0])
                table, ids = np.frombuffer(promotion.tables[group_id], np.int32), [block_id for block_id, _ in blocks]
                self._residency.device.pools[group_id].release(table[ids])
                table[ids] = NO_SLOT
                self._uploads.drop([upload for _, upload in blocks if not upload.waiters])
        self._come_as_usual(promotion)
        self._finish_if_arrived(promotion)

    def _uploads_hang(self) -> None:
        """All that is brought up goes by one lane: nobody waits behind what holds it up."""
        for promotion in list(self._waiting):
            self.give_up(promotion, Reason.DEADLINE)
        self._uploads.hung()

    def released(self, promotion: Promotion) -> None:
        """A promotion's leases have ended before its caller had the beginning of a split prefix: what is on the device
        of that, whoever left it there, must outlive the rest."""
        for group_id in range(len(self._groups) if promotion.start else 0):
            self._refresh_device(promotion, group_id, range(promotion.num_tokens // self._groups[group_id].block_size))

    def num_leases(self, group_id: int) -> int:
        """Leases that blocks to come hold on device slots, beside those of the promotions that wait for them."""
        return self._uploads.num_leases(group_id)

    def num_waiting_leases(self, group_id: int) -> int:
        """Leases on device slots that belong to promotions not done yet."""
        return sum(slot != NO_SLOT for promotion in self._waiting for slot in promotion.tables[group_id])

    def num_to_come(self, promotion: Promotion) -> list[int]:
        """For each group, how many of a promotion's blocks have no slot yet, but are sure of one."""
        return self._backlogs.num_left(promotion)

    def check(self) -> None:
        """Raise AssertionError if a block under way can be found already, or a promotion waits for what is not."""
        self._uploads.check()
        self._backlogs.check()
        under_way = set(self._uploads)
        for promotion in self._waiting:
            assert promotion.waiting or promotion in self._backlogs, "a promotion waits for nothing"
            assert promotion.waiting <= under_way, "a promotion waits for a block that is not under way"
        assert set(self._backlogs) <= self._waiting, "a promotion that is done has something to come"
        assert self._kept_back.keys() <= set(self._backlogs), "blocks are kept back for nothing"

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

    def _below(self, hit: Hit, blocks: Sequence[BlockIds]) -> list[Places]:
        """For each group where below these blocks of the hit are, none of them on the device. What was found, and is
        nowhere any more, is looked for on disk."""
        if hit.as_of == self._residency.num_changes:
            whole = zip(hit.below, blocks, self.needed(hit.num_tokens), strict=True)
            return [places[ids - needed.start] for places, ids, needed in whole]
        return [
            self._residency.lower.find(group_id, names_of(hit.chain, group, ids))
            for group_id, (group, ids) in enumerate(zip(self._groups, blocks, strict=True))
        ]

    def _are_coming(self, hit: Hit, group_id: int, ids: BlockIds) -> npt.NDArray[np.bool_]:
        """For each of these blocks of the hit whether it will have a slot on the device without this hit's doing."""
        coming = self._backlogs.coming(hit.chain, group_id, ids)
        if self._uploads.any(group_id):
            coming |= self._uploads.are_coming(group_id, names_of(hit.chain, self._groups[group_id], ids))
        return coming

    def _to_move(
        self, hit: Hit, group_id: int, ids: BlockIds, below: Places
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """For each of the blocks, none on the device, the bytes to read from disk and those to copy to the device."""
        block_bytes = self._memories[group_id].block_bytes
        disk_bytes = np.where(below < 0, block_bytes, 0)
        device_bytes = np.full(len(ids), block_bytes)
        coming = self._are_coming(hit, group_id, ids)  # counted with what is queued, which it waits for
        disk_bytes[coming] = np.minimum(disk_bytes[coming], 1)
        device_bytes[coming] = 1
        return disk_bytes, device_bytes

    def _deficit(self, hit: Hit, slots: Sequence[npt.NDArray[np.int32]]) -> int:
        """How many tokens fewer the hit must have, for the group that lacks most slots to hold it on the device."""
        worst = 0
        parts = self.needed(hit.num_tokens, hit.start)
        for group_id, (found, needed) in enumerate(zip(slots, parts, strict=True)):
            absent = _absent(found, needed)
            if len(absent):
                pool = self._residency.device.pools[group_id]
                present = found[found != ABSENT]
                new = len(absent) - int(np.count_nonzero(self._are_coming(hit, group_id, absent)))
                taken = new + len(present) - pool.num_leased(present)
                worst = max(worst, (taken - pool.num_free) * self._groups[group_id].block_size)
        return worst

    def shorter(self, hit: Hit, num_tokens: int) -> Hit:
        """The same hit with at most that many tokens, and no partial block; of a split one its beginning stays."""

        def first_hole(group_id: int, start: int, end: int) -> int:
            names = hit.chain.names_of(self._groups[group_id].block_size, range(start, end))
            return start + self._residency.locate(group_id, names).num_found

        is_fresh = hit.as_of == self._residency.num_changes and not self._residency.is_cut_off
        if is_fresh and not any(group.forgets for group in self._groups):  # then every prefix of a hit is one
            longest = max(hit.start, min(hit.num_tokens, num_tokens) // self._alignment * self._alignment)
            ends = [needed.stop for needed in self.needed(longest)]
            hit = replace(
                hit,
                device_slots=[slots[:end] for slots, end in zip(hit.device_slots, ends, strict=True)],
                below=[places[:end] for places, end in zip(hit.below, ends, strict=True)],
            )
            return hit if longest == hit.num_tokens else replace(hit, num_tokens=longest, partial=None)
        longest = max(hit.start, longest_hit(max(0, num_tokens), self._groups, first_hole))
        if longest == hit.num_tokens:
            return replace(hit, as_of=-1)
        return replace(hit, num_tokens=longest, partial=None, as_of=-1)

    def _lease_what_is_there(self, promotion: Promotion, slots: Sequence[npt.NDArray[np.int32]]) -> list[BlockIds]:
        """Lease device blocks and join uploads, in all groups, before a slot is taken; the blocks that are neither."""
        missing: list[BlockIds] = []
        parts = self.needed(promotion.num_tokens, promotion.start)
        for group_id, (found, needed) in enumerate(zip(slots, parts, strict=True)):
            promotion.tables[group_id].frombytes(found.tobytes())
            absent = _absent(found, needed)
            self._residency.device.pools[group_id].lease(found[found != ABSENT] if len(absent) else found)
            if len(absent) and self._uploads.any(group_id):
                names = names_of(promotion.chain, self._groups[group_id], absent)
                coming = self._uploads.are_coming(group_id, names)
                joined = [self._uploads.find(group_id, names[place]) for place in np.flatnonzero(coming).tolist()]
                self._join(promotion, group_id, absent[coming], [upload for upload in joined if upload is not None])
                absent = absent[~coming]
            missing.append(absent)
        return missing

    def _copy_partial(self, promotion: Promotion, hit: Hit, window: int) -> None:
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
        if all(pool.num_free > 0 for pool in pools):
            for group_id, source in enumerate(sources):
                target = self._residency.device.take(group_id, 1, window)
                assert target is not None, "fewer free slots than a moment ago"
                self._memories[group_id].copy(source, target[0])
                promotion.tables[group_id].append(target[0])
            promotion.num_copied = hit.partial.num_tokens
        for pool, source in zip(pools, sources, strict=True):
            pool.put_back([source])
        if promotion.num_copied and hit.partial.is_used_up:
            for group_id, (pool, source) in enumerate(zip(pools, sources, strict=True)):
                if pool.is_free(source):
                    self._residency.device.evict(group_id, [source])

    def _start_more(self, window: int) -> None:
        """Put more of the backlogs under way, those first that began first."""
        num_left = PART
        for promotion in self._backlogs:
            while num_left > 0 and promotion in self._backlogs:
                most = num_left
                if promotion not in self._kept_back:
                    most = min(most, MOST_UNDER_WAY - len(promotion.waiting))
                num_started = self._start_part(promotion, most, window) if most > 0 else 0
                if not num_started:
                    break
                num_left -= num_started
        self.could_start_more = num_left <= 0
        for promotion in [there for there in self._kept_back if there not in self._backlogs]:
            if promotion.waiting:
                promotion.gate = self._uploads.by_layers(self._kept_back[promotion])
            if promotion.gate is None:
                self._come_as_usual(promotion)
            else:
                del self._kept_back[promotion]

    def _start_part(self, promotion: Promotion, most: int, window: int) -> int:
        """Put the first blocks of a backlog under way; how many left it."""
        group_id, ids = self._backlogs.first(promotion, most)
        pool = self._residency.device.pools[group_id]
        names = names_of(promotion.chain, self._groups[group_id], ids)
        here = pool.find_all(names)
        if (here != ABSENT).any():  # they were computed meanwhile
            self._use(promotion, group_id, ids[here != ABSENT], here[here != ABSENT])
            return int(np.count_nonzero(here != ABSENT))
        if pool.num_free < 0:  # copies down lease some of what is reserved, for a moment
            return 0
        sources, wanted = self._backlogs.take(promotion, group_id, ids)
        taken = self._residency.device.take(group_id, len(ids), window)
        assert taken is not None, "fewer slots are free than were reserved"
        uploads = self._uploads.start(group_id, names, taken, sources)
        for waiter, is_wanted in wanted:
            joined = uploads
            if not is_wanted.all():
                joined = [uploads[place] for place in np.flatnonzero(is_wanted).tolist()]
            self._join(waiter, group_id, ids[is_wanted], joined)
            if waiter is not promotion:
                self._come_as_usual(waiter)
        if any(upload.host_slot is None for upload in uploads):  # not all is in host memory after all
            self._come_as_usual(promotion)
        if promotion in self._kept_back:
            self._kept_back[promotion] += uploads
        else:
            self._uploads.copy_up(uploads)
        return len(ids)

    def _use(self, promotion: Promotion, group_id: int, ids: BlockIds, slots: npt.NDArray[np.int32]) -> None:
        """Blocks of backlogs are on the device, in these slots."""
        wanted = self._backlogs.discard(promotion, group_id, ids)
        for waiter, is_wanted in wanted:
            self._residency.device.pools[group_id].lease(slots[is_wanted])
            np.frombuffer(waiter.tables[group_id], np.int32)[ids[is_wanted]] = slots[is_wanted]
        for waiter, _ in wanted:
            self._finish_if_arrived(waiter)

    def _come_as_usual(self, promotion: Promotion) -> None:
        """A promotion's blocks do not come layer by layer."""
        self._uploads.copy_up(upload for upload in self._kept_back.pop(promotion, ()) if upload.waiters)

    def _join(self, promotion: Promotion, group_id: int, ids: BlockIds, uploads: Sequence[Upload]) -> None:
        """Have a promotion wait for these, which bring its blocks *ids*."""
        slots = np.array([upload.device_slot for upload in uploads], np.int32)
        self._residency.device.pools[group_id].lease(slots)
        np.frombuffer(promotion.tables[group_id], np.int32)[ids] = slots
        promotion.waiting.update(uploads)
        for block_id, upload in zip(ids.tolist(), uploads, strict=True):
            upload.waiters.append((promotion, block_id))

    def _note_depths(self, promotion: Promotion, blocks: Sequence[BlockIds], below: Sequence[Places]) -> None:
        """Where the blocks come from: those that are under way already, and those of the backlog."""
        depths = np.frombuffer(promotion.depths, np.uint8)
        by_name = [
            (block_id, a.group_id, a.source.depth)
            for a in promotion.waiting
            for w, block_id in a.waiters
            if w is promotion
        ]
        for group_id, (group, ids, places_below) in enumerate(zip(self._groups, blocks, below, strict=True)):
            joined = [(block_id, depth) for block_id, joined_group, depth in by_name if joined_group == group_id]
            all_ids = np.concatenate([ids, np.array([block_id for block_id, _ in joined], np.int64)])
            sources = np.concatenate(
                [
                    np.where(places_below < 0, Tier.DISK.depth, Tier.HOST.depth).astype(np.uint8),
                    np.array([depth for _, depth in joined], np.uint8),
                ]
            )
            step = group.block_size // promotion.chain.block_size
            for place in range(step):
                places = all_ids * step + place
                depths[places] = np.maximum(depths[places], sources)

    def _count_unneeded_with_next(self, promotion: Promotion) -> None:
        starts = zip(self.needed(promotion.num_tokens), self._groups, strict=True)
        first = min(needed.start * group.block_size for needed, group in starts) // promotion.chain.block_size
        if first < promotion.num_blocks:
            promotion.depths[:first] = bytes([promotion.depths[first]]) * first

    def _resolved(self, upload: Upload, failure: Reason | None) -> None:
        """A block has arrived, or never will."""
        for promotion, block_id in upload.waiters:
            promotion.waiting.discard(upload)
            if failure is not None:
                self._leave_out(promotion, upload, block_id, failure)
                # Whatever the groups are: no prefix that goes beyond this block can be resumed any more.
                self._backlogs.drop(promotion, block_id * self._groups[upload.group_id].block_size)
                if promotion not in self._backlogs:
                    self._come_as_usual(promotion)
            self._finish_if_arrived(promotion)

    def _leave_out(self, promotion: Promotion, upload: Upload, block_id: int, failure: Reason) -> None:
        promotion.tables[upload.group_id][block_id] = NO_SLOT
        promotion.failure = failure
        self._residency.device.pools[upload.group_id].release([upload.device_slot])

    def _finish_if_arrived(self, promotion: Promotion) -> None:
        """Once nothing is under way: cut the prefix at what cannot be resumed, and hand its leases to the caller."""
        if promotion.waiting or promotion.done or promotion in self._backlogs:
            return
        if promotion.failure is not None:
            self._cut(promotion, promotion.failure)
        promotion.done = True
        if promotion.depths.count(Tier.DEVICE.depth, 0, promotion.num_blocks) < promotion.num_blocks:
            from_disk = (np.frombuffer(promotion.depths, np.uint8) == Tier.DISK.depth).tobytes()
            for group_id, needed in enumerate(self.needed(promotion.num_tokens)):
                size = self._groups[group_id].block_size
                self._refreshes.add(promotion.chain, group_id, size, needed, from_disk)
        self._waiting.discard(promotion)
        self._hand_over(promotion)

    def _cut(self, promotion: Promotion, failure: Reason) -> None:
        """Shorten the prefix to what can be resumed with the blocks that did arrive."""
        tables = [np.array(table, np.int32) for table in promotion.tables]

        def first_hole(group_id: int, start: int, end: int) -> int:
            start = max(start, promotion.start // self._groups[group_id].block_size)
            holes = tables[group_id][start:end] == NO_SLOT
            return start + int(holes.argmax()) if holes.any() else end

        usable = longest_hit(promotion.num_tokens, self._groups, first_hole)
        for group_id, needed in enumerate(self.needed(usable)):
            table = tables[group_id]
            unneeded = table.copy()
            unneeded[needed.start : needed.stop] = NO_SLOT
            self._residency.device.pools[group_id].release(unneeded[unneeded != NO_SLOT][::-1])
            end = promotion.num_tokens // self._groups[group_id].block_size  # then a copy may follow, of no name
            behind = np.flatnonzero(unneeded[needed.stop : end] != NO_SLOT) + needed.stop
            table[: needed.start] = NO_SLOT
            promotion.tables[group_id] = array("i", table[: needed.stop].tobytes())
            # Meanwhile somebody may have filled the hole, and left: what is behind it must not outlive that.
            if promotion.start:
                self._refresh_device(promotion, group_id, range(usable // self._groups[group_id].block_size))
            if len(behind):
                self._refresh_device(promotion, group_id, range(needed.stop, int(behind[-1]) + 1))
        promotion.misses = promotion.misses.cut(promotion.num_tokens, failure)
        promotion.num_tokens, promotion.num_copied = usable, 0

    def _refresh_device(self, promotion: Promotion, group_id: int, blocks: range) -> None:
        """Make those of the prefix's device blocks that nobody leases the most recent, the tail the least."""
        size, pool = self._groups[group_id].block_size, self._residency.device.pools[group_id]
        slots = pool.find_all(promotion.chain.names_of(size, blocks))[::-1]
        pool.refresh(slots[slots != ABSENT])


def _absent(found: npt.NDArray[np.int32], needed: range) -> BlockIds:
    """Those of the needed blocks that are not on the device, where they were found or not."""
    return needed.start + np.flatnonzero(found == ABSENT)
