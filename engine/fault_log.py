"""FaultLog: rate-limited log lines about faults of the tiers and their recovery."""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from kvtier.engine.attached.link import SidecarStanding
from kvtier.engine.stores.reopening_store import StoreStanding, WhyClosed
from kvtier.store.record import Fault
from kvtier.tiers.lower.breaker import BreakerState
from kvtier.tiers.lower.remote.remote_statistics import RemoteStatistics
from kvtier.tiers.lower.statistics import DiskStatistics, TierStatistics
from kvtier.tiers.naming.tier import Tier

_T = TypeVar("_T")
QUIET_S = 60.0  # minimum time between two lines about the same topic

# Faults that are not reported as corrupt blocks: a missing block was evicted concurrently, and I/O errors open the
# circuit breaker, which has a line of its own.
_NO_DAMAGE = {Fault.MISSING, Fault.IO_ERROR}
log = logging.getLogger(__name__)


class FaultLog:
    """A log of faults of the tiers, such as a full disk or a lost sidecar, and of their recovery.

    `look` logs what has changed since its last call. It logs at most one line per topic in `QUIET_S` seconds, and the
    next line counts the events in between. Only the thread that owns the tiers may use this object.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._told: dict[str, object] = {}  # by topic, the state in its last line
        self._told_at: dict[str, float] = {}

    def look(
        self,
        standing: StoreStanding | None,
        disk: DiskStatistics | None,
        tiers: Mapping[Tier, TierStatistics],
        sidecar: SidecarStanding | None = None,
        remote: RemoteStatistics | None = None,
    ) -> None:
        """Log the faults and recoveries since earlier calls. An argument is None if its tier is not configured.

        *standing* says whether the disk tier's store is open. *disk* has the disk tier's statistics.
        """
        if sidecar is not None:
            self._look_at_sidecar(sidecar)
        if standing is not None:
            self._look_at_store(standing)
        if disk is not None:
            for side in disk.breakers:
                self._look_at_side(side, disk)
        if remote is not None:
            self._look_at_remote(remote)
        for tier, found in tiers.items():
            self._look_at_damage(tier, found.corrupt)

    def _look_at_store(self, standing: StoreStanding) -> None:
        folder = standing.folder
        for num_gone in self._take_change("gone", standing.num_gone, 0):
            log.warning(
                "disk: %s was removed or replaced while it was open%s; its blocks are lost, and it is reopened",
                folder,
                _times(standing.num_gone - num_gone),
            )
        is_told = standing.not_open is WhyClosed.GONE  # the line above reports it
        for _ in () if is_told else self._take_change("open", standing.not_open, None):
            if standing.not_open is None:
                log.warning("disk: %s is open; it is used from now on", folder)
            else:
                log.warning("disk: %s is not open (%s); serving without it, trying again", folder, standing.why)
        for num_ended in self._take_change("ended", standing.num_ended, 0):
            times = _times(standing.num_ended - num_ended)
            log.warning("disk: the store's process ended%s (%s)", times, standing.why_ended)
        for num_restarts in self._take_change("restarted", standing.num_restarts, 0):
            log.warning("disk: the store's process was started again%s", _times(standing.num_restarts - num_restarts))

    def _look_at_sidecar(self, sidecar: SidecarStanding) -> None:
        state = (sidecar.is_attached, sidecar.num_attached)
        if "sidecar" not in self._told:  # the first attachment is logged at the start
            self._told["sidecar"] = state
        for told in self._take_change("sidecar", state, state):
            was_attached, num_attached = told
            if not sidecar.is_attached:
                log.warning("sidecar: %s has gone or does not answer; serving without it, trying again", sidecar.path)
                continue
            times = sidecar.num_attached - num_attached
            gone = f" was lost{_times(times)} and" if was_attached else ""
            log.warning("sidecar: %s%s is attached; it is used from now on", sidecar.path, gone)

    def _look_at_side(self, side: str, disk: DiskStatistics) -> None:
        doing = {"read": "reading", "write": "writing"}[side]
        rests = disk.breakers[side] is not BreakerState.CLOSED
        for told in self._take_change(side, (rests, disk.num_opened[side]), (False, 0)):
            assert isinstance(told, tuple), "logged state of a breaker"
            if rests or not told[0]:  # `not told[0]`: the breaker opened and closed again since the last line
                times = _times(disk.num_opened[side] - told[1])
                why = disk.why_failed[side] or "errors, or no answer"
                log.warning("disk: %s failed%s and is paused (%s)", doing, times, why)
            if not rests:
                log.warning("disk: %s works again", doing)

    def _look_at_remote(self, remote: RemoteStatistics) -> None:
        """Log faults of the remote store. Reads and writes share a line: both fail if the store is unreachable."""
        failing = [side for side, state in remote.breakers.items() if state is not BreakerState.CLOSED]
        for were_failing in self._take_change("remote", bool(failing), False):
            if failing:
                why = next((why for side in failing if (why := remote.why_failed[side])), "") or "no answer in time"
                log.warning("remote: %s is paused (%s); serving without it", remote.where, why)
            elif were_failing:
                log.warning("remote: %s answers again; it is used from now on", remote.where)

    def _look_at_damage(self, tier: str, counts: Mapping[str, int]) -> None:
        damaged = {cause: number for cause, number in counts.items() if cause not in _NO_DAMAGE}
        for told in self._take_change(f"damage {tier}", damaged, {}):
            assert isinstance(told, dict), "logged counts of damage"
            new = {cause: number - told.get(cause, 0) for cause, number in damaged.items()}
            causes = ", ".join(f"{number} {cause}" for cause, number in sorted(new.items()) if number)
            log.warning("%s: corrupt blocks were found (%s); they will be recomputed", tier, causes)

    def _take_change(self, thing: str, state: _T, at_first: _T) -> Iterator[_T]:
        """Yield the previously logged state of *thing* if its new *state* must be logged now. Otherwise yield nothing.

        A state must be logged if it differs from the previous one, whose log line is at least `QUIET_S` seconds old.
        Before the first log line, *at_first* is the previous state. States may be None, so this is an iterator.
        """
        told: _T = self._told.get(thing, at_first)  # type: ignore[assignment]  # all states of a topic have one type
        now = self._clock()
        if state != told and now - self._told_at.get(thing, -QUIET_S) >= QUIET_S:
            self._told[thing], self._told_at[thing] = state, now
            yield told


def flush_fault(
    standing: StoreStanding | None,
    disk: DiskStatistics | None,
    timeout_s: float,
    sidecar: SidecarStanding | None = None,
) -> str:
    """Return why not all blocks could be flushed to the disk or the sidecar, as far as this is known."""
    if sidecar is not None and not sidecar.is_attached:
        return f"{sidecar.path} has gone or does not answer"
    if sidecar is not None:
        return f"it did not accept all of them within {timeout_s:.0f} s"
    assert disk is not None, "flush without a disk"
    if standing is not None and standing.not_open is not None:
        return f"{standing.folder} is not open: {standing.why}"
    if disk.breakers["write"] is not BreakerState.CLOSED:
        return disk.why_failed["write"] or "writing hangs"
    return f"not all were written within {timeout_s:.0f} s, or there is no room for them"


def _times(number: int) -> str:
    return f" {number} times" if number > 1 else ""
