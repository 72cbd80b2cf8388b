"""Backlogs: blocks that promotions have still to bring up, and for which nothing is under way yet."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.block_pool import ABSENT
from kvtier.tiers.lower.residency import Residency
from kvtier.tiers.naming.block_hash import BlockChain, BlockName
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.tiers.up.promotion import Promotion

BlockIds = npt.NDArray[np.int64]


class Backlog:
    """The blocks of one promotion, by group, with the host slots of those that are in host memory, which are leased."""

    def __init__(self, blocks: Sequence[BlockIds], host_slots: Sequence[npt.NDArray[np.int32]]) -> None:
        self._is_left: list[npt.NDArray[np.bool_]] = []  # [group][block id]
        self._host_slots: list[npt.NDArray[np.int32]] = []  # [group][block id]
        self.num_left = list(map(len, blocks))
        for ids, slots in zip(blocks, host_slots, strict=True):
            num_blocks = int(ids[-1]) + 1 if len(ids) else 0
            self._is_left.append(np.zeros(num_blocks, np.bool_))
            self._is_left[-1][ids] = True
            self._host_slots.append(np.full(num_blocks, ABSENT, np.int32))
            self._host_slots[-1][ids] = slots

    def blocks(self, group_id: int) -> BlockIds:
        """The group's blocks, in order."""
        return np.flatnonzero(self._is_left[group_id])

    def has(self, group_id: int, ids: BlockIds) -> npt.NDArray[np.bool_]:
        """For each of the blocks whether it is here."""
        is_left = self._is_left[group_id]
        found = np.zeros(len(ids), np.bool_)
        known = ids < len(is_left)
        found[known] = is_left[ids[known]]
        return found

    def host_slots(self, group_id: int, ids: BlockIds) -> npt.NDArray[np.int32]:
        """The blocks' host slots, ABSENT for those that come from disk."""
        return self._host_slots[group_id][ids]

    def remove(self, group_id: int, ids: BlockIds) -> None:
        """These are not here any more; the leases on their host slots are the caller's."""
        self._is_left[group_id][ids] = False
        self.num_left[group_id] -= len(ids)


