"""RemoteStatistics: a remote tier at one moment."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvtier.store.remote_store import RemoteUsage
from kvtier.tiers.lower.breaker import BreakerState

_WORSE = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN)


@dataclass(frozen=True, slots=True)
class RemoteStatistics:
    """A remote tier at one moment; totals since the start."""

    where: str
    usage: RemoteUsage
    known_blocks: int  # that are believed to be there
    num_asked: int  # prefixes asked about
    num_late: int  # of these, answered after their request had gone on without
    num_stored: int  # blocks that were put
    num_there: int  # blocks that were to be put and were there already
    num_refused: int  # blocks that the store did not take
    num_wanted: int  # blocks that are to be put
    ask_s: float  # that a question takes, lately; 0 before the first answer
    breakers: Mapping[str, BreakerState]  # of "ask", "read" and "write"
    num_opened: Mapping[str, int]
    why_failed: Mapping[str, str]  # the last error of each, for people; empty if there was none
    faults: Mapping[str, int]  # values that were refused, and reads that failed, by cause


def remote_of_all(remotes: Sequence[RemoteStatistics]) -> RemoteStatistics | None:
    """One store as several tiers have met it: what each has counted summed, and of what can be out of order the
    worst. What was asked of the store is the same for all. None of none."""
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
