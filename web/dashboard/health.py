"""The health of a server's components: for each one a state, and a text that explains it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvtier.engine.attached.link import SidecarStanding
from kvtier.engine.stores.reopening_store import StoreStanding, WhyClosed
from kvtier.tiers.lower.breaker import BreakerState
from kvtier.tiers.lower.remote.remote_statistics import RemoteStatistics
from kvtier.tiers.lower.statistics import DiskStatistics, TierStatistics
from kvtier.tiers.naming.tier import Tier

LIFE_SHORT_YEARS = 1.0


class HealthState(StrEnum):
    """The state of one component."""

    GOOD = "good"
    WATCH = "watch"  # it works, but an operator should look at it
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Condition:
    """The health of one component, which *thing* names."""

    thing: str
    state: HealthState
    text: str


def disk_conditions(store: StoreStanding | None, disk: DiskStatistics | None) -> Iterator[Condition]:
    """Yield the health of the disk tier's store, reads, writes and drive, if there is a disk tier."""
    if store is not None:
        yield _store(store)
    if disk is None:
        return
    for side, state in disk.breakers.items():
        yield _side({"read": "reading", "write": "writing"}[side], state, disk.why_failed[side])
    if disk.budget_left_bytes is not None and disk.budget_left_bytes <= 0:
        text = "today's write budget is used up: only blocks that are used a second time are written"
        yield Condition("writes", HealthState.WATCH, text)
    if disk.life is not None:
        yield _life(disk.life.used, disk.life.years_left)


def remote_conditions(remote: RemoteStatistics | None) -> Iterator[Condition]:
    """Yield the health of lookups, reads and writes in the remote tier, if there is one."""
    if remote is None:
        return
    doing = {"ask": "lookups", "read": "reading", "write": "writing"}
    for side, state in remote.breakers.items():
        yield _side(f"remote: {doing[side]}", state, remote.why_failed[side])


def tier_conditions(tiers: Mapping[Tier, TierStatistics]) -> Iterator[Condition]:
    """Yield a condition for each tier that had damaged blocks, or that evicted blocks before they were copied."""
    for tier, found in tiers.items():
        if damaged := sum(found.corrupt.values()):
            causes = ", ".join(f"{number:,} {cause}" for cause, number in found.corrupt.items() if number)
            text = f"{_blocks(damaged)} failed verification since the start ({causes}); their tokens were recomputed"
            yield Condition(f"{tier} blocks", HealthState.WATCH, text)
        if found.dropped_spills and tier is not Tier.DISK:
            text = f"{_blocks(found.dropped_spills)} evicted before they were copied to a lower tier"
            yield Condition(f"{tier} spills", HealthState.WATCH, text)


def sidecar_condition(sidecar: SidecarStanding) -> Condition:
    """Return the condition of an engine's sidecar."""
    if sidecar.is_attached:
        return Condition("sidecar", HealthState.GOOD, f"attached at {sidecar.path}")
    return Condition("sidecar", HealthState.BAD, f"{sidecar.path} is gone or does not answer; retrying")


def _blocks(number: int) -> str:
    return "1 block" if number == 1 else f"{number:,} blocks"


def _store(store: StoreStanding) -> Condition:
    if store.not_open is None:
        num_faults = store.num_gone + store.num_ended
        if not num_faults:
            return Condition("store", HealthState.GOOD, f"{store.folder} is open")
        why = f": {store.why_ended}" if store.why_ended else ""
        return Condition("store", HealthState.WATCH, f"open, but was lost {num_faults:,} times since the start{why}")
    state = HealthState.WATCH if store.not_open is WhyClosed.OPENING else HealthState.BAD
    return Condition("store", state, f"not open ({store.not_open}): {store.why or 'retrying'}")


def _side(doing: str, state: BreakerState, why: str) -> Condition:
    if state is BreakerState.CLOSED:
        return Condition(doing, HealthState.GOOD, "works")
    left = {BreakerState.OPEN: HealthState.BAD, BreakerState.HALF_OPEN: HealthState.WATCH}[state]
    return Condition(doing, left, f"paused for a while: {why or 'errors, or no answer'}")


def _life(used: float, years_left: float) -> Condition:
    state = HealthState.GOOD if used < 1 and years_left >= LIFE_SHORT_YEARS else HealthState.WATCH
    if used >= 1:
        return Condition("drive", state, f"{used:.0%} of its endurance is used: replace it, or lower the write budget")
    share = f"{used:.1%}" if used >= 0.001 else "less than 0.1%"  # a new drive
    return Condition("drive", state, f"{share} of its endurance is used")


def as_facts(conditions: Iterable[Condition]) -> list[dict[str, object]]:
    """Return the conditions as JSON objects."""
    return [{"thing": each.thing, "state": each.state, "text": each.text} for each in conditions]
