"""Promoter: runs promotions, which load the blocks of hits to the device."""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.lower.copies import CleanAhead
from kvtier.tiers.lower.lower_tiers import ON_REMOTE, LowerTiers, Places
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.naming.groups import alignment, longest_hit
from kvtier.tiers.naming.named_blocks import BlockIds, names_of
from kvtier.tiers.naming.tier import EvictionCause, Reason, Tier
from kvtier.tiers.residency import GroupTiers, Residency
from kvtier.tiers.up.backlog import Backlogs
from kvtier.tiers.up.load_planner import Demand, Moves
from kvtier.tiers.up.promotion import COMPUTED, NO_SLOT, Hit, PartialHit, Promotion, Upload
from kvtier.tiers.up.uploads import Uploads
from kvtier.transfer.transfer_engine import Route, TransferEngine

LOADS = (Route.DISK_TO_HOST, Route.REMOTE_TO_HOST, Route.HOST_TO_DEVICE)
REFRESH_PART = 64  # blocks refreshed per call
MAX_WAITING = 1 << 10  # queued refreshes; beyond that the oldest are dropped, and only their recency is lost
PART = 32  # blocks started per call; with 48, polls of a prompt that is loaded from disk took up to 2.2 ms
MAX_IN_FLIGHT = 160  # blocks in flight per promotion: 8 MiB at 52 KiB each, so that little must be cancelled


