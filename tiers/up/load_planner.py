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
    """A plan for a hit: load tokens *start* to *end* - 1, and meanwhile compute the tokens before *start*.

    The tokens from *end* on are computed afterwards.
    """

    start: int
    end: int


LoadSpeeds = Mapping[Route, LaneSpeed]
"""The recent speed of each route (pair of tiers) of loads."""


class Moves(NamedTuple):
    """The bytes that one route (pair of tiers) has to copy to load a hit, for each prefix of the hit.

    *queued_bytes* are the bytes of earlier loads, which are copied first.
    """

    num_bytes: npt.NDArray[np.float64]  # [num_prefixes]
    queued_bytes: int


@dataclass(frozen=True, slots=True)
class Demand:
    """The bytes that must be copied to load a hit, for each prefix to which the hit could be shortened.

    The first prefix is empty or on the device, so it needs no copies.
    """

    ends: npt.NDArray[np.float64]  # [num_prefixes] lengths in tokens, ascending
    moves: Mapping[Route, Moves]


class LoadPlanner:
    """A planner that decides how much of a hit to load, so that the time to first token is minimal.

    Hits are loaded in full until the prefill speed is known. A lane (the queue of copies between two tiers) of unknown
    speed counts as infinitely fast. The planner assumes that a request loads while the device computes for earlier
    requests.

    Bytes that are already queued on a lane add to the load time. So if a disk is too slow for all requests, some
    requests still load from it, and the others recompute. Owned by the engine's thread.
    """

    def __init__(
        self, prefill: PrefillSpeed, chunk: int, clock: Callable[[], float], with_splits: bool = False
    ) -> None:
        """Create a planner for an engine whose steps compute up to *chunk* tokens of a prompt.

        *with_splits* says whether a hit may be split: its beginning is computed while the rest is loaded. It must be
        False if a group forgets (sliding window, recurrent state). Such a group needs the same blocks at the end of the
        hit, no matter how much of the beginning is computed.
        """
        self.prefill = prefill
        self.num_plans: Counter[str] = Counter()  # by outcome: all, split, part, nothing
        self._chunk = chunk
        self._clock = clock
        self._with_splits = with_splits

    def choose(self, demand: Demand, num_tokens: int, busy_s: float, speeds: LoadSpeeds) -> LoadPlan:
        """Return the plan of `best`, and count its outcome in `num_plans` unless the prefill speed is unknown."""
        plan = self.best(demand, num_tokens, busy_s, speeds)
        if self.prefill.is_known:
            self.num_plans[_outcome(plan, demand)] += 1
        return plan

    def best(self, demand: Demand, num_tokens: int, busy_s: float, speeds: LoadSpeeds) -> LoadPlan:
        """Return the plan with the shortest time to first token for a prompt of *num_tokens* tokens.

        The device first computes for earlier requests for *busy_s* seconds.
        """
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
        """Return the seconds to compute *num_tokens* tokens after a prefix of *depth* tokens.

        Returns 0 while the prefill speed is unknown.
        """
        return self.prefill.seconds(depth, num_tokens, self._chunk) if self.prefill.is_known else 0.0

    def load_seconds(self, demand: Demand, speeds: LoadSpeeds) -> float | None:
        """Return the seconds to load the whole hit; None if a required lane's speed was never measured."""
        if any(moves.num_bytes[-1] and speeds[route].bytes_per_s is None for route, moves in demand.moves.items()):
            return None
        return float(self._load_seconds(demand, speeds)[-1])

    def _load_seconds(self, demand: Demand, speeds: LoadSpeeds) -> npt.NDArray[np.float64]:
        seconds = np.zeros(len(demand.ends))
        for route, moves in demand.moves.items():  # the routes copy at the same time, so the slowest one decides
            np.maximum(seconds, self._seconds(speeds[route], moves), out=seconds)
        return seconds

    def _seconds(self, speed: LaneSpeed, moves: Moves) -> npt.NDArray[np.float64]:
        num_bytes, queued_bytes = moves
        if speed.bytes_per_s is None:
            return np.zeros(len(num_bytes))
        hope = 2.0 ** min(max(0.0, self._clock() - speed.measured_at - _PATIENCE_S) / _OPTIMISM_S, _MAX_DOUBLINGS)
        move_s = (num_bytes + queued_bytes) / (speed.bytes_per_s * hope)
        return np.where(num_bytes > 0, speed.latency_s / hope + move_s, 0.0)


def _rests(demand: Demand) -> Demand:
    """Return for each prefix of the hit the bytes to copy if the prefix is computed and only the rest is loaded."""
    rests = {route: Moves(num_bytes[-1] - num_bytes, queued) for route, (num_bytes, queued) in demand.moves.items()}
    return Demand(demand.ends, rests)


def _outcome(plan: LoadPlan, demand: Demand) -> str:
    if plan.start:
        return "split"
    if plan.end == demand.ends[-1]:
        return "all"
    return "part" if plan.end > demand.ends[0] else "nothing"
