"""Families of prompt pairs. Each family is one way in which the two prompts of a pair share a prefix."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Pieces: TypeAlias = tuple[int, ...]

CUE = 16  # number of pieces at a prompt's end that are a copy from its middle
_UNALIGNED = 7  # added to a half or an eighth of a prompt, so that the shared prefix ends inside a block
_WHOLE_BLOCKS = (256, 64, 16)  # sizes of blocks and chunks to align prompts to


@dataclass(frozen=True, slots=True)
class Pair:
    """Two prompts, as sequences of pieces. A piece is a number that stands for one token or one word.

    Cached blocks of *earlier* may serve the prefix that *later* shares with it.
    """

    earlier: Pieces
    later: Pieces

    @property
    def num_shared(self) -> int:
        """Length of the common prefix, in tokens or words."""
        return shared(self.earlier, self.later)


class PromptGenerator:
    """A generator of random prompts, whose pieces (tokens or words) are numbers below *num_pieces*."""

    def __init__(self, source: random.Random, num_pieces: int) -> None:
        self._source = source
        self._num_pieces = num_pieces

    def fresh(self, length: int) -> Pieces:
        """Return *length* random pieces, which are almost certainly new to the server if *length* is large."""
        return tuple(self._source.randrange(self._num_pieces) for _ in range(length))

    def cue(self, body: Sequence[int]) -> Pieces:
        """Return `CUE` consecutive tokens or words from a random place in *body*, to put at the end of a prompt.

        A language model then repeats what followed them in *body*.
        """
        at = self._source.randrange(CUE, max(CUE + 1, len(body)))
        return tuple(body[at - CUE : at])

    def prompt(self, length: int) -> Pieces:
        """Return a random prompt that ends with a cue, a copy of some of its earlier pieces."""
        body = self.fresh(length - CUE)
        return body + self.cue(body)

    def place(self, length: int) -> int:
        """Return a random position in the middle half of a prompt."""
        return self._source.randrange(length // 4, length - length // 4)

    def other_than(self, piece: int) -> int:
        """Return a random piece other than *piece*."""
        return (piece + self._source.randrange(1, self._num_pieces)) % self._num_pieces


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    for place, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return place
    return min(len(one), len(other))


def _same(draw: PromptGenerator, length: int) -> Pair:
    prompt = draw.prompt(length)
    return Pair(prompt, prompt)


def _goes_on(draw: PromptGenerator, length: int) -> Pair:
    prompt = draw.prompt(length)
    return Pair(prompt, prompt + draw.fresh(length // 8) + draw.cue(prompt))


def _another_end(draw: PromptGenerator, length: int) -> Pair:
    body = draw.fresh(length - CUE)
    return Pair(body + draw.cue(body), body + draw.cue(body))


def _half(draw: PromptGenerator, length: int) -> Pair:
    return _first(draw, length, length // 2 + _UNALIGNED)


def _an_eighth(draw: PromptGenerator, length: int) -> Pair:
    return _first(draw, length, length // 8 + _UNALIGNED)


def _first(draw: PromptGenerator, length: int, num_kept: int) -> Pair:
    prompt = draw.prompt(length)
    kept = prompt[:num_kept]
    return Pair(prompt, kept + draw.fresh(length - num_kept - CUE) + draw.cue(kept))


def _whole_blocks(draw: PromptGenerator, length: int) -> Pair:
    prompt = draw.prompt(length)
    return Pair(prompt, prompt[: _whole(length - 1)])


def _one_other(draw: PromptGenerator, length: int) -> Pair:
    prompt = draw.prompt(length)
    at = draw.place(length)
    return Pair(prompt, (*prompt[:at], draw.other_than(prompt[at]), *prompt[at + 1 :]))


def _swapped(draw: PromptGenerator, length: int) -> Pair:
    front, back = draw.fresh(_whole(length // 2)), draw.fresh(_whole(length // 2))
    cue = draw.cue(front)
    return Pair(front + back + cue, back + front + cue)


def _whole(length: int) -> int:
    # Round down to whole blocks of the largest size that fits.
    size = next((size for size in _WHOLE_BLOCKS if size <= length), 1)
    return length // size * size


SAME_PROMPT = "same prompt"
FAMILIES: Mapping[str, Callable[[PromptGenerator, int], Pair]] = {
    SAME_PROMPT: _same,
    "goes on": _goes_on,
    "another end": _another_end,
    "half shared": _half,
    "an eighth shared": _an_eighth,
    "whole blocks": _whole_blocks,
    "one token other": _one_other,
    "halves swapped": _swapped,
}
