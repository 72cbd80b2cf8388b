"""ReuseDistances: a decaying histogram of how many bytes of blocks are used between two uses of a block."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.reuse.recency import Recency

MAX_SAMPLED = 8192  # maximum number of blocks in the sample
MAX_RATE = 1 / 8  # maximum share of all blocks that are sampled
MAX_PENDING = 4096  # names processed at once, which takes half a millisecond
STEPS = 16  # buckets per doubling of the distance
NUM_BUCKETS = 52 * STEPS  # up to 4 PiB


class Fading:
    """Counters that decay exponentially with the half-life *half_life_s*. All *num_counts* counters start at 0."""

    def __init__(self, num_counts: int, half_life_s: float, clock: Callable[[], float]) -> None:
        self._counts = np.zeros(num_counts)
        self._half_life_s = half_life_s
        self._clock = clock
        self._counted_at = clock()

    def now(self) -> npt.NDArray[np.float64]:
        """Return the counters, decayed up to now, [num_counts]. The caller may add to them until the next call."""
        now = self._clock()
        if now != self._counted_at:
            self._counts *= 0.5 ** ((now - self._counted_at) / self._half_life_s)
            self._counted_at = now
        return self._counts


class Prompt(NamedTuple):
    """Blocks that are still to be counted: the first *num_names* of *names*, a list that may grow later.

    *block_tokens* and *block_bytes* are the size of a block. *block_tokens* is 0 for blocks of generated
    tokens, because they count neither as hits nor as misses.
    """

    names: Sequence[BlockName]
    num_names: int
    block_tokens: int
    block_bytes: int


class ReuseDistances:
    """A decaying histogram of reuse distances, estimated from a sample of blocks. Owned by one thread.

    The reuse distance of a block is the number of bytes of blocks used between two uses of it. An LRU cache hits a
    block if and only if the block's reuse distance is less than the size of the cache. The histogram counts tokens, not
    blocks.
    """

    def __init__(self, half_life_s: float, clock: Callable[[], float]) -> None:
        self._recency = Recency(MAX_SAMPLED, MAX_RATE)
        self._found = Fading(NUM_BUCKETS, half_life_s, clock)  # tokens by distance
        self._pending: list[Prompt] = []
        self._num_pending = 0

    def on_prompt(self, names: Sequence[BlockName], block_tokens: int, block_bytes: int) -> None:
        """Record the blocks that a prompt asked for.

        The list *names* is read later too, so the caller may only append to it.
        """
        self._pend(Prompt(names, len(names), block_tokens, block_bytes))

    def on_generated(self, names: Sequence[BlockName], block_bytes: int) -> None:
        """Record blocks of generated tokens. They take space in a cache, but count neither as hits nor as misses."""
        self._pend(Prompt(names, len(names), 0, block_bytes))

    def tokens_within(self, sizes: Sequence[float]) -> npt.NDArray[np.float64]:
        """Return for each of *sizes*, in bytes, how many recent tokens an LRU cache of that size would have hit.

        Only the difference between two of these numbers is accurate. All of them share one unknown error, because the
        sample may contain too many or too few of the most frequent blocks. Blocks whose reuse distance exceeds the
        largest size are dropped.
        """
        self._take_in()
        self._recency.forget_beyond(max(sizes))
        found = np.concatenate([[0.0], np.cumsum(self._found.now())])
        within: npt.NDArray[np.float64] = np.interp(_places(np.array(sizes)), np.arange(len(found)), found)
        return within

    def check(self) -> None:
        """Raise AssertionError if the state is inconsistent."""
        self._recency.check()
        assert (self._found.now() >= 0).all(), "a count is negative"
        assert self._num_pending == sum(prompt.num_names for prompt in self._pending), (
            "the pending names were miscounted"
        )

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
    """Return for each reuse distance in bytes the number of its histogram bucket, as a fractional number."""
    places: npt.NDArray[np.float64] = np.clip(np.log2(np.maximum(num_bytes, 1.0)) * STEPS, 0, NUM_BUCKETS - 1)
    return places
