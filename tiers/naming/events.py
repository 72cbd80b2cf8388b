"""KV events: which blocks became findable in which tier, and which left it, for routers of prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS, BlockName, ExtraKeys, TokenIds
from kvtier.tiers.naming.eviction import EvictionCause
from kvtier.tiers.naming.tier import Tier


@dataclass(frozen=True, slots=True)
class BlockStored:
    """These blocks of one group can be found in *tier* from now on. They follow each other if *token_ids* are known."""

    tier: Tier
    group_id: int
    names: Sequence[BlockName]
    block_size: int
    parent: BlockName | None = None  # of the first of them; None for a prompt's first block, or if it is not known
    token_ids: TokenIds = ()  # of all of them; empty for copies in lower tiers, whose tokens were told before
    first_token: int = 0  # position of the first of *token_ids* in the prompt
    extra: ExtraKeys = NO_EXTRA_KEYS  # of the whole prompt


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """These blocks of one group can no longer be found in *tier*."""

    tier: Tier
    group_id: int
    names: Sequence[BlockName]
    cause: EvictionCause = EvictionCause.ROOM


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing can be found in any tier any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventLog:
    """Events in the order in which they happened, kept until the engine takes them."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def append(self, event: Event) -> None:
        """Add an event, the newest."""
        self._events.append(event)

    def take(self) -> list[Event]:
        """Take out all events since the last call."""
        events, self._events = self._events, []
        return events
