"""Backlogs: the blocks that promotions need, and whose copies to the device have not been started."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.tiers.lower.lower_tiers import ON_REMOTE, Fetch, LowerTiers, OnFetched, Places
from kvtier.tiers.naming.block_hash import BlockChain, BlockName
from kvtier.tiers.naming.named_blocks import BlockIds, blocks_of, names_of
from kvtier.tiers.naming.tier import Tier
from kvtier.tiers.residency import GroupTiers
from kvtier.tiers.up.promotion import Promotion
from kvtier.transfer.transfer_engine import Route

NO_PLACE = -1
# The fetch that leases a block in host memory, the block's index in the fetch, and the tier where it was found.
Source = tuple[Fetch, int, Tier]


class Backlog:
    """The queued blocks of one promotion in one attention group, with leases on those in host memory."""

    def __init__(
        self, group: GroupTiers, ids: BlockIds, fetch: Fetch | None, fetched: BlockIds, remote: BlockIds
    ) -> None:
        """Create a backlog of blocks that are in host memory, on disk or in the remote tier.

        Args:
            group: Attention group of the blocks.
            ids: Ids of all blocks, in ascending order. The blocks in neither *fetched* nor *remote* are on disk.
            fetch: The fetch that leases the blocks in host memory; None if there are no such blocks.
            fetched: Ids of the blocks in host memory, in the order of the fetch.
            remote: Ids of the blocks that are only in the remote tier.
        """
        num_blocks = int(ids[-1]) + 1 if len(ids) else 0
        self.group = group
        self.num_left = len(ids)
        self._fetch = fetch
        self._is_left = np.zeros(num_blocks, np.bool_)  # [block id]
        self._is_left[ids] = True
        self._places = np.full(num_blocks, NO_PLACE, np.int64)  # [block id] index in the fetch, or NO_PLACE
        self._places[fetched] = np.arange(len(fetched))
        self.is_remote = np.zeros(num_blocks, np.bool_)  # [block id] whether only the remote tier has it
        self.is_remote[remote] = True

    @property
    def blocks(self) -> BlockIds:
        """Ids of the blocks that are still queued, in ascending order."""
        return np.flatnonzero(self._is_left)

    def has(self, ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Return for each of the blocks *ids* whether its copy to the device has yet to be started."""
        found = np.zeros(len(ids), np.bool_)
        known = ids < len(self._is_left)
        found[known] = self._is_left[ids[known]]
        return found

    @property
    def num_fetched(self) -> int:
        """Number of queued blocks that were found in host memory."""
        return int(np.count_nonzero(self._places[self._is_left] != NO_PLACE))

    @property
    def num_remote(self) -> int:
        """Number of queued blocks that were found only in the remote tier."""
        return int(np.count_nonzero(self._is_left & self.is_remote))

    def sources(self, ids: BlockIds) -> list[Source | None]:
        """Return for each block the lease on it in host memory (`Source`); None if the block is not leased."""
        fetch = self._fetch
        if fetch is None:
            return [None] * len(ids)
        return [
            None if place == NO_PLACE or place in fetch.failures else (fetch, place, Tier.HOST)
            for place in self._places[ids].tolist()
        ]

    def release(self, ids: BlockIds) -> None:
        """Release the leases on these blocks in host memory, the end of the prefix first."""
        places = self._places[ids]
        fetched = places[places != NO_PLACE]
        if self._fetch is not None and len(fetched):
            self._fetch.release(fetched[::-1])

    def remove(self, ids: BlockIds) -> None:
        """Remove these blocks from the queue. Their leases then belong to the caller."""
        self._is_left[ids] = False
        self.num_left -= len(ids)


