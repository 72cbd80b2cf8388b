"""RequestChain: which block of a request each of its blocks continues."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from kvtier.tiers.naming.block_hash import BlockName

GROUP_BYTES = 4  # that end vLLM's key of a block: the number of its group, the block's hash before it


def name_of(key: bytes) -> BlockName:
    """The block's name among those of its group, of vLLM's key."""
    return BlockName(key[:-GROUP_BYTES])


def group_of(key: bytes) -> int:
    """The number of the block's group, of vLLM's key."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


@dataclass(slots=True)
class RequestChain:
    """The keys of one request as far as vLLM has made them, and for each the name of the block before it in its group.

    vLLM gives the keys of a job in no order, and says of each at which token its block ends.
    """

    parents: dict[bytes, BlockName | None] = field(default_factory=dict)
    _last: dict[int, BlockName] = field(default_factory=dict)  # by group

    def see(self, end_tokens: Mapping[bytes, int]) -> None:
        """Take in the keys that vLLM has made since: those of a group come in the order of the prompt."""
        for key in islice(end_tokens, len(self.parents), None):
            group_id = group_of(key)
            self.parents[key] = self._last.get(group_id)
            self._last[group_id] = name_of(key)
