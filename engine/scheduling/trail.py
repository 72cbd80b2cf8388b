"""Trails: records of where each block of a prompt came from, without the prompt's tokens."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.tier import Reason


@dataclass(frozen=True, slots=True)
class Trail:
    """The origin of each block of a request's prompt, known once the cached prefix is loaded.

    The trail holds names of blocks, but no token ids. The first `len(depths)` blocks came from the cache, except those
    whose entry in *depths* is COMPUTED. The next *num_copied* tokens were copied from a cached block that shares only
    its first tokens with the prompt. All other tokens were computed.
    """

    block_size: int
    names: Sequence[BlockName]  # of all full blocks of the prompt
    depths: bytes = b""  # `Tier.depth` of the coldest tier of each block; COMPUTED: computed during the load
    num_copied: int = 0
    misses: tuple[tuple[int, Reason], ...] = ()  # why tokens were computed: end token and reason, ascending
    as_of: float = 0.0  # when this was known, on the clock of the tiers' owner
    num_lasting: int = 0  # see `Misses`


NO_TRAIL = Trail(1, ())
TrailListener: TypeAlias = Callable[[RequestRecord, Trail], None]


class Trails:
    """The origins of the prompt blocks of each request whose prefix was loaded, until the request ends.

    Owned by the engine's thread.
    """

    def __init__(self) -> None:
        self._trails: dict[Hashable, Trail] = {}

    def begin(self, request: Hashable, trail: Trail) -> None:
        """Store a request's trail, the origins of its prompt blocks, unless it has one from before a preemption."""
        self._trails.setdefault(request, trail)

    def end(self, request: Hashable) -> Trail | None:
        """Remove and return an ended request's trail, the origins of its prompt blocks; None if it has no trail."""
        return self._trails.pop(request, None)
