"""Backlogs: blocks that promotions have still to bring up, and for which nothing is under way yet."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.tiers.lower.lower_tiers import Fetch, Places, Tell
from kvtier.tiers.naming.block_hash import BlockChain, BlockName
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.tiers.naming.named_blocks import BlockIds, blocks_of
from kvtier.tiers.residency import Residency
from kvtier.tiers.up.promotion import Promotion

NO_PLACE = -1
Source = tuple[Fetch, int]  # what leases a block in host memory, and its place in that
Part = tuple[Fetch | None, BlockIds]  # a group's blocks that were found in host memory


class Backlog:
    """The blocks of one promotion, by group, and what leases those of them in host memory that were found there."""

    def __init__(self, blocks: Sequence[BlockIds], fetches: Sequence["Part"]) -> None:
        self._is_left: list[npt.NDArray[np.bool_]] = []  # [group][block id]
        self._places: list[npt.NDArray[np.int64]] = []  # [group][block id] in the group's fetch, or NO_PLACE
        self._fetches = [fetch for fetch, _ in fetches]
        self.num_left = list(map(len, blocks))
        for ids, (_, fetched) in zip(blocks, fetches, strict=True):
            num_blocks = int(ids[-1]) + 1 if len(ids) else 0
            self._is_left.append(np.zeros(num_blocks, np.bool_))
            self._is_left[-1][ids] = True
            self._places.append(np.full(num_blocks, NO_PLACE, np.int64))
            self._places[-1][fetched] = np.arange(len(fetched))

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

    def num_fetched(self, group_id: int) -> int:
        """How many of the group's blocks were in host memory."""
        return int(np.count_nonzero(self._places[group_id][self._is_left[group_id]] != NO_PLACE))

    def sources(self, group_id: int, ids: BlockIds) -> list["Source | None"]:
        """Where the blocks come from; None for those that are to be fetched."""
        fetch = self._fetches[group_id]
        if fetch is None:
            return [None] * len(ids)
        places = self._places[group_id][ids].tolist()
        return [None if place == NO_PLACE or place in fetch.failures else (fetch, place) for place in places]

    def release(self, group_id: int, ids: BlockIds) -> None:
        """End the leases on these, the prefix's tail first."""
        places = self._places[group_id][ids]
        fetch, fetched = self._fetches[group_id], places[places != NO_PLACE]
        if fetch is not None and len(fetched):
            fetch.release(fetched[::-1])

    def remove(self, group_id: int, ids: BlockIds) -> None:
        """These are not here any more; the leases on them are the caller's."""
        self._is_left[group_id][ids] = False
        self.num_left[group_id] -= len(ids)


class Backlogs:
    """The backlogs of all promotions, in the order in which these began. Owned by the cache's thread.

    A block has one slot reserved on the device (`BlockPool.reserve`), however many promotions want it; it is under way
    or here, never both.
    """

    def __init__(self, groups: Sequence[AttentionGroup], residency: Residency, tell: Tell) -> None:
        """*tell* learns what comes of blocks that are fetched, see `LowerTiers.fetch`."""
        self._groups = groups
        self._residency = residency
        self._tell = tell
        self._backlogs: dict[Promotion, Backlog] = {}

    def __contains__(self, promotion: Promotion) -> bool:
        return promotion in self._backlogs

    def __iter__(self) -> Iterator[Promotion]:
        return iter(list(self._backlogs))

    def add(self, promotion: Promotion, blocks: Sequence[BlockIds], below: Sequence[Places]) -> None:
        """Lease what is *below* in host memory already, and reserve device slots for all the blocks."""
        fetches: list[Part] = []
        for group_id, (ids, places) in enumerate(zip(blocks, below, strict=True)):
            is_new = ~self.coming(promotion.chain, group_id, ids)
            self._residency.device.pools[group_id].reserve(int(np.count_nonzero(is_new)))
            is_in_host = places >= 0
            fetched, fetch = ids[is_in_host], None
            if len(fetched):
                wanted = blocks_of(promotion.chain, self._groups[group_id], fetched)
                found = places[is_in_host]
                fetch = self._residency.lower.fetch(group_id, wanted, self._tell, found)
            fetches.append((fetch, fetched))
        if any(map(len, blocks)):
            self._backlogs[promotion] = Backlog(blocks, fetches)

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
    ) -> tuple[list[Source], list[tuple[Promotion, npt.NDArray[np.bool_]]]]:
        """Take these blocks of a promotion's out of all backlogs; the reservation ends.

        Where they come from, leased for the caller, and who wanted which. What was not in host memory is fetched.
        """
        found = self._backlogs[promotion].sources(group_id, ids)
        lacking = [place for place, source in enumerate(found) if source is None]
        if lacking:
            wanted_blocks = blocks_of(promotion.chain, self._groups[group_id], ids[lacking])
            fetch = self._residency.lower.fetch(group_id, wanted_blocks, self._tell)
            for number, place in enumerate(lacking):
                found[place] = fetch, number
        wanted = self._leave(promotion, group_id, ids)
        return [source for source in found if source is not None], wanted

    def discard(
        self, promotion: Promotion, group_id: int, ids: BlockIds
    ) -> list[tuple[Promotion, npt.NDArray[np.bool_]]]:
        """Take these blocks of a promotion's out of all backlogs, for they are on the device; who wanted which."""
        self._backlogs[promotion].release(group_id, ids)
        return self._leave(promotion, group_id, ids)

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
                backlog.release(group_id, ids)
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
        num_copied = sum(backlog.num_left[group_id] for backlog in self._backlogs.values())
        return num_copied - sum(backlog.num_fetched(group_id) for backlog in self._backlogs.values()), num_copied

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

    def _leave(
        self, promotion: Promotion, group_id: int, ids: BlockIds
    ) -> list[tuple[Promotion, npt.NDArray[np.bool_]]]:
        wanted = []
        for other, backlog in list(self._backlogs.items()):
            shared = self._num_shared(promotion.chain, other.chain, group_id)
            is_wanted = backlog.has(group_id, ids) & (ids < shared)
            if not is_wanted.any():
                continue
            wanted.append((other, is_wanted))
            if other is not promotion:
                backlog.release(group_id, ids[is_wanted])
            self._remove(other, group_id, ids[is_wanted])
        self._residency.device.pools[group_id].unreserve(len(ids))
        return wanted

    def _num_shared(self, one: BlockChain, other: BlockChain, group_id: int) -> int:
        """How many of the group's first blocks two chains have in common. Blocks of one name have one place in every
        chain, and one name in common means all before it."""
        num_names = min(len(one.names), len(other.names))
        if one is not other:
            num_names = bisect_left(range(num_names), True, key=lambda i: one.names[i] != other.names[i])
        return num_names * one.block_size // self._groups[group_id].block_size
