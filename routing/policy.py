"""`RoutingPolicy`: the rule that chooses a replica for a request."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from kvtier.routing.config import PolicyConfig
from kvtier.routing.prefix_index import NOTHING, Matched


class Reason(StrEnum):
    """The reason why a replica was chosen."""

    PREFIX = "prefix"  # no replica has more of the prompt
    LOAD = "load"  # another replica has more of the prompt, but too much load
    SESSION = "session"  # the replica has had the conversation so far
    HASH = "hash"  # no replica is known to have any of the prompt, so the hash of its first blocks decides


@dataclass(frozen=True, slots=True)
class Load:
    """The amount of unfinished work of a replica."""

    num_requests: int = 0  # requests whose answers are not complete
    num_waiting_tokens: int = 0  # prompt tokens of these requests that are still to be computed


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that a request could go to."""

    name: str
    matched: Matched = NOTHING
    load: Load = Load()
    is_open: bool = True  # it is ready, is not being drained, and has not been tried for this request


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen replica, and the reason for the choice."""

    name: str
    reason: Reason


class RoutingPolicy:
    """A policy that sends a request to the replica with the lowest cost.

    The cost is the number of prompt tokens that the replica has not cached, plus a number of tokens for its load. The
    policy uses no clock, socket or index, so the same arguments always give the same choice.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config

    def choose(self, num_tokens: int, candidates: Sequence[Candidate], session: str | None = None) -> Choice | None:
        """Return the best of the candidates whose `is_open` is True; None if there is none.

        The prompt has *num_tokens* tokens. *candidates* must be in the order of consistent hashing for this prompt: if
        costs are equal, the first one is chosen. *session* names the replica that answered the conversation so far. It
        is None if this is unknown.
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
            return Choice(session, Reason.SESSION)
        if not any(each.matched.total for each in open_ones):
            best = _first_with_room(open_ones, self._config.hash_slack)
            return Choice(best.name, Reason.HASH)
        limit = max(self._saved(each.matched) for each in open_ones)
        reason = Reason.LOAD if self._saved(best.matched) < limit else Reason.PREFIX
        return Choice(best.name, reason)

    def _cost(self, num_tokens: int, candidate: Candidate) -> float:
        load, config = candidate.load, self._config
        ahead = config.queue_weight * load.num_waiting_tokens + config.request_tokens * load.num_requests
        return max(0.0, num_tokens - self._saved(candidate.matched)) + ahead

    def _saved(self, matched: Matched) -> float:
        """Return the number of matched tokens. Tokens in host memory or on disk count less: loading takes time."""
        host, disk = 1 - self._config.host_cost, 1 - self._config.disk_cost
        return matched.device + matched.expected + host * matched.host + disk * matched.disk


def _first_with_room(candidates: Sequence[Candidate], slack: float) -> Candidate:
    """Return the first candidate that has fewer requests than *slack* times the average over all candidates.

    The algorithm is known as consistent hashing with bounded loads.
    """
    limit = ceil(slack * (1 + sum(each.load.num_requests for each in candidates)) / len(candidates))
    return next(each for each in candidates if each.load.num_requests < limit)
