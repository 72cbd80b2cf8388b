"""Refreshes: makes the blocks that requests have used the most recent in host memory and on disk, in parts."""

from collections import deque
from dataclasses import dataclass, replace
from itertools import islice

from kvtier.tiers.group_tiers import GroupTiers
from kvtier.tiers.lower.lower_tiers import LowerTiers
from kvtier.tiers.naming.block_hash import BlockChain

PART = 64  # blocks at once
MOST_WAITING = 1 << 10  # parts of prefixes: of more the oldest are left out, which costs their recency only


@dataclass(frozen=True, slots=True)
class _Refresh:
    """Blocks of one chain and group, and for each name whether it came from disk; b"" if that is not known."""

    chain: BlockChain
    group: GroupTiers
    blocks: range
    from_disk: bytes


class Refreshes:
    """A queue of prefixes. Each is refreshed from its tail on, so that the tail is evicted first. Owned by the cache's
    thread."""

    def __init__(self, lower: LowerTiers) -> None:
        self._lower = lower
        self._waiting: deque[_Refresh] = deque(maxlen=MOST_WAITING)

    def add(self, chain: BlockChain, group: GroupTiers, blocks: range, from_disk: bytes = b"") -> None:
        """Queue these blocks of a group, which were used. *from_disk*: for each name of the chain whether it came from
        disk; if so, the disk is told."""
        if len(blocks):
            self._waiting.append(_Refresh(chain, group, blocks, from_disk))

    def go_on(self) -> None:
        """Refresh one part, or several short ones."""
        num_left = PART
        while self._waiting and num_left > 0:
            refresh = self._waiting.popleft()
            first = max(refresh.blocks.start, refresh.blocks.stop - num_left)
            self._refresh(refresh, range(first, refresh.blocks.stop))
            num_left -= refresh.blocks.stop - first
            if first > refresh.blocks.start:
                rest = range(refresh.blocks.start, first)
                self._waiting.appendleft(replace(refresh, blocks=rest))

    def _refresh(self, refresh: _Refresh, blocks: range) -> None:
        group, chain = refresh.group, refresh.chain
        names = group.names_in(chain, blocks)[::-1]
        step = group.block_size // chain.block_size
        from_disk = islice(refresh.from_disk, (blocks.start + 1) * step - 1, blocks.stop * step, step)
        self._lower.refresh(group.id, names, list(map(bool, from_disk))[::-1])
