"""ComputedPrefixes: a record of computed prefixes, for models in which no group keeps all blocks of a prompt."""

from collections.abc import Sequence
from itertools import islice

from kvtier.tiers.naming.block_hash import BlockName

MAX_PREFIXES = 1 << 16  # about 10 MB


class ComputedPrefixes:
    """The last *max_prefixes* prefixes that were computed, one for each block of a prompt.

    If a group keeps all blocks, its blocks show how far a prompt agrees with earlier ones. Groups that forget, such as
    recurrent states, keep few blocks, so this record takes their place. It decides only where a state is kept, and
    which reason is counted. So it identifies a prefix by the first 64 bits of its last block's name. The record is in
    memory, and a restart loses it. Owned by the cache's thread.
    """

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._prefixes: dict[bytes, None] = {}  # oldest first

    def add(self, names: Sequence[BlockName]) -> None:
        """Record the prefixes that end with the blocks *names*, and forget the oldest ones if there are too many."""
        for name in names:
            self._prefixes.pop(name[:8], None)
            self._prefixes[name[:8]] = None
        num_excess = max(0, len(self._prefixes) - self._max_prefixes)
        for oldest in list(islice(self._prefixes, num_excess)):
            del self._prefixes[oldest]

    def longest(self, names: Sequence[BlockName]) -> int:
        """Return the number of blocks of the longest recorded prefix of a prompt whose blocks are *names*."""
        ends = range(len(names), 0, -1)  # a block's name identifies all blocks before it, too
        return next((end for end in ends if names[end - 1][:8] in self._prefixes), 0)
