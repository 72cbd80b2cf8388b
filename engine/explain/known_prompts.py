"""KnownPrompts: prints of the newest prompts' blocks, to find where another one departs from them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.engine.explain.prompt_print import PromptPrint

NUM_TOKENS = 1 << 20  # whose marks are kept: 2 MiB, and 17 bytes a block


@dataclass(frozen=True, slots=True)
class Nearest:
    """The prompt that shares most tokens with another: the first *num_shared*. *departs*: it has others after them; if
    not, one of the two ends there."""

    num_shared: int
    departs: bool


class KnownPrompts:
    """A ring of blocks, the newest ones; each is known by its name and by what it continues. Owned by one thread."""

    def __init__(self, block_size: int, num_tokens: int = NUM_TOKENS) -> None:
        self._num = max(1, num_tokens // block_size)
        self._names = np.zeros(self._num, np.uint64)  # 0: a block that is not full
        self._parents = np.zeros(self._num, np.uint64)
        self._marks = np.zeros((self._num, block_size), np.uint16)
        self._lengths = np.zeros(self._num, np.uint16)
        self.num_added = 0  # blocks so far: a time, for `nearest`

    def add(self, prompt: PromptPrint, first_block: int) -> None:
        """Take in the prompt's blocks from *first_block* on; those before are known, or were found in the cache."""
        blocks = np.arange(first_block, len(prompt.parents))[-self._num :]
        if not len(blocks):
            return
        places = (self.num_added + np.arange(len(blocks))) % self._num
        is_full = blocks < len(prompt.names)
        self._names[places] = 0
        self._names[places[is_full]] = prompt.names[blocks[is_full]]
        self._parents[places] = prompt.parents[blocks]
        self._marks[places] = prompt.marks[blocks]
        self._lengths[places] = np.minimum(prompt.block_size, prompt.num_tokens - blocks * prompt.block_size)
        self.num_added += len(blocks)

    def nearest(self, prompt: PromptPrint, num_found: int, before: int) -> Nearest | None:
        """The prompt that shares most with this one, of those that were added *before* that many blocks were; None if
        none shares a token. Its first *num_found* blocks were in the cache."""
        is_older = self._numbers() < before
        known = np.isin(prompt.names, self._names[is_older])
        shared = max(num_found, int(np.flatnonzero(known)[-1]) + 1 if known.any() else 0)
        num_shared = shared * prompt.block_size
        if shared >= len(prompt.parents):
            return Nearest(num_shared, False) if shared else None
        siblings = np.flatnonzero(is_older & (self._parents == prompt.parents[shared]))
        own_length = prompt.length(shared)
        best, departs = 0, False
        if len(siblings):
            lengths = np.minimum(self._lengths[siblings].astype(np.int64), own_length)
            differ = self._marks[siblings] != prompt.marks[shared]
            differ |= np.arange(prompt.block_size) >= lengths[:, None]
            common = np.where(differ.any(axis=1), differ.argmax(axis=1), prompt.block_size)
            best = int(common.max())
            goes_on = self._lengths[siblings[common == best]] > best
            departs = best < own_length and bool(goes_on.any())
        return Nearest(num_shared + best, departs) if num_shared + best else None

    def has_all(self, prompt: PromptPrint, before: int) -> npt.NDArray[np.bool_]:
        """For each full block of the prompt whether it was known *before* that many blocks were added."""
        return np.isin(prompt.names, self._names[self._numbers() < before])

    def _numbers(self) -> npt.NDArray[np.int64]:
        """For each place of the ring which block is there, counted from the first; a very late one where none is."""
        places = np.arange(self._num)
        numbers = self.num_added - 1 - (self.num_added - 1 - places) % self._num
        return np.where(numbers >= 0, numbers, np.iinfo(np.int64).max)
