"""Trail: how one prompt went through the cache, block by block, in names and numbers."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.tier import Reason


@dataclass(frozen=True, slots=True)
class Trail:
    """What is known of a request's prompt once its prefix has come. No token of it is here, only blocks' names.

    A prefix of as many blocks as *depths* has came from the cache, then *num_copied* tokens out of a block that shares
    only its first tokens with the prompt; what follows was computed.
    """

    block_size: int
    names: Sequence[BlockName]  # of all full blocks of the prompt
    depths: bytes = b""  # `Tier.depth` of the coldest tier that a block came from; COMPUTED: it was computed meanwhile
    num_copied: int = 0
    misses: tuple[tuple[int, Reason], ...] = ()  # why tokens were computed: reasons, each up to which token; ascending
    as_of: float = 0.0  # when that was known, on the clock of the tiers' owner


NO_TRAIL = Trail(1, ())
TrailListener: TypeAlias = Callable[[RequestRecord, Trail], None]


class Trails:
    """Trails of requests that run, from when their prefix has come until they end. Owned by the engine's thread."""

    def __init__(self) -> None:
        self._trails: dict[Hashable, Trail] = {}

    def begin(self, request: Hashable, trail: Trail) -> None:
        """Keep the request's trail. One that was preempted and loads again keeps its first."""
        self._trails.setdefault(request, trail)

    def end(self, request: Hashable) -> Trail | None:
        """Give out the trail of a request that has ended; None if its prefix never came."""
        return self._trails.pop(request, None)
