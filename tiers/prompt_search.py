"""PromptSearch: finds which of a prompt's blocks any tier has, for `longest_hit`."""

from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.residency import GroupTiers, Located, Residency

AT_ONCE = 256  # blocks looked up together, which takes about 0.2 ms of the owner's thread


class PromptSearch:
    """The search for the blocks of one prompt. Valid until a block enters or leaves a tier.

    Groups that forget (sliding windows, recurrent states) keep few of a prompt's blocks. In them, `longest_hit` tries
    short ranges one after another, from the prompt's end to its beginning: up to 8,192 ranges for a recurrent state
    and a prompt of 8,192 blocks. So after the first range they are looked up many at once.
    """

    def __init__(self, residency: Residency, chain: BlockChain) -> None:
        """Create a search for the blocks of *chain*."""
        self.located: dict[int, tuple[int, Located]] = {}  # [group id]: first block and locations of the last range
        self._residency = residency
        self._chain = chain
        self._kept: dict[int, _KeptBlocks] = {}  # of groups that forget and have a hole

    @property
    def num_lasting(self) -> int:
        """Number of tokens up to which the groups that do not forget have all blocks; 0 without such a group.

        Known once these groups were searched.
        """
        lasting = [group for group in self._residency.groups if not group.attention.forgets]
        return min((self.located[group.id][1].num_found * group.block_size for group in lasting), default=0)

    def num_held(self, group_id: int, end: int) -> int:
        """Return how many of the first *end* blocks come before the first that a group without forgetting lacks.

        The group was searched before. It is searched again only if the range was shorter, and had no hole.
        """
        _, found = self.located[group_id]
        was_cut = found.num_found == len(found.device_slots) < end
        return self.first_hole(group_id, 0, end) if was_cut else found.num_found

    def first_hole(self, group_id: int, start: int, end: int) -> int:
        """Return the first block from *start* to *end* - 1 that the group lacks, or *end* if it lacks none."""
        if group_id in self._kept:
            return self._kept[group_id].first_hole(start, end)
        group = self._residency.groups[group_id]
        found = self._residency.locate(group, self._chain.names_of(group.block_size, range(start, end)))
        self.located[group_id] = start, found
        if group.attention.forgets and found.num_found < end - start:
            self._kept[group_id] = _KeptBlocks(self._residency, group, self._chain)
        return start + found.num_found


class _KeptBlocks:
    """The blocks of a prompt that a group has in any tier. They are looked up in batches."""

    def __init__(self, residency: Residency, group: GroupTiers, chain: BlockChain) -> None:
        self._residency = residency
        self._group = group
        self._chain = chain
        self._batch = range(0)
        self._is_kept = residency.holds(group, [])  # for each block of the batch

    def first_hole(self, start: int, end: int) -> int:
        """Return the first missing block from *start* to *end* - 1, or *end*."""
        if start < self._batch.start or end > self._batch.stop:
            self._batch = range(max(0, min(start, end - AT_ONCE)), end)
            names = self._chain.names_of(self._group.block_size, self._batch)
            self._is_kept = self._residency.holds(self._group, names)
        is_kept = self._is_kept[start - self._batch.start : end - self._batch.start]
        return end if is_kept.all() else start + int(is_kept.argmin())
