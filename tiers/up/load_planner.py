"""LoadPlanner: how much of a hit to load, and how much to compute anew because that is faster."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.tiers.lower.statistics import PlanStatistics
from kvtier.tiers.up.prefill_speed import PrefillSpeed
from kvtier.transfer.lane_speed import LaneSpeed

# A lane that was slow is tried again some time. Its measured speed is believed for _PATIENCE_S, then thought twice as
# fast every _OPTIMISM_S: a disk that is slow for good costs one request in that time.
_PATIENCE_S = 120.0
_OPTIMISM_S = 30.0
_MOST_DOUBLINGS = 64.0
_FIRST_TOKENS = 1000
_LEAST_GAIN = 0.1  # of the time to the first token, for which a part is computed although loading it would be possible


class Plan(NamedTuple):
    """What to do with a hit: load tokens *start* to *end*, while the tokens before *start* are computed."""

    start: int
    end: int


class LoadSpeeds(NamedTuple):
    """How fast blocks were lately read from disk, and copied to the device."""

    reads: LaneSpeed
    uploads: LaneSpeed


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes that each prefix of a hit has to move, beside the bytes queued already. The first one moves nothing."""

    ends: npt.NDArray[np.float64]  # [num_prefixes] tokens, ascending
    disk_bytes: npt.NDArray[np.float64]  # [num_prefixes] to read from disk
    device_bytes: npt.NDArray[np.float64]  # [num_prefixes] to copy to the device
    queued_disk_bytes: int
    queued_device_bytes: int


class LoadPlanner:
    """Chooses the prefix with which a request's first token comes soonest, if prefill speed and lanes are known.

    Until they are, everything is loaded. Loading runs beside the computing of other requests, which hides it. The bytes
    queued on a lane count, so a disk that is too slow for all requests is used by some. Owned by the engine's thread.
    """

    def __init__(
        self, prefill: PrefillSpeed, chunk: int, clock: Callable[[], float], with_splits: bool = False
    ) -> None:
        """*chunk*: tokens of a prompt computed in a step at most. *with_splits*: whether the front of a hit may be
        computed while the rest of it is loaded; False if a group forgets: no prefix makes its demand smaller."""
        self.prefill = prefill
        self.num_plans: Counter[str] = Counter()  # by outcome: all, split, part, nothing
        self._chunk = chunk
        self._clock = clock
        self._with_splits = with_splits

    def choose(self, demand: Demand, num_tokens: int, busy_s: float, speeds: LoadSpeeds) -> Plan:
        """`best`, for a request that goes by it: the plan is counted, once there is something to choose by."""
        plan = self.best(demand, num_tokens, busy_s, speeds)
        if self.prefill.is_known:
            self.num_plans[_outcome(plan, demand)] += 1
        return plan

    def best(self, demand: Demand, num_tokens: int, busy_s: float, speeds: LoadSpeeds) -> Plan:
        """What to do with the hit of a prompt of *num_tokens*; *busy_s*: seconds of computing that go first."""
        if not self.prefill.is_known:
            return Plan(0, int(demand.ends[-1]))
        loads = self._load_seconds(demand, demand.disk_bytes, demand.device_bytes, speeds)
        computes = self.prefill.seconds_of_rest(demand.ends, num_tokens, self._chunk)
        totals = np.maximum(loads, busy_s) + computes
        place = len(totals) - 1 - int(np.argmin(totals[::-1]))  # of equals the longest: the device is left to others
        if self._with_splits:
            from_disk, to_device = demand.disk_bytes, demand.device_bytes
            loads = self._load_seconds(demand, from_disk[-1] - from_disk, to_device[-1] - to_device, speeds)
            fronts = self.prefill.seconds_of_rest(demand.ends[:1], demand.ends, self._chunk)
            splits = np.maximum(loads, busy_s + fronts) + computes[-1]
            start = int(np.argmin(splits))
            if splits[start] < totals[place] * (1 - _LEAST_GAIN):
                return Plan(int(demand.ends[start]), int(demand.ends[-1]))
        return Plan(0, int(demand.ends[place]))

    def statistics(self) -> PlanStatistics:
        """The plans by outcome and the measured speed, by value."""
        seconds = self.compute_seconds(0, _FIRST_TOKENS)
        return PlanStatistics(dict(self.num_plans), _FIRST_TOKENS / seconds if seconds else None)

    def compute_seconds(self, depth: int, num_tokens: int) -> float:
        """Seconds to compute *num_tokens* tokens after *depth* tokens; 0 if that is not known yet."""
        return self.prefill.seconds(depth, num_tokens, self._chunk) if self.prefill.is_known else 0.0

    def load_seconds(self, demand: Demand, speeds: LoadSpeeds) -> float | None:
        """Seconds to move all of it; None if it needs a lane whose speed was never measured."""
        ways = zip(speeds, (demand.disk_bytes, demand.device_bytes), strict=True)
        if any(num_bytes[-1] and speed.bytes_per_s is None for speed, num_bytes in ways):
            return None
        return float(self._load_seconds(demand, demand.disk_bytes, demand.device_bytes, speeds)[-1])

    def _load_seconds(
        self,
        demand: Demand,
        disk_bytes: npt.NDArray[np.float64],
        device_bytes: npt.NDArray[np.float64],
        speeds: LoadSpeeds,
    ) -> npt.NDArray[np.float64]:
        """Seconds to move these bytes after the queued ones. Both lanes work at the same time."""
        return np.maximum(
            self._seconds(speeds.reads, disk_bytes, demand.queued_disk_bytes),
            self._seconds(speeds.uploads, device_bytes, demand.queued_device_bytes),
        )

    def _seconds(
        self, speed: LaneSpeed, num_bytes: npt.NDArray[np.float64], queued_bytes: int
    ) -> npt.NDArray[np.float64]:
        """Seconds until one lane has moved the queued bytes and these; 0 where these are none."""
        if speed.bytes_per_s is None:
            return np.zeros(len(num_bytes))
        hope = 2.0 ** min(max(0.0, self._clock() - speed.measured_at - _PATIENCE_S) / _OPTIMISM_S, _MOST_DOUBLINGS)
        return np.where(num_bytes > 0, (num_bytes + queued_bytes) / (speed.bytes_per_s * hope), 0.0)


def _outcome(plan: Plan, demand: Demand) -> str:
    if plan.start:
        return "split"
    if plan.end == demand.ends[-1]:
        return "all"
    return "part" if plan.end > demand.ends[0] else "nothing"
