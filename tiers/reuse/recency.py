"""Recency: a sample of blocks in the order in which they were used last."""

import heapq
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.tiers.naming.block_hash import BlockName

HASHES = 1 << 64


class Recency:
    """A block is in the sample if the first 64 bits of its name are small: the same blocks each time they come.

    At most *max_blocks* are remembered. Beyond that the bound is lowered, and the blocks above it are forgotten, so
    that it stays a sample of all blocks (SHARDS, Waldspurger et al., FAST 2015). Distances are in bytes of all blocks.
    """

    def __init__(self, max_blocks: int, rate: float) -> None:
        """*rate*: the share of blocks to begin with."""
        self._max_blocks = max_blocks
        self._bound = min(HASHES - 1, int(HASHES * rate))
        self._used: OrderedDict[int, tuple[int, int]] = OrderedDict()  # by hash, oldest first: stamp, block's bytes
        self._stamps: dict[int, list[int]] = {}  # by a block's bytes: stamps of such blocks, ascending
        self._largest: list[int] = []  # heap of hashes, negated; those of forgotten blocks stay in it for a while
        self._next_stamp = 0

    @property
    def rate(self) -> float:
        """The share of all blocks that the sample has."""
        return self._bound / HASHES

    @property
    def num_bytes(self) -> float:
        """About how many bytes of blocks have been used since the oldest one in the sample was."""
        return sum(len(stamps) * size for size, stamps in self._stamps.items()) / self.rate

    def __len__(self) -> int:
        return len(self._used)

    def sampled(self, names: Sequence[BlockName]) -> npt.NDArray[np.uint64]:
        """The hashes of those of *names* that are in the sample, in their order. Names have one length."""
        if not names:
            return np.empty(0, np.uint64)
        hashes = np.frombuffer(b"".join(names), np.uint64)[:: len(names[0]) // 8]
        return hashes[hashes <= self._bound]

    def distances(self, hashes: npt.NDArray[np.uint64]) -> list[float]:
        """For each of these blocks that was used before: how many bytes of blocks were used since, its own added."""
        found = [used for used in map(self._used.get, hashes.tolist()) if used is not None]
        rate = self.rate
        return [
            size + sum((len(each) - bisect_right(each, stamp)) * bytes_ for bytes_, each in self._stamps.items()) / rate
            for stamp, size in found
        ]

    def use(self, hashes: npt.NDArray[np.uint64], block_bytes: int) -> None:
        """Note that these blocks were used now, the first one last: a prefix goes tail first."""
        stamps = self._stamps.setdefault(block_bytes, [])
        for hashed in reversed(hashes.tolist()):
            used = self._used.get(hashed)
            if used is None:
                heapq.heappush(self._largest, -hashed)
            else:
                self._drop_stamp(*used)
            self._used[hashed] = self._next_stamp, block_bytes
            self._used.move_to_end(hashed)
            stamps.append(self._next_stamp)
            self._next_stamp += 1
        while len(self._used) > self._max_blocks:
            self._bound = -heapq.heappop(self._largest) - 1
            if (used := self._used.pop(self._bound + 1, None)) is not None:
                self._drop_stamp(*used)

    def forget_beyond(self, num_bytes: float) -> None:
        """Forget the blocks that are further away than so many bytes."""
        too_much = (self.num_bytes - num_bytes) * self.rate
        while too_much > 0 and self._used:
            _, (stamp, size) = self._used.popitem(last=False)
            self._drop_stamp(stamp, size)
            too_much -= size
        if len(self._largest) > 2 * self._max_blocks:
            self._largest = [-hashed for hashed in self._used]
            heapq.heapify(self._largest)

    def check(self) -> None:
        """Raise AssertionError if the books disagree."""
        stamps: dict[int, list[int]] = {size: [] for size in self._stamps}
        for hashed, (stamp, size) in self._used.items():
            assert hashed <= self._bound, "a block above the bound is remembered"
            stamps[size].append(stamp)
        assert stamps == self._stamps, "stamps of blocks that are not remembered, or out of order"
        assert set(self._used) <= {-each for each in self._largest}, "a block that the bound would never forget"

    def _drop_stamp(self, stamp: int, size: int) -> None:
        stamps = self._stamps[size]
        del stamps[bisect_left(stamps, stamp)]
