"""Recency: a sample of blocks in the order of their last use, which estimates reuse distances."""

import heapq
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.tiers.naming.block_hash import BlockName

HASHES = 1 << 64


class Recency:
    """A sample of blocks in LRU order, which estimates reuse distances (SHARDS, Waldspurger et al., FAST 2015).

    A block is in the sample if the first 64 bits of its name are below a bound, so either all uses of a block are
    sampled or none. If the sample exceeds *max_blocks* blocks, the bound is lowered, and the blocks above it are
    dropped. Distances are in bytes of all blocks, not only of sampled ones.
    """

    def __init__(self, max_blocks: int, rate: float) -> None:
        """Create an empty sample, for a fraction *rate* of all blocks, but at most for *max_blocks* blocks."""
        self._max_blocks = max_blocks
        self._bound = min(HASHES - 1, int(HASHES * rate))
        self._used: OrderedDict[int, tuple[int, int]] = OrderedDict()  # hash to stamp and block size, oldest first
        self._stamps: dict[int, list[int]] = {}  # block size to the ascending stamps of its blocks
        self._largest: list[int] = []  # heap of negated hashes; hashes of dropped blocks stay in it for a while
        self._next_stamp = 0

    @property
    def rate(self) -> float:
        """Fraction of all blocks that are sampled."""
        return self._bound / HASHES

    @property
    def num_bytes(self) -> float:
        """Estimated bytes of all blocks, not only sampled ones, used since the oldest sampled block was last used."""
        return sum(len(stamps) * size for size, stamps in self._stamps.items()) / self.rate

    def __len__(self) -> int:
        return len(self._used)

    def sampled(self, names: Sequence[BlockName]) -> npt.NDArray[np.uint64]:
        """Return the hashes of the sampled blocks among *names*, in order. All names must have the same length."""
        if not names:
            return np.empty(0, np.uint64)
        hashes = np.frombuffer(b"".join(names), np.uint64)[:: len(names[0]) // 8]
        return hashes[hashes <= self._bound]

    def distances(self, hashes: npt.NDArray[np.uint64]) -> list[float]:
        """Return the reuse distance of each of these blocks that was used before.

        The distance is the number of bytes of all blocks used since the last use of the block, including the block
        itself.
        """
        found = [used for used in map(self._used.get, hashes.tolist()) if used is not None]
        rate = self.rate
        return [
            size + sum((len(each) - bisect_right(each, stamp)) * bytes_ for bytes_, each in self._stamps.items()) / rate
            for stamp, size in found
        ]

    def use(self, hashes: npt.NDArray[np.uint64], block_bytes: int) -> None:
        """Record that these blocks, each of *block_bytes* bytes, were used now.

        The first block counts as the most recent one, because a prefix is evicted from its end.
        """
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
        """Drop the blocks whose reuse distance is more than *num_bytes*."""
        too_much = (self.num_bytes - num_bytes) * self.rate
        while too_much > 0 and self._used:
            _, (stamp, size) = self._used.popitem(last=False)
            self._drop_stamp(stamp, size)
            too_much -= size
        if len(self._largest) > 2 * self._max_blocks:
            self._largest = [-hashed for hashed in self._used]
            heapq.heapify(self._largest)

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        stamps: dict[int, list[int]] = {size: [] for size in self._stamps}
        for hashed, (stamp, size) in self._used.items():
            assert hashed <= self._bound, "a block above the bound is remembered"
            stamps[size].append(stamp)
        assert stamps == self._stamps, "the stamps do not match the blocks, or are out of order"
        assert set(self._used) <= {-each for each in self._largest}, "a block is missing in the heap of hashes"

    def _drop_stamp(self, stamp: int, size: int) -> None:
        stamps = self._stamps[size]
        del stamps[bisect_left(stamps, stamp)]
