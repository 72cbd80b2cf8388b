"""RoutingPolicy: which replica a request goes to."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from kvtier.routing.config import PolicyConfig
from kvtier.routing.prefix_index import NOTHING, Matched


class Reason(StrEnum):
    """Why a replica was chosen."""

    PREFIX = "prefix"  # nobody has more of the prompt
    LOAD = "load"  # somebody has more, and too much to do
    SESSION = "session"  # it has had the conversation so far
    HASH = "hash"  # nobody is known to have anything: by the prompt's first blocks


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica has to do."""

    num_requests: int = 0  # that are not answered yet
    num_waiting_tokens: int = 0  # of their prompts, to be computed before their answers begin


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that a request could go to."""

    name: str
    matched: Matched = NOTHING
    load: Load = Load()
    is_open: bool = True  # it lives, is not being drained, and has not failed this request already


@dataclass(frozen=True, slots=True)
class Choice:
    """The replica, why, and what its answer costs, in tokens computed."""

    name: str
    reason: Reason
    cost: float


class RoutingPolicy:
    """Weighs prefix against load, in tokens that have to be computed before an answer can begin.

    It sees no clock, no socket and no index: the same arguments give the same choice. A router of another kind can
    ask it as well.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config

    def choose(self, num_tokens: int, candidates: Sequence[Candidate], session: str | None = None) -> Choice | None:
        """One of the open *candidates* for a prompt of *num_tokens*; None if none is open.

        They are in the order of consistent hashing for this prompt, which decides between equals. *session* is the
        replica that had the conversation before, if one had.
        """
        open_ones = [each for each in candidates if each.is_open]
        if not open_ones:
            return None
        costs = {each.name: self._cost(num_tokens, each) for each in open_ones}
        best = min(open_ones, key=lambda each: costs[each.name])
        if (
            session is not None
            and session in costs
            and costs[session] <= costs[best.name] + self._config.session_tokens
        ):
            return Choice(session, Reason.SESSION, costs[session])
        if not any(each.matched.total for each in open_ones):
            best = _first_with_room(open_ones, self._config.hash_slack)
            return Choice(best.name, Reason.HASH, costs[best.name])
        limit = max(self._saved(each.matched) for each in open_ones)
        reason = Reason.LOAD if self._saved(best.matched) < limit else Reason.PREFIX
        return Choice(best.name, reason, costs[best.name])

    def _cost(self, num_tokens: int, candidate: Candidate) -> float:
        load, config = candidate.load, self._config
        ahead = config.queue_weight * load.num_waiting_tokens + config.request_tokens * load.num_requests
        return max(0.0, num_tokens - self._saved(candidate.matched)) + ahead

    def _saved(self, matched: Matched) -> float:
        """Tokens that need not be computed; those in lower tiers have to be loaded, which is a part of computing."""
        host, disk = 1 - self._config.host_cost, 1 - self._config.disk_cost
        return matched.device + matched.expected + host * matched.host + disk * matched.disk


def _first_with_room(candidates: Sequence[Candidate], slack: float) -> Candidate:
    """Consistent hashing with bounded loads: the first that would not have *slack* times as many requests as all have
    on average."""
    limit = ceil(slack * (1 + sum(each.load.num_requests for each in candidates)) / len(candidates))
    return next(each for each in candidates if each.load.num_requests < limit)