class Backlogs:
    """The backlogs of all promotions, in the order in which these began. Owned by the cache's thread.

    A block has one slot reserved on the device (`BlockPool.reserve`), however many promotions want it; it is under way
    or here, never both.
    """

    def __init__(self, groups: Sequence[AttentionGroup], residency: Residency) -> None:
        self._groups = groups
        self._residency = residency
        self._backlogs: dict[Promotion, Backlog] = {}

    def __contains__(self, promotion: Promotion) -> bool:
        return promotion in self._backlogs

    def __iter__(self) -> Iterator[Promotion]:
        return iter(list(self._backlogs))

    def add(
        self, promotion: Promotion, blocks: Sequence[BlockIds], host_slots: Sequence[npt.NDArray[np.int32]]
    ) -> None:
        """Lease the blocks' host slots (ABSENT: none), and reserve device slots for them."""
        for group_id, (ids, slots) in enumerate(zip(blocks, host_slots, strict=True)):
            is_new = ~self.coming(promotion.chain, group_id, ids)
            self._residency.device.pools[group_id].reserve(int(np.count_nonzero(is_new)))
            if self._residency.host is not None:
                self._residency.host.pools[group_id].lease(slots[slots != ABSENT])
        if any(map(len, blocks)):
            self._backlogs[promotion] = Backlog(blocks, host_slots)

    def coming(self, chain: BlockChain, group_id: int, ids: BlockIds) -> npt.NDArray[np.bool_]:
        """For each of the chain's blocks whether some promotion has it still to bring up."""
        found = np.zeros(len(ids), np.bool_)
        for promotion, backlog in self._backlogs.items():
            if shared := self._num_shared(chain, promotion.chain, group_id):
                found |= backlog.has(group_id, ids) & (ids < shared)
        return found

    def first(self, promotion: Promotion, most: int) -> tuple[int, BlockIds]:
        """Up to *most* of a promotion's blocks, the first of the first group that has any left."""
        backlog = self._backlogs[promotion]
        group_id = next(group_id for group_id, num_left in enumerate(backlog.num_left) if num_left)
        return group_id, backlog.blocks(group_id)[:most]

    def take(
        self, promotion: Promotion, group_id: int, ids: BlockIds
    ) -> tuple[npt.NDArray[np.int32], list[tuple[Promotion, npt.NDArray[np.bool_]]]]:
        """Take these blocks of a promotion's out of all backlogs; the reservation ends.

        Their host slots, whose leases are the caller's (ABSENT: it is not in host memory), and who wanted which.
        """
        host = self._residency.host
        sources = self._backlogs[promotion].host_slots(group_id, ids)
        wanted = []
        for other, backlog in list(self._backlogs.items()):
            shared = self._num_shared(promotion.chain, other.chain, group_id)
            is_wanted = backlog.has(group_id, ids) & (ids < shared)
            if not is_wanted.any():
                continue
            wanted.append((other, is_wanted))
            if other is not promotion and host is not None:
                self._release(group_id, backlog.host_slots(group_id, ids[is_wanted]))
            self._remove(other, group_id, ids[is_wanted])
        self._residency.device.pools[group_id].unreserve(len(ids))
        if host is not None and (sources == ABSENT).any():  # it may have come there meanwhile
            places = np.flatnonzero(sources == ABSENT)
            step = self._groups[group_id].block_size // promotion.chain.block_size
            names = [promotion.chain.names[(i + 1) * step - 1] for i in ids[places].tolist()]
            sources[places] = found = host.pools[group_id].find_all(names)
            host.pools[group_id].lease(found[found != ABSENT])
        return sources, wanted

    def drop(self, promotion: Promotion, num_tokens: int = 0) -> bool:
        """A promotion does not bring up what comes after its first *num_tokens* tokens; whether that was anything."""
        backlog = self._backlogs.get(promotion)
        if backlog is None:
            return False
        any_dropped = False
        for group_id, group in enumerate(self._groups):
            ids = backlog.blocks(group_id)
            ids = ids[(ids + 1) * group.block_size > num_tokens]
            if len(ids):
                any_dropped = True
                self._release(group_id, backlog.host_slots(group_id, ids))
                self._remove(promotion, group_id, ids)
                is_unwanted = ~self.coming(promotion.chain, group_id, ids)
                self._residency.device.pools[group_id].unreserve(int(np.count_nonzero(is_unwanted)))
        return any_dropped

    def num_left(self, promotion: Promotion) -> list[int]:
        """By group, how many blocks a promotion has here."""
        backlog = self._backlogs.get(promotion)
        return [0 for _ in self._groups] if backlog is None else list(backlog.num_left)

    def num_queued(self, group_id: int) -> tuple[int, int]:
        """How many blocks of the group are to be read from disk, and how many to be copied to the device."""
        num_read = num_copied = 0
        for backlog in self._backlogs.values():
            slots = backlog.host_slots(group_id, backlog.blocks(group_id))
            num_read += int(np.count_nonzero(slots == ABSENT))
            num_copied += len(slots)
        return num_read, num_copied

    def num_host_leases(self, group_id: int) -> int:
        """Leases on the host's slots of the group."""
        num_read, num_copied = self.num_queued(group_id)
        return num_copied - num_read

    def check(self) -> None:
        """Raise AssertionError if the device does not keep a slot for each block, or a backlog is empty."""
        assert all(any(backlog.num_left) for backlog in self._backlogs.values()), "a backlog is empty"
        for group_id, (group, pool) in enumerate(zip(self._groups, self._residency.device.pools, strict=True)):
            names: set[BlockName] = set()
            for promotion, backlog in self._backlogs.items():
                ids = backlog.blocks(group_id).tolist()
                assert len(ids) == backlog.num_left[group_id], "the blocks of a backlog were miscounted"
                names.update(promotion.chain.names_of(group.block_size, range(i, i + 1))[0] for i in ids)
            assert pool.num_reserved == len(names), "slots are reserved for other blocks than are to come"

    def _remove(self, promotion: Promotion, group_id: int, ids: BlockIds) -> None:
        backlog = self._backlogs[promotion]
        backlog.remove(group_id, ids)
        if not any(backlog.num_left):
            del self._backlogs[promotion]

    def _release(self, group_id: int, host_slots: npt.NDArray[np.int32]) -> None:
        """End the leases, the prefix's tail first."""
        if self._residency.host is not None:
            self._residency.host.pools[group_id].release(host_slots[host_slots != ABSENT][::-1])

    def _num_shared(self, one: BlockChain, other: BlockChain, group_id: int) -> int:
        """How many of the group's first blocks two chains have in common. Blocks of one name have one place in every
        chain, and one name in common means all before it."""
        num_names = min(len(one.names), len(other.names))
        if one is not other:
            num_names = bisect_left(range(num_names), True, key=lambda i: one.names[i] != other.names[i])
        return num_names * one.block_size // self._groups[group_id].block_size
