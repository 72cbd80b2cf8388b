"""ReuseDistances: after how many bytes of other blocks a block is asked for again, lately."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.reuse.recency import Recency

MAX_SAMPLED = 8192
MAX_RATE = 1 / 8
MAX_PENDING = 4096  # names: half a millisecond's work at once
STEPS = 16  # buckets for each doubling of a distance
NUM_BUCKETS = 52 * STEPS  # up to four petabytes


class Fading:
    """So many counts, all at first 0. What was counted *half_life_s* ago weighs half."""

    def __init__(self, num_counts: int, half_life_s: float, clock: Callable[[], float]) -> None:
        self._counts = np.zeros(num_counts)
        self._half_life_s = half_life_s
        self._clock = clock
        self._counted_at = clock()

    def now(self) -> npt.NDArray[np.float64]:
        """The counts now `[num_counts]`, to read and to add to before the next call."""
        now = self._clock()
        if now != self._counted_at:
            self._counts *= 0.5 ** ((now - self._counted_at) / self._half_life_s)
            self._counted_at = now
        return self._counts


class Prompt(NamedTuple):
    """The first *num_names* of *names*, which may grow later, stand for the whole blocks of a prompt. *block_tokens* is
    0 where nobody asked for the blocks."""

    names: Sequence[BlockName]
    num_names: int
    block_tokens: int
    block_bytes: int


class ReuseDistances:
    """A block whose distance is less than an LRU cache's size is found there. Counts in tokens, by a sample of blocks;
    older ones weigh less. Owned by one thread."""

    def __init__(self, half_life_s: float, clock: Callable[[], float]) -> None:
        self._recency = Recency(MAX_SAMPLED, MAX_RATE)
        self._found = Fading(NUM_BUCKETS, half_life_s, clock)  # tokens by distance
        self._pending: list[Prompt] = []
        self._num_pending = 0

    def on_prompt(self, names: Sequence[BlockName], block_tokens: int, block_bytes: int) -> None:
        """Take in the blocks that a prompt asked for. The list is kept for a while, and may only grow."""
        self._pend(Prompt(names, len(names), block_tokens, block_bytes))

    def on_made(self, names: Sequence[BlockName], block_bytes: int) -> None:
        """Take in blocks that were used, but that nobody asked for: those of generated tokens."""
        self._pend(Prompt(names, len(names), 0, block_bytes))

    def tokens_within(self, sizes: Sequence[float]) -> npt.NDArray[np.float64]:
        """How many tokens, lately, LRU caches of these sizes in bytes would have found, but for what the sample has too
        little or too much of blocks that come all the time: only differences are of use. What is further away than the
        largest size is forgotten."""
        self._take_in()
        self._recency.forget_beyond(max(sizes))
        found = np.concatenate([[0.0], np.cumsum(self._found.now())])
        within: npt.NDArray[np.float64] = np.interp(_places(np.array(sizes)), np.arange(len(found)), found)
        return within

    def check(self) -> None:
        """Raise AssertionError if the books disagree."""
        self._recency.check()
        assert (self._found.now() >= 0).all(), "less than no tokens were found"
        assert self._num_pending == sum(prompt.num_names for prompt in self._pending), "names that are not pending"

    def _pend(self, prompt: Prompt) -> None:
        self._pending.append(prompt)
        self._num_pending += prompt.num_names
        if self._num_pending >= MAX_PENDING:
            self._take_in()

    def _take_in(self) -> None:
        found = self._found.now()
        for names, num_names, block_tokens, block_bytes in self._pending:
            hashes = self._recency.sampled(names[:num_names])
            if block_tokens and len(hashes):
                places = _places(np.array(self._recency.distances(hashes))).astype(np.intp)
                np.add.at(found, places, block_tokens / self._recency.rate)
            self._recency.use(hashes, block_bytes)
        self._pending.clear()
        self._num_pending = 0


def _places(num_bytes: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Where in the buckets, which grow by the same factor."""
    places: npt.NDArray[np.float64] = np.clip(np.log2(np.maximum(num_bytes, 1.0)) * STEPS, 0, NUM_BUCKETS - 1)
    return places
