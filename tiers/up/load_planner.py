"""LoadPlanner: decides how much of a hit to load, and how much to recompute because that is faster."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.tiers.lower.statistics import PlanStatistics
from kvtier.tiers.up.prefill_speed import PrefillSpeed
from kvtier.transfer.lane import LaneSpeed
from kvtier.transfer.transfer_engine import Route

# A lane (the queue of copies between two tiers) that was slow must be tried again at some time. Its measured speed is
# trusted for _PATIENCE_S, and is then assumed to double every _OPTIMISM_S. So a disk that stays slow delays one request
# in that time.
_PATIENCE_S = 120.0
_OPTIMISM_S = 30.0
_MAX_DOUBLINGS = 64.0
_FIRST_TOKENS = 1000  # tokens of a prompt for which the prefill speed is reported
_MIN_GAIN = 0.1  # minimum relative gain in time to first token for which a hit is split


class LoadPlan(NamedTuple):
    """A plan for a hit: load tokens *start* to *end* - 1, and compute the tokens before *start* at the same time."""

    start: int
    end: int


LoadSpeeds = Mapping[Route, LaneSpeed]
"""The recent speed of each route (pair of tiers) of loads."""


class Moves(NamedTuple):
    """Bytes that one route has to move for each prefix of a hit, and the bytes already queued on the route."""

    num_bytes: npt.NDArray[np.float64]  # [num_prefixes]
    queued_bytes: int


@dataclass(frozen=True, slots=True)
class Demand:
    """The bytes that must be moved to load each prefix of a hit. For the first prefix, nothing must be moved."""

    ends: npt.NDArray[np.float64]  # [num_prefixes] lengths in tokens, ascending
    moves: Mapping[Route, Moves]


class LoadPlanner:
    """Chooses the prefix to load that minimises a request's time to first token.

    Hits are loaded in full until the prefill speed is known, and a lane of unknown speed counts as infinitely fast. The
    planner assumes that a request loads while the device computes for earlier requests. It takes the bytes queued on a
    lane into account, so a disk that is too slow for all requests serves some of them. Owned by the engine's thread.
    """

    def __init__(
        self, prefill: PrefillSpeed, chunk: int, clock: Callable[[], float], with_splits: bool = False
    ) -> None:
        """Create a planner for steps that compute up to *chunk* tokens of a prompt.

        *with_splits* says whether a hit may be split: its front is computed while the rest is loaded. It must be False
        if a group forgets (sliding window, recurrent state), because such a group needs the same blocks at the hit's
        end, no matter how much of the front is computed.
        """
        self.prefill = prefill
        self.num_plans: Counter[str] = Counter()  # by outcome: all, split, part, nothing
        self._chunk = chunk
        self._clock = clock
        self._with_splits = with_splits

    def choose(self, demand: Demand, num_tokens: int, busy_s: float, speeds: LoadSpeeds) -> LoadPlan:
        """Return the same as `best`, and count the plan once the prefill speed is known."""
        plan = self.best(demand, num_tokens, busy_s, speeds)
        if self.prefill.is_known:
            self.num_plans[_outcome(plan, demand)] += 1
        return plan

    def best(self, demand: Demand, num_tokens: int, busy_s: float, speeds: LoadSpeeds) -> LoadPlan:
        """Return the best plan for a prompt of *num_tokens* tokens after *busy_s* seconds of earlier compute."""
        if not self.prefill.is_known:
            return LoadPlan(0, int(demand.ends[-1]))
        loads = self._load_seconds(demand, speeds)
        computes = self.prefill.seconds_of_rest(demand.ends, num_tokens, self._chunk)
        totals = np.maximum(loads, busy_s) + computes
        place = len(totals) - 1 - int(np.argmin(totals[::-1]))  # of equally fast loads the longest, to save compute
        if self._with_splits:
            loads = self._load_seconds(_rests(demand), speeds)
            fronts = self.prefill.seconds_of_rest(demand.ends[:1], demand.ends, self._chunk)
            splits = np.maximum(loads, busy_s + fronts) + computes[-1]
            start = int(np.argmin(splits))
            if splits[start] < totals[place] * (1 - _MIN_GAIN):
                return LoadPlan(int(demand.ends[start]), int(demand.ends[-1]))
        return LoadPlan(0, int(demand.ends[place]))

    def statistics(self) -> PlanStatistics:
        """Return a copy of the number of plans by outcome, and the measured prefill speed."""
        seconds = self.compute_seconds(0, _FIRST_TOKENS)
        return PlanStatistics(dict(self.num_plans), _FIRST_TOKENS / seconds if seconds else None)

    def compute_seconds(self, depth: int, num_tokens: int) -> float:
        """Return the seconds to compute *num_tokens* tokens after the first *depth*; 0 if the speed is not known."""
        return self.prefill.seconds(depth, num_tokens, self._chunk) if self.prefill.is_known else 0.0

    def load_seconds(self, demand: Demand, speeds: LoadSpeeds) -> float | None:
        """Return the seconds to load the whole hit; None if a required lane's speed was never measured."""
        if any(moves.num_bytes[-1] and speeds[route].bytes_per_s is None for route, moves in demand.moves.items()):
            return None
        return float(self._load_seconds(demand, speeds)[-1])

    def _load_seconds(self, demand: Demand, speeds: LoadSpeeds) -> npt.NDArray[np.float64]:
        """Return the seconds to load each prefix after the queued bytes. All lanes work at the same time."""
        seconds = np.zeros(len(demand.ends))
        for route, moves in demand.moves.items():
            np.maximum(seconds, self._seconds(speeds[route], moves), out=seconds)
        return seconds

    def _seconds(self, speed: LaneSpeed, moves: Moves) -> npt.NDArray[np.float64]:
        """Return for each prefix the seconds until one lane has moved the queued bytes and then the prefix's bytes.

        The result is 0 for prefixes that need nothing from this lane.
        """
        num_bytes, queued_bytes = moves
        if speed.bytes_per_s is None:
            return np.zeros(len(num_bytes))
        hope = 2.0 ** min(max(0.0, self._clock() - speed.measured_at - _PATIENCE_S) / _OPTIMISM_S, _MAX_DOUBLINGS)
        move_s = (num_bytes + queued_bytes) / (speed.bytes_per_s * hope)
        return np.where(num_bytes > 0, speed.latency_s / hope + move_s, 0.0)


def _rests(demand: Demand) -> Demand:
    """Return the demand of the rest of the hit after each prefix."""
    rests = {route: Moves(num_bytes[-1] - num_bytes, queued) for route, (num_bytes, queued) in demand.moves.items()}
    return Demand(demand.ends, rests)


def _outcome(plan: LoadPlan, demand: Demand) -> str:
    if plan.start:
        return "split"
    if plan.end == demand.ends[-1]:
        return "all"
    return "part" if plan.end > demand.ends[0] else "nothing"
