"""Statistics of a remote tier."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvtier.store.remote_store import RemoteUsage
from kvtier.tiers.lower.breaker import BreakerState

_WORSE = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)


@dataclass(frozen=True, slots=True)
class RemoteStatistics:
    """The state of a remote tier at one moment, and counts since the start."""

    where: str  # the store's address, for display
    usage: RemoteUsage
    known_blocks: int  # blocks believed to be in the store
    num_asked: int  # prefixes looked up in the store
    num_late: int  # requests that went on without the store's answer, because it came too late
    num_stored: int  # blocks written to the store
    num_there: int  # blocks not written because the store already had them
    num_refused: int  # blocks that the store did not accept
    num_wanted: int  # blocks still to be written
    ask_s: float  # recent latency of a query; 0 before the first answer
    breakers: Mapping[str, BreakerState]  # of "ask", "read" and "write"
    num_opened: Mapping[str, int]  # how often each breaker has opened
    why_failed: Mapping[str, str]  # the last error of each, for display; empty if there was none
    faults: Mapping[str, int]  # rejected values and failed reads, by cause


def remote_of_all(remotes: Sequence[RemoteStatistics]) -> RemoteStatistics | None:
    """Merge the statistics of several tiers that share one store; return None if *remotes* is empty.

    Counts are added. A circuit breaker's state is the worst that it has in any of the tiers. The store's usage is the
    same for all tiers.
    """
    if not remotes:
        return None
    first, faults, num_opened = remotes[0], Counter[str](), Counter[str]()
    for each in remotes:
        faults.update(each.faults)
        num_opened.update(each.num_opened)
    return replace(
        first,
        known_blocks=sum(each.known_blocks for each in remotes),
        num_asked=sum(each.num_asked for each in remotes),
        num_late=sum(each.num_late for each in remotes),
        num_stored=sum(each.num_stored for each in remotes),
        num_there=sum(each.num_there for each in remotes),
        num_refused=sum(each.num_refused for each in remotes),
        num_wanted=sum(each.num_wanted for each in remotes),
        ask_s=max(each.ask_s for each in remotes),
        breakers={side: max((each.breakers[side] for each in remotes), key=_WORSE.index) for side in first.breakers},
        num_opened={side: num_opened[side] for side in first.num_opened},
        why_failed={
            side: next((why for each in remotes if (why := each.why_failed[side])), "") for side in first.why_failed
        },
        faults=dict(faults),
    )
