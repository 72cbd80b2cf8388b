"""Hits: the questions about a hit: where its blocks are now, how much of it fits, what it has to move."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.group_tiers import GroupTiers
from kvtier.tiers.lower.lower_tiers import ON_REMOTE, Places
from kvtier.tiers.naming.groups import alignment, longest_hit
from kvtier.tiers.naming.named_blocks import BlockIds
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.tiers.residency import Residency
from kvtier.tiers.up.backlog import Backlogs
from kvtier.tiers.up.load_planner import Demand, Moves
from kvtier.tiers.up.promotion import Hit
from kvtier.tiers.up.uploads import Uploads
from kvtier.transfer.transfer_engine import Route, TransferEngine

LOADS = (Route.DISK_TO_HOST, Route.REMOTE_TO_HOST, Route.HOST_TO_DEVICE)


class Hits:
    """Answers from what a look-up found, as long as no block has moved since; else it looks again. Changes nothing.
    Owned by the cache's thread."""

    def __init__(self, residency: Residency, uploads: Uploads, backlogs: Backlogs, transfers: TransferEngine) -> None:
        self._residency = residency
        self._groups = residency.groups
        self._attentions = [group.attention for group in residency.groups]
        self._alignment = alignment(self._attentions)
        self._uploads = uploads
        self._backlogs = backlogs
        self._transfers = transfers

    def device_slots(self, hit: Hit) -> Sequence[npt.NDArray[np.int32]]:
        """For each group the device slots of the blocks that the hit needs, ABSENT for blocks in a tier below."""
        if hit.as_of == self._residency.num_changes:
            return hit.device_slots
        return [group.pool.find_all(group.names_in(hit.chain, group.needed(hit.num_tokens))) for group in self._groups]

    def slots_from_start(self, hit: Hit) -> list[npt.NDArray[np.int32]]:
        """`device_slots` without the blocks before the start of a split hit."""
        return [
            found[group.needed(hit.num_tokens, hit.start).start - group.needed(hit.num_tokens).start :]
            for group, found in zip(self._groups, self.device_slots(hit), strict=True)
        ]

    def below(self, hit: Hit, blocks: Sequence[BlockIds]) -> list[Places]:
        """For each group the places below of these blocks of the hit, none of which is on the device. A block that has
        left since it was found is looked for on disk."""
        if hit.as_of == self._residency.num_changes:
            return [
                places[ids - group.needed(hit.num_tokens).start]
                for group, places, ids in zip(self._groups, hit.below, blocks, strict=True)
            ]
        return [
            self._residency.lower.find(group.id, group.names_of(hit.chain, ids))
            for group, ids in zip(self._groups, blocks, strict=True)
        ]

    def on_device(self, hit: Hit) -> Hit:
        """As much of the hit as is on the device."""
        end = hit.num_tokens
        for group, found in zip(self._groups, self.device_slots(hit), strict=True):
            absent = found == ABSENT
            if absent.any():
                end = min(end, (group.needed(hit.num_tokens).start + int(absent.argmax())) * group.block_size)
        return self.shorter(replace(hit, start=0), end)

    def computed(self, hit: Hit) -> range:
        """The places in the chain of the blocks before the start of a split hit that are not on the device."""
        return range(self.on_device(hit).num_blocks, hit.start // hit.chain.block_size) if hit.start else range(0)

    def shorter(self, hit: Hit, num_tokens: int) -> Hit:
        """The same hit with at most *num_tokens* tokens, and without a partial block. A split hit keeps its start."""

        def first_hole(group_id: int, start: int, end: int) -> int:
            group = self._groups[group_id]
            return start + self._residency.locate(group, group.names_in(hit.chain, range(start, end))).num_found

        is_fresh = hit.as_of == self._residency.num_changes and not self._residency.is_cut_off
        if is_fresh and not any(
            attention.forgets for attention in self._attentions
        ):  # then every prefix of a hit is one
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

    def still_there(self, hit: Hit) -> Hit:
        """As much of the hit as can be resumed now."""
        if hit.as_of == self._residency.num_changes and not self._residency.is_cut_off:
            return hit
        shorter = self.shorter(hit, hit.num_tokens)
        if shorter.num_tokens == hit.num_tokens:
            return shorter
        why = self._residency.why_missing([hit.chain.names[shorter.num_blocks]])
        return replace(shorter, misses=hit.misses.cut(hit.num_tokens, why))

    def fitting(self, hit: Hit) -> tuple[Hit, list[npt.NDArray[np.int32]]]:
        """As much of the hit as the device has slots for, and what `slots_from_start` gives for that."""
        slots = self.slots_from_start(hit)
        while (deficit := self._deficit(hit, slots)) > 0:
            misses = hit.misses.cut(hit.num_tokens, Reason.CAPACITY)
            hit = replace(self.shorter(hit, hit.num_tokens - deficit), misses=misses)
            slots = self.slots_from_start(hit)
        return hit, slots

    def resident_and_missing(self, hit: Hit) -> list[tuple[npt.NDArray[np.int32], int]]:
        """For each group the device slots that have blocks of the hit, and how many slots promoting it would take."""
        result = []
        for group, found in zip(self._groups, self.device_slots(hit), strict=True):
            absent = absent_blocks(found, group.needed(hit.num_tokens))
            missing = len(absent) - int(np.count_nonzero(self._are_coming(hit, group, absent)))
            result.append((found[found != ABSENT], missing))
        return result

    def demand(self, hit: Hit, step: int) -> Demand | None:
        """What each prefix of the hit has to move; None if nothing. Prefixes end at multiples of *step* tokens.

        Of a group that forgets every prefix is taken to need as many blocks as the whole hit.
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
                # The first prefix that needs each block.
                places = ids * group.block_size // step + 1 - start
                places = np.ones_like(places) if group.attention.forgets else places
                for row, num_bytes in enumerate(self._to_move(hit, group, ids, below)):
                    moved[row] += np.bincount(places, num_bytes, len(ends))
        queued = self._queued_bytes()
        return Demand(
            ends, {route: Moves(row, queued[route]) for route, row in zip(LOADS, moved.cumsum(axis=1), strict=True)}
        )

    def _queued_bytes(self) -> dict[Route, int]:
        """Bytes that are to be moved by each route for promotions that have begun."""
        lower = self._residency.lower
        queued = {
            Route.DISK_TO_HOST: lower.queued_read_bytes(Tier.DISK),
            Route.REMOTE_TO_HOST: lower.queued_read_bytes(Tier.REMOTE),
            Route.HOST_TO_DEVICE: self._uploads.queued_bytes + self._transfers.pending_bytes(Route.HOST_TO_DEVICE),
        }
        for group in self._groups:
            for route, num_blocks in self._backlogs.num_queued(group).items():
                queued[route] += num_blocks * group.memory.block_bytes
        return queued

    def _deficit(self, hit: Hit, slots: Sequence[npt.NDArray[np.int32]]) -> int:
        """How many tokens fewer the hit must have, for the group that lacks most slots to hold it on the device."""
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
        """For each of these blocks of the hit whether another promotion brings it to the device."""
        coming = self._backlogs.are_coming(hit.chain, group, ids)
        if self._uploads.has_any(group):
            coming |= self._uploads.are_coming(group, group.names_of(hit.chain, ids))
        return coming

    def _to_move(self, hit: Hit, group: GroupTiers, ids: BlockIds, below: Places) -> list[npt.NDArray[np.int64]]:
        """For each of the blocks, none on the device, the bytes to move by each of `LOADS`."""
        is_remote = below == ON_REMOTE
        are_moved = [(below < 0) & ~is_remote, is_remote, np.ones(len(ids), np.bool_)]
        coming = self._are_coming(hit, group, ids)  # counted with what is queued, which it waits for
        num_bytes = np.where(coming, 1, group.memory.block_bytes)
        return [np.where(is_moved, num_bytes, 0) for is_moved in are_moved]


def absent_blocks(found: npt.NDArray[np.int32], needed: range) -> BlockIds:
    """Those of the *needed* blocks that are not on the device; *found* has a device slot or ABSENT for each."""
    return needed.start + np.flatnonzero(found == ABSENT)
