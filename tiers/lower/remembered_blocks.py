"""RememberedBlocks: remembers which blocks have been seen once, so that a second use is noticed."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.tiers.naming.block_hash import BlockName

WAYS = 16  # keys per row
GROUP_STRIDE = 0x9E3779B97F4A7C15  # odd, so that equal names in different groups have different keys


class RememberedBlocks:
    """A set of about the last *num_blocks* blocks that were seen. Each is remembered by a key of 64 bits.

    If two blocks have the same key, the second one counts as seen although it is new, which does little harm. The keys
    are stored in rows of `WAYS` places. A block's key determines its row, in which it replaces the oldest key. So
    only one row is searched per name. A search of all keys would take half a millisecond per name for the four million
    blocks that a disk of a terabyte needs.
    """

    def __init__(self, num_blocks: int) -> None:
        num_rows = max(1, math.ceil(num_blocks / WAYS))
        self._keys = np.zeros((num_rows, WAYS), np.uint64)  # [row, place]; 0: the place is empty
        self._next = np.zeros(num_rows, np.uint8)  # [row] the place to write next

    def remember(self, group_id: int, names: Sequence[BlockName]) -> None:
        """Remember these blocks, none of which may be remembered already."""
        keys = self._keys_of(group_id, names)
        rows = (keys % np.uint64(len(self._keys))).astype(np.intp)
        while len(rows):  # more than one pass only if names share a row
            own, firsts = np.unique(rows, return_index=True)
            places = self._next[own]
            self._keys[own, places] = keys[firsts]
            self._next[own] = (places + 1) % WAYS
            rows, keys = np.delete(rows, firsts), np.delete(keys, firsts)

    def has(self, group_id: int, names: Sequence[BlockName]) -> list[bool]:
        """Return for each block whether it was passed to `remember` before, and not replaced by newer blocks since."""
        keys = self._keys_of(group_id, names)
        found: list[bool] = (self._keys[keys % np.uint64(len(self._keys))] == keys[:, None]).any(axis=1).tolist()
        return found

    def check(self) -> None:
        """Raise AssertionError if the table of remembered blocks is inconsistent."""
        rows, places = np.nonzero(self._keys)
        assert (self._keys[rows, places] % np.uint64(len(self._keys)) == rows).all(), "a key is in another key's row"
        assert (self._next < WAYS).all(), "the next place of a row is outside it"
        for row in np.unique(rows):
            keys = self._keys[row][self._keys[row] != 0]
            assert len(np.unique(keys)) == len(keys), "a block is remembered twice"
            assert len(keys) in (WAYS, self._next[row]), "an empty place precedes a key"

    def _keys_of(self, group_id: int, names: Sequence[BlockName]) -> npt.NDArray[np.uint64]:
        prefixes = np.frombuffer(b"".join([name[:8] for name in names]), np.uint64)
        return prefixes ^ np.uint64(group_id * GROUP_STRIDE % 2**64)