class Backlogs:
    """The backlogs of all promotions, in the order in which the promotions began.

    One device slot is reserved for each queued block (`BlockPool.reserve`), no matter how many promotions want the
    block. A queued block is never in flight. Owned by the cache's thread.
    """

    def __init__(self, groups: Sequence[GroupTiers], lower: LowerTiers, on_fetched: OnFetched) -> None:
        """Create an empty queue of blocks to load to the device.

        *on_fetched* is called when a block has arrived in host memory or cannot be fetched; see `LowerTiers.fetch`.
        """
        self._groups = groups
        self._lower = lower
        self._on_fetched = on_fetched
        self._backlogs: dict[Promotion, list[Backlog]] = {}  # by group; only promotions that have blocks left

    def __contains__(self, promotion: Promotion) -> bool:
        return promotion in self._backlogs

    def __iter__(self) -> Iterator[Promotion]:
        return iter(list(self._backlogs))

    def add(self, promotion: Promotion, blocks: Sequence[BlockIds], below: Sequence[Places]) -> None:
        """Queue *blocks* of a promotion: reserve device slots, and lease the blocks that are in host memory.

        *blocks* has the block ids for each attention group, and *below* the places of these blocks in the lower tiers.
        """
        backlogs = []
        for group, ids, places in zip(self._groups, blocks, below, strict=True):
            is_new = ~self.are_queued(promotion.chain, group, ids)
            group.pool.reserve(int(np.count_nonzero(is_new)))
            is_in_host = places >= 0
            fetched, fetch = ids[is_in_host], None
            if len(fetched):
                wanted, found = blocks_of(promotion.chain, group.attention, fetched), places[is_in_host]
                fetch = self._lower.fetch(group.id, wanted, self._on_fetched, found)
            backlogs.append(Backlog(group, ids, fetch, fetched, ids[places == ON_REMOTE]))
        if any(backlog.num_left for backlog in backlogs):
            self._backlogs[promotion] = backlogs

    def are_queued(self, chain: BlockChain, group: GroupTiers, ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Return for each of the blocks *ids* of the prompt *chain* whether it is queued to be loaded to the device."""
        found = np.zeros(len(ids), np.bool_)
        for promotion, backlogs in self._backlogs.items():
            if shared := _num_shared(chain, promotion.chain, group):
                found |= backlogs[group.id].has(ids) & (ids < shared)
        return found

    def first(self, promotion: Promotion, limit: int) -> tuple[GroupTiers, BlockIds]:
        """Return the first group in which the promotion has queued blocks, and up to *limit* of these blocks."""
        backlog = next(backlog for backlog in self._backlogs[promotion] if backlog.num_left)
        return backlog.group, backlog.blocks[:limit]

    def take(
        self, promotion: Promotion, group: GroupTiers, ids: BlockIds
    ) -> tuple[list[Source], list[tuple[Promotion, npt.NDArray[np.bool_]]]]:
        """Remove these blocks from all backlogs, so that the caller can copy them to the device.

        Also starts to fetch the blocks that are not in host memory, and ends the reservations of device slots.

        Returns:
            A pair: the source of each block, whose leases then belong to the caller; and the promotions that wanted
            some of the blocks, each with a mask of the blocks that it wanted.
        """
        backlog = self._backlogs[promotion][group.id]
        found = backlog.sources(ids)
        lacking = [place for place, source in enumerate(found) if source is None]
        if lacking:
            wanted_blocks = blocks_of(promotion.chain, group.attention, ids[lacking])
            fetch = self._lower.fetch(group.id, wanted_blocks, self._on_fetched)
            for number, place in enumerate(lacking):
                found[place] = fetch, number, Tier.REMOTE if backlog.is_remote[ids[place]] else Tier.DISK
        wanted = self._leave(promotion, group, ids)
        return [source for source in found if source is not None], wanted

    def discard(
        self, promotion: Promotion, group: GroupTiers, ids: BlockIds
    ) -> list[tuple[Promotion, npt.NDArray[np.bool_]]]:
        """Remove these blocks from all backlogs, because they are already on the device, and release their leases.

        Returns:
            The promotions that wanted some of the blocks, each with a mask of the blocks that it wanted.
        """
        self._backlogs[promotion][group.id].release(ids)
        return self._leave(promotion, group, ids)

    def drop(self, promotion: Promotion, num_tokens: int = 0) -> bool:
        """Remove a promotion's queued blocks after its first *num_tokens* tokens; return whether there were any."""
        any_dropped = False
        for backlog in self._backlogs.get(promotion, ()):
            group, ids = backlog.group, backlog.blocks
            ids = ids[(ids + 1) * group.block_size > num_tokens]
            if len(ids):
                any_dropped = True
                backlog.release(ids)
                self._remove(promotion, group, ids)
                is_unwanted = ~self.are_queued(promotion.chain, group, ids)
                group.pool.unreserve(int(np.count_nonzero(is_unwanted)))
        return any_dropped

    def num_left(self, promotion: Promotion) -> list[int]:
        """Return the number of a promotion's queued blocks for each attention group."""
        backlogs = self._backlogs.get(promotion)
        return [0 for _ in self._groups] if backlogs is None else [backlog.num_left for backlog in backlogs]

    def num_queued(self, group: GroupTiers) -> dict[Route, int]:
        """Return for each route (pair of tiers) how many of the group's queued blocks it has to copy."""
        backlogs = [backlogs[group.id] for backlogs in self._backlogs.values()]
        num_copied = sum(backlog.num_left for backlog in backlogs)
        num_remote = sum(backlog.num_remote for backlog in backlogs)
        num_fetched = sum(backlog.num_fetched for backlog in backlogs)
        return {
            Route.DISK_TO_HOST: num_copied - num_fetched - num_remote,
            Route.REMOTE_TO_HOST: num_remote,
            Route.HOST_TO_DEVICE: num_copied,
        }

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent, such as a queued block without a reserved device slot."""
        for group in self._groups:
            names: set[BlockName] = set()
            for promotion, backlogs in self._backlogs.items():
                assert any(backlog.num_left for backlog in backlogs), "a backlog is empty"
                ids = backlogs[group.id].blocks
                assert len(ids) == backlogs[group.id].num_left, "the blocks of a backlog were miscounted"
                names.update(names_of(promotion.chain, group.attention, ids))
            assert group.pool.num_reserved == len(names), "the reserved slots do not match the queued blocks"

    def _remove(self, promotion: Promotion, group: GroupTiers, ids: BlockIds) -> None:
        backlogs = self._backlogs[promotion]
        backlogs[group.id].remove(ids)
        if not any(backlog.num_left for backlog in backlogs):
            del self._backlogs[promotion]

    def _leave(
        self, promotion: Promotion, group: GroupTiers, ids: BlockIds
    ) -> list[tuple[Promotion, npt.NDArray[np.bool_]]]:
        """Remove blocks of *promotion* from the queues of all promotions, and end the reservations of device slots.

        Other promotions lose their leases on these blocks in host memory. The caller must use or release the leases of
        *promotion*. Returns the promotions that wanted some of the blocks, each with a mask of those blocks.
        """
        wanted = []
        for other, backlogs in list(self._backlogs.items()):
            shared = _num_shared(promotion.chain, other.chain, group)
            is_wanted = backlogs[group.id].has(ids) & (ids < shared)
            if not is_wanted.any():
                continue
            wanted.append((other, is_wanted))
            if other is not promotion:
                backlogs[group.id].release(ids[is_wanted])
            self._remove(other, group, ids[is_wanted])
        group.pool.unreserve(len(ids))
        return wanted


def _num_shared(one: BlockChain, other: BlockChain, group: GroupTiers) -> int:
    """Return how many of the group's blocks are the same at the beginning of both prompts.

    Names of blocks depend on all tokens before them, so a binary search finds the first name that differs.
    """
    num_names = min(len(one.names), len(other.names))
    if one is not other:
        num_names = bisect_left(range(num_names), True, key=lambda i: one.names[i] != other.names[i])
    return num_names * one.block_size // group.block_size
