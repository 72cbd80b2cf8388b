"""PartialMatches: finds cached blocks by their first tokens, so that a prompt can share a part of a block."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.block_pool import BlockPool
from kvtier.tiers.naming.block_hash import BlockChain, BlockName, TokenIds

KEY_BYTES = 32  # as long as a name
MAX_PENDING = 4096  # blocks: a millisecond's work at once
MAX_TRIED = 8  # of the blocks that share most


@dataclass(slots=True)
class _Piece:
    """Blocks *start* to *end* of a chain, in slots that are not in the arrays yet."""

    chain: BlockChain
    start: int
    end: int
    slots: list[npt.NDArray[np.intp]]


class PartialMatches:
    """For each slot with a named block a key of what the block continues, and its computed tokens. The caller that
    names a block calls `record`, `record_tail` or `forget`; what is noted of slots without a name is out of date.

    Plain arrays that are searched as a whole, half a nanosecond a slot: an index would cost every commit and every
    eviction more than the one search per request does. They are filled many blocks at a time, at the latest before they
    are searched: a chunk of prefill costs an entry in a list.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._pending: list[_Piece] = []
        self._num_pending = 0  # blocks in `_pending`
        # The first four bytes of each key; 0 for a slot without a block, so that one block in 4 billion is not found.
        self._first = np.zeros(num_slots, np.uint32)
        self._keys = np.zeros((num_slots, KEY_BYTES // 8), np.uint64)
        self._token_ids = np.zeros((num_slots, block_size), np.uint32)
        self._num_tokens = np.zeros(num_slots, np.int32)

    def record(self, slots: npt.NDArray[np.intp], chain: BlockChain, start: int) -> None:
        """Note that the slots hold the chain's named blocks from *start* on. The array is kept."""
        last = self._pending[-1] if self._pending else None
        if last is not None and last.chain is chain and last.end == start:
            last.slots.append(slots)
            last.end += len(slots)
        else:
            self._pending.append(_Piece(chain, start, start + len(slots), [slots]))
        self._num_pending += len(slots)
        if self._num_pending >= MAX_PENDING:
            self._take_in()

    def record_tail(self, slot: int, key: bytes, token_ids: TokenIds) -> None:
        """Note that the slot holds a block of which only the first tokens, these, are computed."""
        self._take_in()
        self._keys[slot] = np.frombuffer(key, np.uint64)
        self._first[slot] = np.frombuffer(key, np.uint32)[0]
        self._token_ids[slot, : len(token_ids)] = token_ids
        self._num_tokens[slot] = len(token_ids)

    def forget(self, slots: npt.NDArray[np.intp]) -> None:
        """Find the blocks in these slots no more."""
        self._take_in()
        self._first[slots] = 0

    def is_used_up(self, slot: int, num_tokens: int) -> bool:
        """Whether *num_tokens* are all tokens of a block that is not full: one that goes on from them replaces it."""
        self._take_in()
        return num_tokens == int(self._num_tokens[slot]) < int(self._token_ids.shape[1])

    def parents(self, pool: BlockPool) -> Iterator[tuple[int, int]]:
        """Slots whose block has its parent in the pool, with the parent's slot; not of blocks with extra keys."""
        self._take_in()
        for slot in range(pool.num_slots):
            if pool.name(slot) is not None:
                key = self._keys[slot].tobytes() if self._first[slot] else b""
                if (parent := pool.find(BlockName(key))) is not None:
                    yield slot, parent

    def sharing(self, key: bytes, token_ids: TokenIds, pool: BlockPool) -> list[tuple[int, int]]:
        """Slots of *pool* whose blocks continue the prefix with *key* by some of *token_ids*, and by how many of them.

        The slots that share most come first, `MAX_TRIED` at most.
        """
        self._take_in()
        wanted = np.frombuffer(key, np.uint64)
        slots = np.flatnonzero(self._first == np.frombuffer(key, np.uint32)[0])
        slots = slots[pool.are_named(slots)]
        if not len(slots):
            return []
        slots = slots[(self._keys[slots] == wanted).all(axis=1)]
        equal = self._token_ids[slots, : len(token_ids)] == np.asarray(token_ids, np.uint32)
        num_shared = np.minimum(np.logical_and.accumulate(equal, axis=1).sum(axis=1), self._num_tokens[slots])
        order = np.argsort(-num_shared, kind="stable")[:MAX_TRIED]
        return [(int(slots[i]), int(num_shared[i])) for i in order if num_shared[i]]

    def _take_in(self) -> None:
        """Write the pending blocks into the arrays. For a slot that is pending more than once the last one stands."""
        if not self._pending:
            return
        pending, self._pending, self._num_pending = self._pending, [], 0
        slots = np.concatenate([slots for piece in pending for slots in piece.slots])
        keys = b"".join([key for piece in pending for key in piece.chain.continued_keys(piece.start, piece.end)])
        ids = np.concatenate([piece.chain.named_ids(piece.start, piece.end) for piece in pending])
        firsts = np.frombuffer(keys, np.uint32)[:: KEY_BYTES // 4]
        # Rows as single items of so many bytes: a quarter of what numpy takes for rows of numbers.
        _rows(self._keys)[slots] = np.frombuffer(keys, f"V{KEY_BYTES}")
        _rows(self._token_ids)[slots] = _rows(ids.reshape(len(slots), -1))
        self._num_tokens[slots] = self._token_ids.shape[1]
        self._first[slots] = firsts


def _rows(array: npt.NDArray[Any]) -> npt.NDArray[np.void]:
    """The same memory with each row of a contiguous array as one item."""
    return array.view(f"V{array.itemsize * array.shape[1]}")[:, 0]
