"""PartialMatches: finds cached blocks by their first tokens, so that a prompt can reuse a part of a block."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.block_pool import BlockPool
from kvtier.tiers.device.slot_ids import NOTHING
from kvtier.tiers.naming.block_hash import BlockChain, BlockName, TokenIds

KEY_BYTES = 32  # length of a block name
MAX_PENDING = 4096  # blocks added to the arrays at once, which takes a millisecond
SCANNED_AT_ONCE = 1 << 16  # slots compared at once, so that the result stays in the CPU's cache
MAX_TRIED = 8  # maximum number of blocks that a search returns


@dataclass(slots=True)
class _Piece:
    """Blocks *start* to *end* - 1 of a prompt, not yet added to the table of `PartialMatches`."""

    chain: BlockChain
    start: int
    end: int
    slots: list[npt.NDArray[np.intp]]  # the blocks' slots, in one or more arrays
    keys: list[bytes]  # the blocks' keys, concatenated for each of these arrays


class PartialMatches:
    """A table of cached blocks that finds blocks whose first tokens are those of a prompt's next block.

    For each slot, the table has the computed tokens of its block and a key that identifies the prefix before the block
    (`BlockChain.continued_key`). The caller that names a block must call `record`, `record_tail` or `forget` for its
    slot. Entries of slots without a named block are out of date, and a search ignores them.

    A search scans two bytes per slot, which takes 0.1 to 0.3 ms for a million slots, once per request. A hash index
    would cost more, because every commit and every eviction would have to update it. New blocks are collected, and
    added to the table together, at the latest before a search.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._pending: list[_Piece] = []
        self._num_pending = 0  # blocks in `_pending`
        self._first = np.zeros(num_slots, np.uint16)  # see `_firsts`; 0 for a slot without a block
        self._keys = np.zeros((num_slots, KEY_BYTES // 8), np.uint64)
        self._token_ids = np.zeros((num_slots, block_size), np.uint32)
        self._num_tokens = np.zeros(num_slots, np.int32)
        for each in (self._first, self._keys, self._token_ids, self._num_tokens):
            each.fill(0)  # makes the kernel allocate the memory now: a huge page later takes 5 ms of a commit

    def record(self, slots: npt.NDArray[np.intp], chain: BlockChain, start: int) -> None:
        """Record that *slots* hold the named blocks of *chain* from *start* on. Do not change *slots* afterwards."""
        end = start + len(slots)
        keys = b"".join(chain.continued_keys(start, end))  # now, while the names are in the CPU's cache
        last = self._pending[-1] if self._pending else None
        if last is not None and last.chain is chain and last.end == start:
            last.slots.append(slots)
            last.keys.append(keys)
            last.end = end
        else:
            self._pending.append(_Piece(chain, start, end, [slots], [keys]))
        self._num_pending += len(slots)
        if self._num_pending >= MAX_PENDING:
            self._take_in()

    def record_tail(self, slot: int, key: bytes, token_ids: TokenIds) -> None:
        """Record that *slot* holds a partial block after the prefix *key*. Only its tokens *token_ids* are computed."""
        self._take_in()
        self._keys[slot] = np.frombuffer(key, np.uint64)
        self._first[slot] = _firsts(key)[0]
        self._token_ids[slot, : len(token_ids)] = token_ids
        self._num_tokens[slot] = len(token_ids)

    def forget(self, slots: npt.NDArray[np.intp]) -> None:
        """Remove the blocks in *slots* from the table."""
        self._take_in()
        self._first[slots] = 0

    def is_used_up(self, slot: int, num_tokens: int) -> bool:
        """Return whether the slot holds a partial block of exactly *num_tokens* tokens.

        If so, a request that reuses all of them computes a longer block with the same beginning, and the slot's block
        can be evicted.
        """
        self._take_in()
        return num_tokens == int(self._num_tokens[slot]) < int(self._token_ids.shape[1])

    def parents(self, pool: BlockPool) -> Iterator[tuple[int, int]]:
        """Yield the slot of each block together with the slot of its parent, the block before it in the prompt.

        Left out are blocks whose parent is not in *pool*, and blocks with extra keys (for example a LoRA adapter),
        whose parents this table does not record.
        """
        self._take_in()
        for slot in range(pool.num_slots):
            if pool.name(slot) is not None:
                key = self._keys[slot].tobytes() if self._first[slot] else b""
                if (parent := pool.find(BlockName(key))) is not None:
                    yield slot, parent

    def sharing(self, key: bytes, token_ids: TokenIds, pool: BlockPool) -> list[tuple[int, int]]:
        """Return slots whose blocks come after the prefix *key* and begin with the same tokens as *token_ids*.

        Each slot is returned with the number of equal tokens. Returns at most `MAX_TRIED` slots of *pool*, those with
        the most equal tokens first.
        """
        self._take_in()
        wanted = np.frombuffer(key, np.uint64)
        first, found = _firsts(key)[0], [NOTHING]
        for start in range(0, len(self._first), SCANNED_AT_ONCE):
            found.append(np.flatnonzero(self._first[start : start + SCANNED_AT_ONCE] == first) + start)
        slots = np.concatenate(found)
        slots = slots[pool.are_named(slots)]
        if not len(slots):
            return []
        slots = slots[(self._keys[slots] == wanted).all(axis=1)]
        equal = self._token_ids[slots, : len(token_ids)] == np.asarray(token_ids, np.uint32)
        num_shared = np.minimum(np.logical_and.accumulate(equal, axis=1).sum(axis=1), self._num_tokens[slots])
        order = np.argsort(-num_shared, kind="stable")[:MAX_TRIED]
        return [(int(slots[i]), int(num_shared[i])) for i in order if num_shared[i]]

    def _take_in(self) -> None:
        """Write the pending blocks to the arrays. If a slot is pending more than once, the last block wins."""
        if not self._pending:
            return
        pending, self._pending, self._num_pending = self._pending, [], 0
        slots = np.concatenate([slots for piece in pending for slots in piece.slots])
        keys = b"".join([part for piece in pending for part in piece.keys])
        parts = [piece.chain.named_ids(piece.start, piece.end) for piece in pending]
        ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        # Assigning each row as one item of raw bytes takes a quarter of the time of assigning rows of numbers.
        _rows(self._keys)[slots] = np.frombuffer(keys, f"V{KEY_BYTES}")
        _rows(self._token_ids)[slots] = _rows(ids.reshape(len(slots), -1))
        self._num_tokens[slots] = self._token_ids.shape[1]
        self._first[slots] = _firsts(keys)


def _firsts(keys: bytes) -> npt.NDArray[np.uint16]:
    """Return the first two bytes of each of the concatenated keys as a number, with 1 in place of 0."""
    return np.maximum(np.frombuffer(keys, np.uint16)[:: KEY_BYTES // 2], 1)


def _rows(array: npt.NDArray[Any]) -> npt.NDArray[np.void]:
    """Return a view of a contiguous array with each row as one item."""
    return array.view(f"V{array.itemsize * array.shape[1]}")[:, 0]
