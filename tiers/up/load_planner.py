"""LoadPlanner: how much of a hit to load, and how much to compute anew because that is faster."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.tiers.lower.statistics import PlanStatistics
from kvtier.tiers.up.prefill_speed import PrefillSpeed
from kvtier.transfer.lane_speed import LaneSpeed
from kvtier.transfer.transfer_engine import Route

# A lane that was slow is tried again some time. Its measured speed is believed for _PATIENCE_S, then thought twice as
# fast every _OPTIMISM_S: a disk that is slow for good costs one request in that time.
_PATIENCE_S = 120.0
_OPTIMISM_S = 30.0
_MAX_DOUBLINGS = 64.0
_FIRST_TOKENS = 1000
_MIN_GAIN = 0.1  # of the time to the first token, for which a part is computed although loading it would be possible


class Plan(NamedTuple):
    """What to do with a hit: load tokens *start* to *end*, while the tokens before *start* are computed."""

    start: int
    end: int


LoadSpeeds = Mapping[Route, LaneSpeed]
"""How fast blocks have come lately, by each route by which they come."""


class Moves(NamedTuple):
    """Bytes that each prefix of a hit has to move by one route, beside the bytes queued there already."""

    num_bytes: npt.NDArray[np.float64]  # [num_prefixes]
    queued_bytes: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What each prefix of a hit has to move. The first one moves nothing."""

    ends: npt.NDArray[np.float64]  # [num_prefixes] tokens, ascending
    moves: Mapping[Route, Moves]


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
        loads = self._load_seconds(demand, speeds)
        computes = self.prefill.seconds_of_rest(demand.ends, num_tokens, self._chunk)
        totals = np.maximum(loads, busy_s) + computes
        place = len(totals) - 1 - int(np.argmin(totals[::-1]))  # of equals the longest: the device is left to others
        if self._with_splits:
            loads = self._load_seconds(_rests(demand), speeds)
            fronts = self.prefill.seconds_of_rest(demand.ends[:1], demand.ends, self._chunk)
            splits = np.maximum(loads, busy_s + fronts) + computes[-1]
            start = int(np.argmin(splits))
            if splits[start] < totals[place] * (1 - _MIN_GAIN):
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
        if any(moves.num_bytes[-1] and speeds[route].bytes_per_s is None for route, moves in demand.moves.items()):
            return None
        return float(self._load_seconds(demand, speeds)[-1])

    def _load_seconds(self, demand: Demand, speeds: LoadSpeeds) -> npt.NDArray[np.float64]:
        """Seconds to move these bytes after the queued ones. All lanes work at the same time."""
        seconds = np.zeros(len(demand.ends))
        for route, moves in demand.moves.items():
            np.maximum(seconds, self._seconds(speeds[route], moves), out=seconds)
        return seconds

    def _seconds(self, speed: LaneSpeed, moves: Moves) -> npt.NDArray[np.float64]:
        """Seconds until one lane has moved the queued bytes and these; 0 where these are none."""
        num_bytes, queued_bytes = moves
        if speed.bytes_per_s is None:
            return np.zeros(len(num_bytes))
        hope = 2.0 ** min(max(0.0, self._clock() - speed.measured_at - _PATIENCE_S) / _OPTIMISM_S, _MAX_DOUBLINGS)
        move_s = (num_bytes + queued_bytes) / (speed.bytes_per_s * hope)
        return np.where(num_bytes > 0, speed.latency_s / hope + move_s, 0.0)


def _rests(demand: Demand) -> Demand:
    """What is left to move of the whole hit after each prefix."""
    rests = {route: Moves(num_bytes[-1] - num_bytes, queued) for route, (num_bytes, queued) in demand.moves.items()}
    return Demand(demand.ends, rests)


def _outcome(plan: Plan, demand: Demand) -> str:
    if plan.start:
        return "split"
    if plan.end == demand.ends[-1]:
        return "all"
    return "part" if plan.end > demand.ends[0] else "nothing"
