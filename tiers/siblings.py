"""Siblings: cached blocks that continue one prefix in different ways, so that a prompt can share part of a block."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.tiers.block_hash import BlockName, TokenIds
from kvtier.tiers.block_pool import BlockPool

KEY_BYTES = 32  # shorter keys are filled up with zeros
MOST_TRIED = 8  # of the siblings that share most


class Siblings:
    """For each slot that holds a named block: what the block continues, and its tokens, or as many as are computed.

    Plain arrays that are searched as a whole, half a nanosecond a slot: an index would cost every commit and every
    eviction more than the one search per request does.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._first = np.zeros(num_slots, np.uint64)  # of each key the first eight bytes; 0 if the slot has no block
        self._keys = np.zeros((num_slots, KEY_BYTES // 8), np.uint64)
        self._token_ids = np.zeros((num_slots, block_size), np.uint32)
        self._num_tokens = np.zeros(num_slots, np.int32)
        self._key_bytes = KEY_BYTES

    def record(self, slots: npt.NDArray[np.int32], keys: Sequence[bytes], token_ids: npt.NDArray[np.uint32]) -> None:
        """The slots hold named blocks of these tokens, [num_slots * block_size], after prefixes with these keys."""
        self._key_bytes = len(keys[0])
        packed = b"".join(keys if self._key_bytes == KEY_BYTES else (key.ljust(KEY_BYTES, b"\0") for key in keys))
        rows = np.frombuffer(packed, np.uint64).reshape(-1, KEY_BYTES // 8)
        self._keys[slots] = rows
        self._first[slots] = rows[:, 0]
        self._token_ids[slots] = token_ids.reshape(len(slots), -1)
        self._num_tokens[slots] = self._token_ids.shape[1]

    def record_tail(self, slot: int, key: bytes, token_ids: TokenIds) -> None:
        """The slot holds a block of which only the first tokens, these, are computed."""
        self._keys[slot] = np.frombuffer(key.ljust(KEY_BYTES, b"\0"), np.uint64)
        self._first[slot] = self._keys[slot, 0]
        self._token_ids[slot, : len(token_ids)] = token_ids
        self._num_tokens[slot] = len(token_ids)

    def forget(self, slots: npt.NDArray[np.int32]) -> None:
        """The slots' blocks can no longer be found."""
        self._first[slots] = 0

    def is_part(self, slot: int) -> bool:
        """Whether the slot holds a block of which only the first tokens are computed."""
        return bool(self._first[slot]) and int(self._num_tokens[slot]) < int(self._token_ids.shape[1])

    def is_used_up(self, slot: int, num_tokens: int) -> bool:
        """Whether a block that goes on from *num_tokens* of this one makes it useless: it has no more."""
        return num_tokens == int(self._num_tokens[slot]) < int(self._token_ids.shape[1])

    def parents(self, pool: BlockPool) -> Iterator[tuple[int, int]]:
        """Each slot whose parent is in the pool too, with the parent's; not those with extra keys. For checks."""
        for slot in range(pool.num_slots):
            if pool.name(slot) is not None:
                key = self._keys[slot].tobytes()[: self._key_bytes] if self._first[slot] else b""
                if (parent := pool.find(BlockName(key))) is not None:
                    yield slot, parent

    def sharing(self, key: bytes, token_ids: TokenIds) -> list[tuple[int, int]]:
        """Slots of blocks that continue the prefix with *key* by the first of *token_ids*, and by how many of them.

        Those that share most first; at most `MOST_TRIED`, and only such as share any.
        """
        wanted = np.frombuffer(key.ljust(KEY_BYTES, b"\0"), np.uint64)
        slots = np.flatnonzero(self._first == wanted[0])
        if not len(slots):
            return []
        slots = slots[(self._keys[slots] == wanted).all(axis=1)]
        equal = self._token_ids[slots, : len(token_ids)] == np.asarray(token_ids, np.uint32)
        num_shared = np.minimum(np.logical_and.accumulate(equal, axis=1).sum(axis=1), self._num_tokens[slots])
        order = np.argsort(-num_shared, kind="stable")[:MOST_TRIED]
        return [(int(slots[i]), int(num_shared[i])) for i in order if num_shared[i]]
