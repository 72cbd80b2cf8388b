"""RequestChain: the keys of a request's blocks, and which block each of them continues."""

from collections.abc import Mapping, Sequence
from itertools import islice

from kvtier.tiers.naming.block_hash import BlockName

GROUP_BYTES = 4  # that end vLLM's key of a block: the number of its group, the block's hash before it


def name_of(key: bytes) -> BlockName:
    """The block's name among those of its group, of vLLM's key."""
    return BlockName(key[:-GROUP_BYTES])


def group_of(key: bytes) -> int:
    """The number of the block's group, of vLLM's key."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


class RequestChain:
    """The keys of one request as far as vLLM has made them, by group in the order of the prompt. vLLM gives those of a
    job in no order."""

    def __init__(self) -> None:
        self._groups: dict[int, list[bytes]] = {}
        self._places: dict[bytes, int] = {}

    @property
    def groups(self) -> Sequence[Sequence[bytes]]:
        """The keys of each group."""
        return list(self._groups.values())

    def see(self, end_tokens: Mapping[bytes, int]) -> None:
        """Take in the keys that vLLM has made since: those of a group come in the order of the prompt."""
        if len(end_tokens) == len(self._places):
            return
        for key in islice(end_tokens, len(self._places), None):
            keys = self._groups.setdefault(group_of(key), [])
            self._places[key] = len(keys)
            keys.append(key)

    def parent(self, key: bytes) -> bytes | None:
        """Return the key of the block before it in its group; None if there is none, or it is not known."""
        place = self._places.get(key, 0)
        return self._groups[group_of(key)][place - 1] if place else None
