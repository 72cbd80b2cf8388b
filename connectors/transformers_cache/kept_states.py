"""`KeptStates`: copies of a model's states, made while a prompt and its answer are computed, until they are stored."""

from collections.abc import Collection, Iterator

import torch

from kvtier.connectors.transformers_cache.prompt_cache import PromptCache
from kvtier.engine.model.state_layers import StateLayers, StateSlab
from kvtier.tiers.naming.retention import QUESTION_TOKENS

MAX_CHUNK_TOKENS = 2048  # limits the memory of a pass over a part of the prompt


def places_to_keep(num_tokens: int, num_held_tokens: int, block_size: int) -> list[int]:
    """Return the positions in a prompt of *num_tokens* tokens whose states are kept, in order. Each ends a block.

    They are the end of the prompt, whose last token is always computed later, and the position before a question at the
    prompt's end. *num_held_tokens* is the length of the prefix whose keys and values are on disk. It is the third such
    position, because an earlier prompt had the same prefix, and a later one may have it too.
    """
    end = num_tokens - 1
    places = {place // block_size * block_size for place in (num_held_tokens, end - QUESTION_TOKENS, end)}
    return sorted(place for place in places if 0 < place <= end)


def chunk_ends(start: int, places: Collection[int]) -> list[int]:
    """Return the ends of the passes that compute a prompt from token *start* to the last of *places*.

    A pass ends at each of *places* after *start*, and has at most `MAX_CHUNK_TOKENS` tokens.
    """
    ends: list[int] = []
    for place in sorted(place for place in places if place > start):
        ends += [*range((ends[-1] if ends else start) + MAX_CHUNK_TOKENS, place, MAX_CHUNK_TOKENS), place]
    return ends


class KeptStates:
    """The states of one sequence after some of its tokens.

    A state exists only where a pass ended. The states at *places* are kept, and so is the one after the last full block
    that a pass ended with, from which a next turn of a chat can resume.
    """

    def __init__(self, cache: PromptCache, layers: StateLayers, block_size: int, places: Collection[int]) -> None:
        """Create an empty set for the sequence in *cache*."""
        self._cache = cache
        self._layers = layers
        self._block_size = block_size
        self._places = frozenset(places)
        self._at: dict[int, StateSlab] = {}  # by the number of tokens before
        self._spare: StateSlab | None = None

    def keep(self, num_tokens: int, device: torch.device) -> None:
        """Copy the states that the cache has after *num_tokens* tokens, if a block ends there."""
        if not self._layers.tensors or num_tokens % self._block_size:
            return
        for passed in self._at.keys() - self._places:
            self._spare = self._at.pop(passed)
        slab = self._spare or StateSlab(1, self._layers, device)
        self._spare = None
        self._cache.copy_states(slab)
        self._at[num_tokens] = slab

    def crop(self, num_tokens: int) -> None:
        """Remove all states after more than *num_tokens* tokens, because other tokens follow now."""
        for removed in [place for place in self._at if place > num_tokens]:
            self._spare = self._at.pop(removed)

    def up_to(self, num_tokens: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each position up to *num_tokens*, in order, with its state's bytes, [1, num_bytes]."""
        for place in sorted(self._at):
            if place <= num_tokens:
                yield place, self._at[place].blocks
