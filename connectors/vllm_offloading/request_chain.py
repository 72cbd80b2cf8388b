"""`RequestChain`: the keys of a request's blocks in prompt order, from which each block's parent is found."""

from collections.abc import Mapping, Sequence
from itertools import islice

from kvtier.tiers.naming.block_hash import BlockName

GROUP_BYTES = 4  # size of the group's number, which follows the block's hash in vLLM's key of a block


def name_of(key: bytes) -> BlockName:
    """Extract the block's name, which is its hash, from vLLM's key."""
    return BlockName(key[:-GROUP_BYTES])


def group_of(key: bytes) -> int:
    """Extract the number of the block's KV cache group from vLLM's key."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


class RequestChain:
    """The keys of one request's blocks so far, for each KV cache group in the order of the prompt.

    The order is recorded here to find the parent of a block, the block before it. The keys in vLLM's jobs have no
    particular order.
    """

    def __init__(self) -> None:
        self._groups: dict[int, list[bytes]] = {}
        self._places: dict[bytes, int] = {}

    @property
    def groups(self) -> Sequence[Sequence[bytes]]:
        """Keys of each group, in the order of the prompt."""
        return list(self._groups.values())

    def see(self, end_tokens: Mapping[bytes, int]) -> None:
        """Add the keys of the request's blocks that are new since the last call.

        *end_tokens* has, by key, the token position at which each block of the request ends. Only the keys are used.
        The oldest key comes first, and the keys of a group are in the order of the prompt.
        """
        if len(end_tokens) == len(self._places):
            return
        for key in islice(end_tokens, len(self._places), None):
            keys = self._groups.setdefault(group_of(key), [])
            self._places[key] = len(keys)
            keys.append(key)

    def parent(self, key: bytes) -> bytes | None:
        """Return the key of the previous block in the same group, or None if there is none or *key* is unknown."""
        place = self._places.get(key, 0)
        return self._groups[group_of(key)][place - 1] if place else None
