"""KV events, which inform prompt routers about blocks that became available in a tier or left it."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS, BlockName, ExtraKeys, TokenIds
from kvtier.tiers.naming.tier import EvictionCause, Tier


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks of one attention group became available in *tier*.

    If *token_ids* is not empty, the blocks are consecutive blocks of one prompt.
    """

    tier: Tier
    group_id: int
    names: Sequence[BlockName]
    block_size: int
    parent: BlockName | None = None  # name of the block before the first one; None if there is none or it is unknown
    token_ids: TokenIds = ()  # of all blocks; empty if unknown, as for copies in lower tiers
    first_token: int = 0  # position of the first of *token_ids* in the prompt
    extra: ExtraKeys = NO_EXTRA_KEYS  # extra keys of the whole prompt


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks of one attention group left *tier*."""

    tier: Tier
    group_id: int
    names: Sequence[BlockName]
    cause: EvictionCause = EvictionCause.ROOM


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """All blocks left all tiers."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventLog:
    """Events in the order in which they happened, kept until the engine collects them with `take`."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def append(self, event: Event) -> None:
        """Append an event."""
        self._events.append(event)

    def take(self) -> list[Event]:
        """Remove and return all events since the last call."""
        events, self._events = self._events, []
        return events
