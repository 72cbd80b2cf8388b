"""A server's answer to one prompt, and the distance between two answers."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MIN = -10.0  # smaller log probabilities are raised to this, because rounding changes them most
UNCERTAIN = "\N{REPLACEMENT CHARACTER}"  # text of every token that is only a part of a character


@dataclass(frozen=True, slots=True)
class Step:
    """A token of an answer, and the most likely tokens at its position with their natural log probabilities."""

    token: str
    top: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's completion, with its statistics. *steps* is empty if the server returns no log probabilities."""

    text: str
    steps: tuple[Step, ...]
    prompt_tokens: int | None  # None: not reported by the server
    cached_tokens: int | None  # prompt tokens that came from a cache; None: not reported
    ttft_s: float

    def behind(self, num_steps: int) -> "Answer":
        """Return a copy without the log probabilities of the first *num_steps* tokens. Its text is unchanged."""
        return Answer(self.text, self.steps[num_steps:], self.prompt_tokens, self.cached_tokens, self.ttft_s)


def distance(one: Answer, other: Answer) -> float | None:
    """Return the distance of two answers to one prompt: the largest difference between log probabilities of a token.

    The answers are compared position by position, up to the first one where their tokens differ. Later tokens cannot be
    compared, because the text before them differs. Answers list only the most likely tokens. A token
    that only one answer lists counts as if the other answer had it with the lowest log probability that the other
    answer lists, but not more than its own.

    Without log probabilities, the distance is 0 for equal texts and infinite for others. Returns None if there is
    nothing to compare.
    """
    if not (one.steps and other.steps):
        if not (one.text or other.text):
            return None
        return 0.0 if one.text == other.text else math.inf
    found: list[float] = []
    for mine, theirs in zip(one.steps, other.steps, strict=False):
        found += _differences(mine.top, theirs.top)
        if mine.token != theirs.token or UNCERTAIN in mine.token:
            break
    return max(found, default=None)


def _differences(mine: Mapping[str, float], theirs: Mapping[str, float]) -> Iterator[float]:
    for one, other in ((mine, theirs), (theirs, mine)):
        limit = max(MIN, min(other.values(), default=MIN))  # upper limit for tokens that are not in the list
        for token, logprob in one.items():
            if UNCERTAIN in token:
                continue
            if math.isnan(logprob):
                yield math.inf
            elif token in other:
                yield abs(max(MIN, logprob) - max(MIN, other[token]))
            else:
                yield max(0.0, logprob - limit)
