"""KnownPrompts: the newest prompts, as fingerprints. OlderPrompts: a search for the most similar prompt."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from kvtier.engine.observability.explain.prompt_print import PromptFingerprint

MAX_PROMPTS = 4096
MAX_TOKENS = 1 << 20  # tokens of all prompts together; searching this many takes some milliseconds
NONE = np.empty(0, np.uint64)


@dataclass(frozen=True, slots=True)
class Nearest:
    """The result of a comparison with the most similar known prompt, which shares the first *num_shared* tokens.

    *departs* is True if the two prompts differ in the next token, False if one of them ends there.
    """

    num_shared: int
    departs: bool


@dataclass(frozen=True, slots=True)
class OlderPrompts:
    """The prompts that were known at one point in time, oldest first.

    A search takes milliseconds. Any thread may call the methods.
    """

    prints: Sequence[PromptFingerprint]

    def nearest(self, prompt: PromptFingerprint, num_found: int) -> Nearest | None:
        """Compare *prompt* with the known prompt that has the longest prefix in common with it.

        The first *num_found* blocks of *prompt* were in the cache. They count as shared even if the earlier prompt is
        no longer known. Return None if no token is shared.
        """
        known = self.has_all(prompt)
        shared = max(num_found, int(np.flatnonzero(known)[-1]) + 1 if known.any() else 0)
        num_shared = shared * prompt.block_size
        if shared >= len(prompt.parents):
            return Nearest(num_shared, False) if shared else None
        siblings = self._siblings(prompt.parents[shared])
        own_length = prompt.length(shared)
        best, departs = 0, False
        if siblings:
            lengths = np.array([other.length(block_id) for other, block_id in siblings])
            differ = np.array([other.marks[block_id] for other, block_id in siblings]) != prompt.marks[shared]
            differ |= np.arange(prompt.block_size) >= np.minimum(lengths, own_length)[:, None]
            common = np.where(differ.any(axis=1), differ.argmax(axis=1), prompt.block_size)
            best = int(common.max())
            should_continue = lengths[common == best] > best
            departs = best < own_length and bool(should_continue.any())
        return Nearest(num_shared + best, departs) if num_shared + best else None

    def has_all(self, prompt: PromptFingerprint) -> npt.NDArray[np.bool_]:
        """Return for each full block of the prompt whether a known prompt has it."""
        return np.isin(prompt.names, np.concatenate([NONE, *(other.names for other in self.prints)]))

    def _siblings(self, parent: np.uint64) -> list[tuple[PromptFingerprint, int]]:
        """Return the blocks of known prompts whose previous block is *parent*, each as (prompt, index of the block)."""
        parents = np.concatenate([NONE, *(other.parents for other in self.prints)])
        ends = np.cumsum([len(other.parents) for other in self.prints], dtype=np.intp)
        found = []
        for place in np.flatnonzero(parents == parent).tolist():
            number = int(np.searchsorted(ends, place, side="right"))
            found.append((self.prints[number], place - int(ends[number]) + len(self.prints[number].parents)))
        return found


class KnownPrompts:
    """A bounded memory of the newest prompts. `add` and `older` take microseconds. Owned by one thread."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._prompts: deque[PromptFingerprint] = deque()  # the newest last
        self._added_at: deque[float] = deque()  # when each was added
        self._num_tokens = 0
        self.num_added = 0  # number of prompts added so far; identifies a moment for `older`

    def add(self, prompt: PromptFingerprint, now: float) -> None:
        """Add a prompt at the time *now*, dropping the oldest ones if there are too many."""
        self._prompts.append(prompt)
        self._added_at.append(now)
        self._num_tokens += prompt.num_tokens
        self.num_added += 1
        while len(self._prompts) > MAX_PROMPTS or self._num_tokens > self._max_tokens:
            self._num_tokens -= self._prompts.popleft().num_tokens
            self._added_at.popleft()

    def num_before(self, at: float) -> int:
        """Return what `num_added` was at the time *at*. Takes longer the more prompts were added since."""
        num_newer = sum(1 for _ in takewhile(lambda added_at: added_at > at, reversed(self._added_at)))
        return self.num_added - num_newer

    def older(self, before: int) -> OlderPrompts:
        """Return the prompts that were known when `num_added` was *before*, except those dropped since."""
        num_newer = max(0, self.num_added - before)
        return OlderPrompts(list(self._prompts)[: max(0, len(self._prompts) - num_newer)])
