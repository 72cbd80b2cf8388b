"""Answer: what a server has said to one prompt; and how far two answers are from each other."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MIN = -10.0  # what is less likely counts as this likely: rounding moves the logarithm of next to nothing the most
UNCERTAIN = "\N{REPLACEMENT CHARACTER}"  # several tokens that are no whole character have this text


@dataclass(frozen=True, slots=True)
class Step:
    """One token of an answer, and the likeliest tokens in its place with their log probabilities (natural)."""

    token: str
    top: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Answer:
    """What was said, and told with it. *steps* is empty if the server tells no log probabilities."""

    text: str
    steps: tuple[Step, ...]
    prompt_tokens: int | None  # None: not told; so is the next
    cached_tokens: int | None  # how many of the prompt's came from a cache
    ttft_s: float

    def behind(self, num_steps: int) -> "Answer":
        """The answer without its first *num_steps* tokens; its text is not cut."""
        return Answer(self.text, self.steps[num_steps:], self.prompt_tokens, self.cached_tokens, self.ttft_s)


def distance(one: Answer, other: Answer) -> float | None:
    """The largest difference of log probabilities between two answers to one prompt, 0 or more.

    Up to the first place where they go on with different tokens: what comes behind follows other text. Of a token that
    only one list has, the other says how likely it is at most, and the difference to that counts. Without lists: 0 for
    equal texts, else infinite. None: there is nothing to compare.
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
        limit = max(MIN, min(other.values(), default=MIN))  # of a token that is not in the list
        for token, logprob in one.items():
            if UNCERTAIN in token:
                continue
            if math.isnan(logprob):
                yield math.inf
            elif token in other:
                yield abs(max(MIN, logprob) - max(MIN, other[token]))
            else:
                yield max(0.0, logprob - limit)