class Hits:
    """Queries about a hit: where its blocks are now, what a promotion needs, and how to shorten the hit.

    While no block has moved since the lookup, the hit's own lookup result is used. Otherwise the blocks are looked up
    again. A hit with a `start` is *split*: blocks before the start that are not on the device are computed, while the
    blocks after the start are loaded. No method has side effects. Owned by the cache's thread.
    """

    def __init__(self, residency: Residency, uploads: Uploads, backlogs: Backlogs, transfers: TransferEngine) -> None:
        self._residency = residency
        self._groups = residency.groups
        self._attentions = [group.attention for group in residency.groups]
        self._alignment = alignment(self._attentions)
        self._uploads = uploads
        self._backlogs = backlogs
        self._transfers = transfers

    def device_slots(self, hit: Hit) -> Sequence[npt.NDArray[np.int32]]:
        """Return for each attention group the device slot of each block that the hit needs, or ABSENT."""
        if hit.as_of == self._residency.num_changes:
            return hit.device_slots
        return [
            group.pool.find_all(hit.chain.names_of(group.block_size, group.needed(hit.num_tokens)))
            for group in self._groups
        ]

    def slots_from_start(self, hit: Hit) -> list[npt.NDArray[np.int32]]:
        """Return `device_slots` without the blocks before `Hit.start`."""
        return [
            found[group.needed(hit.num_tokens, hit.start).start - group.needed(hit.num_tokens).start :]
            for group, found in zip(self._groups, self.device_slots(hit), strict=True)
        ]

    def below(self, hit: Hit, blocks: Sequence[BlockIds]) -> list[Places]:
        """Return the places of *blocks* of the hit in the lower tiers, for each group. No block may be on the device.

        The place is NOWHERE for a block that has left the lower tiers since the lookup. Callers need not check for
        this: they load the block as if it were on disk, and the load fails.
        """
        if hit.as_of == self._residency.num_changes:
            return [
                places[ids - group.needed(hit.num_tokens).start]
                for group, places, ids in zip(self._groups, hit.below, blocks, strict=True)
            ]
        return [
            self._residency.lower.find(group.id, names_of(hit.chain, group.attention, ids))
            for group, ids in zip(self._groups, blocks, strict=True)
        ]

    def on_device(self, hit: Hit) -> Hit:
        """Shorten the hit to the prefix that is on the device."""
        end = hit.num_tokens
        for group, found in zip(self._groups, self.device_slots(hit), strict=True):
            absent = found == ABSENT
            if absent.any():
                end = min(end, (group.needed(hit.num_tokens).start + int(absent.argmax())) * group.block_size)
        return self.shorter(replace(hit, start=0), end)

    def computed(self, hit: Hit) -> range:
        """Return the cached blocks that the request computes itself while the rest of a split hit is loaded.

        These are the blocks before `Hit.start` that are not on the device. The result is a range of indices of
        `hit.chain.names`. It is empty if the hit is not split.
        """
        return range(self.on_device(hit).num_blocks, hit.start // hit.chain.block_size) if hit.start else range(0)

    def shorter(self, hit: Hit, num_tokens: int) -> Hit:
        """Shorten the hit to at most *num_tokens* tokens, but not to fewer than `Hit.start` tokens.

        A hit that becomes shorter loses its partial block.
        """

        def first_hole(group_id: int, start: int, end: int) -> int:
            group = self._groups[group_id]
            return (
                start + self._residency.locate(group, hit.chain.names_of(group.block_size, range(start, end))).num_found
            )

        is_fresh = hit.as_of == self._residency.num_changes and not self._residency.is_cut_off
        if is_fresh and not any(
            attention.forgets for attention in self._attentions
        ):  # then every prefix of a hit is a hit
            longest = max(hit.start, min(hit.num_tokens, num_tokens) // self._alignment * self._alignment)
            ends = [longest // group.block_size for group in self._groups]
            hit = replace(
                hit,
                device_slots=[slots[:end] for slots, end in zip(hit.device_slots, ends, strict=True)],
                below=[places[:end] for places, end in zip(hit.below, ends, strict=True)],
            )
            return hit if longest == hit.num_tokens else replace(hit, num_tokens=longest, partial=None)
        longest = max(hit.start, longest_hit(max(0, num_tokens), self._attentions, first_hole))
        if longest == hit.num_tokens:
            return replace(hit, as_of=-1)
        return replace(hit, num_tokens=longest, partial=None, as_of=-1)

    def revalidate(self, hit: Hit) -> Hit:
        """Shorten the hit to the prefix that is still cached."""
        if hit.as_of == self._residency.num_changes and not self._residency.is_cut_off:
            return hit
        shorter = self.shorter(hit, hit.num_tokens)
        if shorter.num_tokens == hit.num_tokens:
            return shorter
        why = self._residency.miss_reason([hit.chain.names[shorter.num_blocks]])
        return replace(shorter, misses=hit.misses.cut(hit.num_tokens, why))

    def fitting(self, hit: Hit) -> tuple[Hit, list[npt.NDArray[np.int32]]]:
        """Shorten the hit until the device has enough slots for it.

        Returns the hit, and for each attention group the device slots of the blocks from `Hit.start` on, or ABSENT.
        """
        slots = self.slots_from_start(hit)
        while (deficit := self._deficit(hit, slots)) > 0:
            misses = hit.misses.cut(hit.num_tokens, Reason.CAPACITY)
            hit = replace(self.shorter(hit, hit.num_tokens - deficit), misses=misses)
            slots = self.slots_from_start(hit)
        return hit, slots

    def resident_and_missing(self, hit: Hit) -> list[tuple[npt.NDArray[np.int32], int]]:
        """Return for each group the device slots of the hit's blocks, and how many more slots a promotion takes.

        Blocks that another promotion is already loading take no further slots.
        """
        result = []
        for group, found in zip(self._groups, self.device_slots(hit), strict=True):
            absent = absent_blocks(found, group.needed(hit.num_tokens))
            missing = len(absent) - int(np.count_nonzero(self._are_coming(hit, group, absent)))
            result.append((found[found != ABSENT], missing))
        return result

    def demand(self, hit: Hit, step: int) -> Demand | None:
        """Return the bytes to copy for each prefix of the hit, in steps of *step* tokens.

        Returns None if all blocks are on the device. In a group that forgets (sliding window, recurrent state), every
        prefix is assumed to need as many blocks as the whole hit.
        """
        absent = [
            absent_blocks(found, group.needed(hit.num_tokens))
            for group, found in zip(self._groups, self.device_slots(hit), strict=True)
        ]
        firsts = [
            0 if group.attention.forgets else int(ids[0]) * group.block_size // step
            for group, ids in zip(self._groups, absent, strict=True)
            if len(ids)
        ]
        if not firsts:
            return None
        start = min(firsts)
        ends = np.arange(start, hit.num_tokens // step + 1, dtype=np.float64) * step
        moved = np.zeros((len(LOADS), len(ends)))
        for group, ids, below in zip(self._groups, absent, self.below(hit, absent), strict=True):
            if len(ids):
                # Index of the first prefix that needs each block.
                places = ids * group.block_size // step + 1 - start
                places = np.ones_like(places) if group.attention.forgets else places
                for row, num_bytes in enumerate(self._to_move(hit, group, ids, below)):
                    moved[row] += np.bincount(places, num_bytes, len(ends))
        queued = self._queued_bytes()
        return Demand(
            ends, {route: Moves(row, queued[route]) for route, row in zip(LOADS, moved.cumsum(axis=1), strict=True)}
        )

    def _queued_bytes(self) -> dict[Route, int]:
        """Return for each route (pair of tiers) the bytes that it still has to copy for earlier promotions."""
        lower = self._residency.lower
        queued = {
            Route.DISK_TO_HOST: lower.status.queued_read_bytes(Tier.DISK),
            Route.REMOTE_TO_HOST: lower.status.queued_read_bytes(Tier.REMOTE),
            Route.HOST_TO_DEVICE: self._uploads.queued_bytes + self._transfers.pending_bytes(Route.HOST_TO_DEVICE),
        }
        for group in self._groups:
            for route, num_blocks in self._backlogs.num_queued(group).items():
                queued[route] += num_blocks * group.memory.block_bytes
        return queued

    def _deficit(self, hit: Hit, slots: Sequence[npt.NDArray[np.int32]]) -> int:
        """Return by how many tokens the hit must shrink so that each group has enough device slots; 0 if it fits."""
        worst = 0
        for group, found in zip(self._groups, slots, strict=True):
            absent = absent_blocks(found, group.needed(hit.num_tokens, hit.start))
            if len(absent):
                present = found[found != ABSENT]
                new = len(absent) - int(np.count_nonzero(self._are_coming(hit, group, absent)))
                taken = new + len(present) - group.pool.num_leased(present)
                worst = max(worst, (taken - group.pool.num_free) * group.block_size)
        return worst

    def _are_coming(self, hit: Hit, group: GroupTiers, ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Return for each of the hit's blocks *ids* whether another promotion is already loading it."""
        coming = self._backlogs.are_queued(hit.chain, group, ids)
        if self._uploads.has_any(group):
            coming |= self._uploads.are_in_flight(group, names_of(hit.chain, group.attention, ids))
        return coming

    def _to_move(self, hit: Hit, group: GroupTiers, ids: BlockIds, below: Places) -> list[npt.NDArray[np.int64]]:
        """Return for each route (pair of tiers) in `LOADS` how many bytes it must copy of each of the blocks *ids*."""
        is_remote = below == ON_REMOTE
        # The blocks are not on the device, so the last route copies all of them.
        are_moved = [(below < 0) & ~is_remote, is_remote, np.ones(len(ids), np.bool_)]
        # Blocks that are being loaded are among the queued bytes already. Here they count 1 byte each, so that the
        # plan includes the wait for the queue.
        coming = self._are_coming(hit, group, ids)
        num_bytes = np.where(coming, 1, group.memory.block_bytes)
        return [np.where(is_moved, num_bytes, 0) for is_moved in are_moved]


def absent_blocks(found: npt.NDArray[np.int32], needed: range) -> BlockIds:
    """Return which of the *needed* blocks are not on the device.

    *found* has a device slot or ABSENT for each of the *needed* blocks.
    """
    return needed.start + np.flatnonzero(found == ABSENT)


@dataclass(frozen=True, slots=True)
class _Refresh:
    """Blocks of one prompt and group that are to become the most recent ones in the lower tiers.

    *from_disk* has a byte for each name of the chain: 1 if the block came from disk, else 0. It is empty if no block
    came from disk.
    """

    chain: BlockChain
    group: GroupTiers
    blocks: range
    from_disk: bytes


class Refreshes:
    """A queue of used prefixes, whose blocks are to become the most recent ones in the lower tiers.

    Each prefix is processed from its end to its beginning, so that its end is evicted first. Owned by the cache's
    thread.
    """

    def __init__(self, lower: LowerTiers) -> None:
        self._lower = lower
        self._waiting: deque[_Refresh] = deque(maxlen=MAX_WAITING)

    def add(self, chain: BlockChain, group: GroupTiers, blocks: range, from_disk: bytes = b"") -> None:
        """Record that *blocks* of a group were used. `go_on` later makes them the most recent ones in the lower tiers.

        *from_disk* has a byte for each name of the chain: 1 if the block came from disk, else 0. It is empty if no
        block came from disk. The use of blocks from disk is also recorded on disk.
        """
        if len(blocks):
            self._waiting.append(_Refresh(chain, group, blocks, from_disk))

    def go_on(self) -> None:
        """Mark up to `REFRESH_PART` blocks from the queue as the most recently used ones in the lower tiers."""
        num_left = REFRESH_PART
        while self._waiting and num_left > 0:
            refresh = self._waiting.popleft()
            chain, group, start, end = refresh.chain, refresh.group, refresh.blocks.start, refresh.blocks.stop
            first = max(start, end - num_left)
            names = chain.names_of(group.block_size, range(first, end))[::-1]
            step = group.block_size // chain.block_size
            from_disk = islice(refresh.from_disk, (first + 1) * step - 1, end * step, step)
            self._lower.refresh(group.id, names, list(map(bool, from_disk))[::-1])
            num_left -= end - first
            if first > start:
                self._waiting.appendleft(replace(refresh, blocks=range(start, first)))


class Promoter:
    """Runs promotions, which load the blocks of hits to the device, some blocks at a time.

    A promotion first leases its blocks on the device and in host memory. Blocks that are not on the device wait in a
    backlog until they are copied (`Uploads`). To free a slot, a clean block is evicted rather than a dirty one, which
    has no copy in a lower tier. Owned by the cache's thread.
    """

    def __init__(
        self,
        residency: Residency,
        transfers: TransferEngine,
        windows: Sequence[CleanAhead],
        clock: Callable[[], float],
        by_layers: bool,
    ) -> None:
        """Create a promoter without promotions.

        *windows* limits for each group the search for clean blocks to evict; see `GroupSlots.take`.
        """
        self._residency = residency
        self._groups = residency.groups
        self._attentions = [group.attention for group in residency.groups]
        self._windows = windows
        self._clock = clock
        self._by_layers = by_layers
        self._uploads = Uploads(residency, transfers, self._on_resolved, clock)
        self._backlogs = Backlogs(self._groups, residency.lower, self._uploads.on_fetched)
        self.hits = Hits(residency, self._uploads, self._backlogs, transfers)
        self._refreshes = Refreshes(residency.lower)
        self._waiting: set[Promotion] = set()
        # Blocks of promotions to be loaded layer by layer. Their copies start once the promotion's backlog is empty.
        self._kept_back: dict[Promotion, list[Upload]] = {}
        self.could_start_more = False  # whether the last `pump` stopped at `PART` blocks, so that another can go on

    @property
    def num_waiting(self) -> int:
        """Number of promotions that are not done."""
        return len(self._waiting)

    def promote(self, hit: Hit, deadline: float | None = None) -> Promotion:
        """Start to load the hit. The promotion is done at once if all its blocks are on the device.

        At *deadline*, the promotion ends without the blocks that have not arrived.
        """
        hit, slots = self.hits.fitting(self.hits.revalidate(hit))
        promotion = Promotion(
            hit.chain,
            hit.num_tokens,
            [array("i", [NO_SLOT]) * group.needed(hit.num_tokens, hit.start).start for group in self._groups],
            bytearray(hit.num_blocks),
            hit.misses,
            deadline,
            hit.start,
        )
        if hit.start:
            computed = self.hits.computed(hit)
            promotion.depths[computed.start : computed.stop] = bytes([COMPUTED]) * len(computed)
        blocks = self._lease_what_is_there(promotion, slots)
        if promotion.waiting or any(map(len, blocks)):  # otherwise all blocks are on the device
            below = self.hits.below(hit, blocks)
            self._backlogs.add(promotion, blocks, below)
            self._note_depths(promotion, blocks, below)
            self._waiting.add(promotion)
            is_all_to_come = not promotion.waiting and not hit.start
            if self._by_layers and is_all_to_come and all((places >= 0).all() for places in below):
                self._kept_back[promotion] = []
        if hit.partial is not None:
            self._copy_partial(promotion, hit.partial)
        if promotion in self._waiting:
            self.pump()
        self._finish_if_arrived(promotion)
        return promotion

    def keep_warm(self, hit: Hit) -> None:
        """Make the hit's blocks in host memory the last to be evicted, because a request needs them soon.

        Does nothing if any block of the cache has moved since the lookup. The places in the hit may then be outdated.
        """
        if hit.as_of != self._residency.num_changes:
            return
        for group, places in zip(self._groups, hit.below, strict=True):
            self._residency.lower.hints.evict_last(group.id, places)
            self._refreshes.add(hit.chain, group, group.needed(hit.num_tokens))
        self._refreshes.go_on()

    def pump(self) -> None:
        """Start to load queued blocks to the device, and end promotions whose deadline has passed."""
        self._residency.lower.poll()
        if self._waiting:
            self._start_more()
        self._uploads.pump()
        self._refreshes.go_on()
        if not self._waiting:
            self.could_start_more = False
            return
        now = self._clock()
        for promotion in [late for late in self._waiting if late.deadline is not None and late.deadline <= now]:
            for fetch in {upload.fetch for upload in promotion.waiting if upload.host_slot is None}:
                fetch.time_out()
            if self._uploads.is_any_hung(promotion.waiting):
                self._give_up_all()
            self.give_up(promotion, Reason.DEADLINE)

    def give_up(self, promotion: Promotion, reason: Reason) -> None:
        """End a promotion for *reason*, without the blocks that have not arrived."""
        if self._backlogs.drop(promotion):
            promotion.failure = reason
        left: dict[GroupTiers, list[tuple[int, Upload]]] = {group: [] for group in self._groups}
        for upload in promotion.waiting:
            place = next(i for i, (waiter, _) in enumerate(upload.waiters) if waiter is promotion)
            left[upload.group].append((upload.waiters.pop(place)[1], upload))
        promotion.waiting.clear()
        for group, blocks in left.items():
            if blocks:
                promotion.failure = reason
                blocks.sort(key=lambda block: block[0])
                table, ids = np.frombuffer(promotion.tables[group.id], np.int32), [block_id for block_id, _ in blocks]
                group.pool.release(table[ids])
                table[ids] = NO_SLOT
                self._uploads.drop([upload for _, upload in blocks if not upload.waiters])
        self._copy_kept_back(promotion)
        self._finish_if_arrived(promotion)

    def _give_up_all(self) -> None:
        """Give up all promotions, because they all need the lane (copy queue) to the device, which hangs."""
        for promotion in list(self._waiting):
            self.give_up(promotion, Reason.DEADLINE)
        self._uploads.on_lane_hung()

    def on_released(self, promotion: Promotion) -> None:
        """Refresh the device blocks of a split hit, so that its last block is evicted first and its first block last.

        Call this after releasing the promotion's leases, if the request has not computed the blocks before
        `Promotion.start`. Does nothing if the hit is not split.
        """
        for group in self._groups if promotion.start else ():
            _refresh_device(promotion, group, range(promotion.num_tokens // group.block_size))

    def num_leases(self, group: GroupTiers) -> int:
        """Return how many of the group's blocks are being loaded. Each of these loads leases its target slot.

        The leases of the promotions that wait for a block are not counted.
        """
        return self._uploads.num_leases(group)

    def num_waiting_leases(self, group: GroupTiers) -> int:
        """Return the number of leases that unfinished promotions hold on the group's device slots."""
        return sum(slot != NO_SLOT for promotion in self._waiting for slot in promotion.tables[group.id])

    def num_to_come(self, promotion: Promotion) -> list[int]:
        """Return for each group how many of the promotion's blocks still wait in its backlog."""
        return self._backlogs.num_left(promotion)

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent, for example if a promotion waits for no block."""
        self._uploads.check()
        self._backlogs.check()
        under_way = set(self._uploads)
        for promotion in self._waiting:
            assert promotion.waiting or promotion in self._backlogs, "a promotion waits for nothing"
            assert promotion.waiting <= under_way, "a promotion waits for a block that is not in flight"
        assert set(self._backlogs) <= self._waiting, "a promotion that is done has queued blocks"
        assert self._kept_back.keys() <= set(self._backlogs), "blocks are kept back for a promotion without a backlog"

    def _lease_what_is_there(self, promotion: Promotion, slots: Sequence[npt.NDArray[np.int32]]) -> list[BlockIds]:
        """Lease the blocks that are on the device or already in flight; return for each group the other blocks.

        *slots* has the device slot of each block, or ABSENT. No new slots are taken.
        """
        missing: list[BlockIds] = []
        for group, found in zip(self._groups, slots, strict=True):
            promotion.tables[group.id].frombytes(found.tobytes())
            absent = absent_blocks(found, group.needed(promotion.num_tokens, promotion.start))
            group.pool.lease(found[found != ABSENT] if len(absent) else found)
            if len(absent) and self._uploads.has_any(group):
                names = names_of(promotion.chain, group.attention, absent)
                coming = self._uploads.are_in_flight(group, names)
                joined = [self._uploads.find(group, names[place]) for place in np.flatnonzero(coming).tolist()]
                _join(promotion, group, absent[coming], [upload for upload in joined if upload is not None])
                absent = absent[~coming]
            missing.append(absent)
        return missing

    def _copy_partial(self, promotion: Promotion, partial: PartialHit) -> None:
        """Copy the block of a partial hit into a new slot of the request, in all groups or in none.

        The copy runs on the compute stream, after the kernels that wrote the block and before those that continue it.
        """
        sources = [(group, slot) for group in self._groups if (slot := group.pool.find(partial.name)) is not None]
        if len(sources) < len(self._groups):
            return
        for group, source in sources:  # lent, not leased: sharing a few tokens must not make the block recent
            group.pool.lend([source])
        if all(group.pool.num_free > 0 for group in self._groups):
            for group, source in sources:
                target = group.slots.take(1, self._windows[group.id].num_blocks)
                assert target is not None, "fewer free slots than a moment ago"
                group.memory.copy(source, target[0])
                promotion.tables[group.id].append(target[0])
            promotion.num_copied = partial.num_tokens
        for group, source in sources:
            group.pool.put_back([source])
        if promotion.num_copied and partial.is_used_up:
            for group, source in sources:
                if group.pool.is_free(source):
                    group.slots.evict([source], EvictionCause.SUPERSEDED)

    def _start_more(self) -> None:
        """Start to load queued blocks, those of the oldest promotion first."""
        num_left = PART
        for promotion in self._backlogs:
            while num_left > 0 and promotion in self._backlogs:
                limit = num_left
                if promotion not in self._kept_back:
                    limit = min(limit, MAX_IN_FLIGHT - len(promotion.waiting))
                num_started = self._start_part(promotion, limit) if limit > 0 else 0
                if not num_started:
                    break
                num_left -= num_started
        self.could_start_more = num_left <= 0
        for promotion in [there for there in self._kept_back if there not in self._backlogs]:
            if promotion.waiting:
                promotion.gate = self._uploads.start_by_layers(self._kept_back[promotion])
            if promotion.gate is None:
                self._copy_kept_back(promotion)
            else:
                del self._kept_back[promotion]

    def _start_part(self, promotion: Promotion, limit: int) -> int:
        """Start to load up to *limit* of the promotion's queued blocks; return how many blocks left the queue."""
        group, ids = self._backlogs.first(promotion, limit)
        names = names_of(promotion.chain, group.attention, ids)
        here = group.pool.find_all(names)
        if (here != ABSENT).any():  # a request has computed them in the meantime
            self._use(promotion, group, ids[here != ABSENT], here[here != ABSENT])
            return int(np.count_nonzero(here != ABSENT))
        if group.pool.num_free < 0:  # spills lease some of the reserved slots for a short time
            return 0
        sources, wanted = self._backlogs.take(promotion, group, ids)
        taken = group.slots.take(len(ids), self._windows[group.id].num_blocks)
        assert taken is not None, "fewer slots are free than were reserved"
        uploads = self._uploads.start(group, names, taken.tolist(), sources)
        for waiter, is_wanted in wanted:
            joined = uploads
            if not is_wanted.all():
                joined = [uploads[place] for place in np.flatnonzero(is_wanted).tolist()]
            _join(waiter, group, ids[is_wanted], joined)
            if waiter is not promotion:
                self._copy_kept_back(waiter)
        is_by_layers = promotion in self._kept_back
        if is_by_layers and any(upload.host_slot is None for upload in uploads):  # some have left host memory
            self._copy_kept_back(promotion)
        if promotion in self._kept_back:
            self._kept_back[promotion] += uploads
        else:
            self._uploads.copy_up(uploads)
        return len(ids)

    def _use(self, promotion: Promotion, group: GroupTiers, ids: BlockIds, slots: npt.NDArray[np.int32]) -> None:
        """Give queued blocks that are already on the device, in *slots*, to all promotions that want them."""
        wanted = self._backlogs.discard(promotion, group, ids)
        for waiter, is_wanted in wanted:
            group.pool.lease(slots[is_wanted])
            np.frombuffer(waiter.tables[group.id], np.int32)[ids[is_wanted]] = slots[is_wanted]
        for waiter, _ in wanted:
            self._finish_if_arrived(waiter)

    def _copy_kept_back(self, promotion: Promotion) -> None:
        """Start the copies that were held back for layer-by-layer loading, which is no longer possible."""
        self._uploads.copy_up(upload for upload in self._kept_back.pop(promotion, ()) if upload.waiters)

    def _note_depths(self, promotion: Promotion, blocks: Sequence[BlockIds], below: Sequence[Places]) -> None:
        """Record in `Promotion.depths` from which tier each queued block and each block in flight comes."""
        depths = np.frombuffer(promotion.depths, np.uint8)
        under_way = [
            (block_id, upload)
            for upload in promotion.waiting
            for waiter, block_id in upload.waiters
            if waiter is promotion
        ]
        for group, ids, places_below in zip(self._groups, blocks, below, strict=True):
            sources = np.full(len(ids), Tier.HOST.depth, np.uint8)
            sources[places_below < 0] = Tier.DISK.depth
            sources[places_below == ON_REMOTE] = Tier.REMOTE.depth
            joined = [(block_id, upload.source.depth) for block_id, upload in under_way if upload.group is group]
            all_ids = np.concatenate([ids, np.array([block_id for block_id, _ in joined], np.int64)])
            sources = np.concatenate([sources, np.array([depth for _, depth in joined], np.uint8)])
            step = group.block_size // promotion.chain.block_size
            for place in range(step):
                places = all_ids * step + place
                depths[places] = np.maximum(depths[places], sources)
        # Blocks at the beginning that no group needs count like the first block that a group needs.
        starts = [group.needed(promotion.num_tokens).start * group.block_size for group in self._groups]
        first = min(starts) // promotion.chain.block_size
        if first < promotion.num_blocks:
            depths[:first] = depths[first]

    def _on_resolved(self, upload: Upload, failure: Reason | None) -> None:
        """Update the promotions that wait for a block that has arrived, or that has failed with *failure*."""
        for promotion, block_id in upload.waiters:
            promotion.waiting.discard(upload)
            promotion.came_at[upload.source] = self._uploads.resolved_at
            if failure is not None:
                _leave_out(promotion, upload, block_id, failure)
                # No kind of attention can resume after a prefix that ends behind this block, so drop the later blocks.
                self._backlogs.drop(promotion, block_id * upload.group.block_size)
                if promotion not in self._backlogs:
                    self._copy_kept_back(promotion)
            self._finish_if_arrived(promotion)

    def _finish_if_arrived(self, promotion: Promotion) -> None:
        """Mark the promotion as done if it waits for no more blocks. If some have failed, shorten its prefix first."""
        if promotion.waiting or promotion.done or promotion in self._backlogs:
            return
        if promotion.failure is not None:
            self._cut(promotion, promotion.failure)
        promotion.done = True
        is_on_device = promotion.depths.count(Tier.DEVICE.depth, 0, promotion.num_blocks) == promotion.num_blocks
        # Leasing has made the device blocks recent. If all blocks were there, the lower tiers need to know of the use
        # only if other machines share them.
        if not is_on_device or self._residency.lower.hints.can_ask:
            from_disk = (np.frombuffer(promotion.depths, np.uint8) == Tier.DISK.depth).tobytes()
            for group in self._groups:
                self._refreshes.add(promotion.chain, group, group.needed(promotion.num_tokens), from_disk)
        self._waiting.discard(promotion)
        for group, table in zip(self._groups, promotion.tables, strict=True):
            group.num_held += int(np.count_nonzero(np.array(table, np.int32) != NO_SLOT))

    def _cut(self, promotion: Promotion, failure: Reason) -> None:
        """Shorten the prefix so that the request can resume after it with the blocks that have arrived."""
        tables = [np.array(table, np.int32) for table in promotion.tables]

        def first_hole(group_id: int, start: int, end: int) -> int:
            start = max(start, promotion.start // self._groups[group_id].block_size)
            holes = tables[group_id][start:end] == NO_SLOT
            return start + int(holes.argmax()) if holes.any() else end

        usable = longest_hit(promotion.num_tokens, self._attentions, first_hole)
        for group, table in zip(self._groups, tables, strict=True):
            needed = group.needed(usable)
            unneeded = table.copy()
            unneeded[needed.start : needed.stop] = NO_SLOT
            group.pool.release(unneeded[unneeded != NO_SLOT][::-1])
            end = promotion.num_tokens // group.block_size  # a copied block without a name may follow
            behind = np.flatnonzero(unneeded[needed.stop : end] != NO_SLOT) + needed.stop
            table[: needed.start] = NO_SLOT
            promotion.tables[group.id] = array("i", table[: needed.stop].tobytes())
            # Another request may have computed the missing block in the meantime, and ended. Make the whole prefix more
            # recent, its front most of all, so that the blocks behind the missing one are evicted before it.
            if promotion.start:
                _refresh_device(promotion, group, range(usable // group.block_size))
            if len(behind):
                _refresh_device(promotion, group, range(needed.stop, int(behind[-1]) + 1))
        promotion.misses = promotion.misses.cut(promotion.num_tokens, failure)
        promotion.num_tokens, promotion.num_copied = usable, 0


def _join(promotion: Promotion, group: GroupTiers, ids: BlockIds, uploads: Sequence[Upload]) -> None:
    """Make a promotion wait for *uploads*, which load its blocks *ids*."""
    slots = np.array([upload.device_slot for upload in uploads], np.int32)
    group.pool.lease(slots)
    np.frombuffer(promotion.tables[group.id], np.int32)[ids] = slots
    promotion.waiting.update(uploads)
    for block_id, upload in zip(ids.tolist(), uploads, strict=True):
        upload.waiters.append((promotion, block_id))


def _leave_out(promotion: Promotion, upload: Upload, block_id: int, failure: Reason) -> None:
    promotion.tables[upload.group.id][block_id] = NO_SLOT
    promotion.failure = failure
    upload.group.pool.release([upload.device_slot])


def _refresh_device(promotion: Promotion, group: GroupTiers, blocks: range) -> None:
    """Make the prefix's device blocks the most recent ones, with the first block as the most recent of all."""
    slots = group.pool.find_all(promotion.chain.names_of(group.block_size, blocks))[::-1]
    group.pool.refresh(slots[slots != ABSENT])
