"""Conditions: what is in order and what is not, in a sentence each, with what to do."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvtier.engine.attached.standing import SidecarStanding
from kvtier.engine.stores.reopening_store import NotOpen, StoreStanding
from kvtier.tiers.lower.breaker import BreakerState
from kvtier.tiers.lower.remote.remote_statistics import RemoteStatistics
from kvtier.tiers.lower.statistics import DiskStatistics, TierStatistics
from kvtier.tiers.naming.tier import Tier

LIFE_SHORT_YEARS = 1.0


class State(StrEnum):
    """How it is with one thing."""

    GOOD = "good"
    WATCH = "watch"  # it works; somebody should look at it
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Condition:
    """One thing, and how it is."""

    thing: str
    state: State
    text: str


def disk_conditions(store: StoreStanding | None, disk: DiskStatistics | None) -> Iterator[Condition]:
    """How the store, its two sides and the drive are; nothing without a disk."""
    if store is not None:
        yield _store(store)
    if disk is None:
        return
    for side, state in disk.breakers.items():
        yield _side({"read": "reading", "write": "writing"}[side], state, disk.why_failed[side])
    if disk.budget_left_bytes is not None and disk.budget_left_bytes <= 0:
        text = "the day's budget of writes is used up: only what is used a second time is written"
        yield Condition("writes", State.WATCH, text)
    if disk.life is not None:
        yield _life(disk.life.used, disk.life.years_left)


def remote_conditions(remote: RemoteStatistics | None) -> Iterator[Condition]:
    """How the remote tier is; nothing without one."""
    if remote is None:
        return
    doing = {"ask": "asking", "read": "reading", "write": "writing"}
    for side, state in remote.breakers.items():
        yield _side(f"remote: {doing[side]}", state, remote.why_failed[side])


def tier_conditions(tiers: Mapping[Tier, TierStatistics]) -> Iterator[Condition]:
    """Damage and losses in each tier."""
    for tier, found in tiers.items():
        if damaged := sum(found.corrupt.values()):
            causes = ", ".join(f"{number:,} {cause}" for cause, number in found.corrupt.items() if number)
            text = (
                f"{_blocks(damaged)} gave no valid bytes since the start ({causes}); what they held was computed anew"
            )
            yield Condition(f"{tier} blocks", State.WATCH, text)
        if found.dropped_spills and tier is not Tier.DISK:
            text = f"{_blocks(found.dropped_spills)} evicted before the tier below had a copy"
            yield Condition(f"{tier} spills", State.WATCH, text)


def sidecar_condition(sidecar: SidecarStanding) -> Condition:
    """Whether an engine's sidecar is there."""
    if sidecar.is_attached:
        return Condition("sidecar", State.GOOD, f"attached at {sidecar.path}")
    return Condition("sidecar", State.BAD, f"{sidecar.path} has gone or does not answer; trying again")


def _blocks(number: int) -> str:
    return "1 block" if number == 1 else f"{number:,} blocks"


def _store(store: StoreStanding) -> Condition:
    if store.not_open is None:
        num_faults = store.num_gone + store.num_ended
        if not num_faults:
            return Condition("store", State.GOOD, f"{store.folder} is open")
        why = f": {store.why_ended}" if store.why_ended else ""
        return Condition("store", State.WATCH, f"open; it was lost {num_faults:,} times since the start{why}")
    state = State.WATCH if store.not_open is NotOpen.OPENING else State.BAD
    return Condition("store", state, f"not open ({store.not_open}): {store.why or 'trying again'}")


def _side(doing: str, state: BreakerState, why: str) -> Condition:
    if state is BreakerState.CLOSED:
        return Condition(doing, State.GOOD, "works")
    left = {BreakerState.OPEN: State.BAD, BreakerState.HALF_OPEN: State.WATCH}[state]
    return Condition(doing, left, f"left alone for a while: {why or 'errors, or no answer'}")


def _life(used: float, years_left: float) -> Condition:
    state = State.GOOD if used < 1 and years_left >= LIFE_SHORT_YEARS else State.WATCH
    if used >= 1:
        return Condition("drive", state, f"{used:.0%} of its endurance is written: replace it, or lower the budget")
    share = f"{used:.1%}" if used >= 0.001 else "less than 0.1%"  # of a new drive
    return Condition("drive", state, f"{share} of its endurance is written")


def as_facts(conditions: Iterable[Condition]) -> list[dict[str, object]]:
    """The conditions as JSON has them."""
    return [{"thing": each.thing, "state": each.state, "text": each.text} for each in conditions]
