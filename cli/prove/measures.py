"""Measurements on the answers of `kvtier prove`: how much they differ, and how many cached tokens are unexplained."""

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import combinations
from statistics import median

from kvtier.cli.prove.answer import distance
from kvtier.cli.prove.dialect import ModelClient
from kvtier.cli.prove.evidence import Asked, Evidence
from kvtier.cli.prove.families import Pieces, shared

FACTOR = 3.0  # an answer is wrong beyond this multiple of the noise
MIN_BOUND = 0.001  # in log probability: a hundred times the rounding of float32, and too little to change an answer
UNMEASURED_BOUND = 0.3  # bound if other computation shapes could not be tried: FACTOR times bfloat16's noise in vLLM
_MIN_UNSTEADY = 0.5  # five times the noise of bfloat16
_OF_ALL_PROMPTS = 8  # max tokens that a server adds before each prompt, which may be cached


class Measures:
    """Measurements on all answers that `kvtier prove` got from a server, to judge whether its cache is correct."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self._references: dict[tuple[ModelClient, Pieces], list[Asked]] = {}
        self._by_salt: dict[str | None, list[Asked]] = {}
        for one in evidence.asked:
            request = one.request
            self._by_salt.setdefault(request.salt, []).append(one)
            if request.is_reference and (one.answer.cached_tokens or 0) <= _OF_ALL_PROMPTS:
                self._references.setdefault((request.asker, request.pieces), []).append(one)

    def references(self, asker: ModelClient, pieces: Pieces) -> Sequence[Asked]:
        """Return the requests of the client *asker* for this prompt that the server had to answer without its cache.

        A request is left out if the server reports more than a few cached tokens for it.
        """
        return self._references.get((asker, pieces), ())

    @cached_property
    def noise(self) -> float | None:
        """The largest distance between two answers to one prompt that were both computed without the cache.

        It is None if no two could be compared. Distances too large to be caused by rounding are left out.
        """
        found = [each for *_, each in self._repeats] + self.evidence.shapes
        if self.evidence.plan.controls[0].asker.dialect.tells_logprobs:  # else distances are 0 or infinite
            found = [each for each in found if each <= self._unsteady_from]
        return max(found, default=None)

    @cached_property
    def bound(self) -> float:
        """Largest allowed difference in log probability between an answer and the closest one without the cache."""
        return max(MIN_BOUND if self.evidence.shapes else UNMEASURED_BOUND, FACTOR * (self.noise or 0.0))

    @cached_property
    def _repeats(self) -> list[tuple[Asked, Asked, float]]:
        # Pairs of references of the same prompt, with the distance between their answers.
        return [
            (*pair, apart)
            for references in self._references.values()
            for pair in combinations(references, 2)
            for apart in _distances([pair])
        ]

    def unsteady(self) -> list[tuple[Asked, float]]:
        """Return the prompts whose answers without the cache differ as much as answers to different prompts do.

        Each item is a request with such a prompt, and the largest distance between two of these answers.
        """
        found: dict[tuple[ModelClient, Pieces], tuple[Asked, float]] = {}
        for one, _, apart in self._repeats:
            key = (one.request.asker, one.request.pieces)
            if apart > max(self.bound, self._unsteady_from) and apart > found.get(key, (one, 0.0))[1]:
                found[key] = (one, apart)
        return list(found.values())

    def apart(self, one: Asked) -> float | None:
        """Return the smallest `distance` of an answer from the uncached answers to its prompt.

        An uncached answer is one that was computed without the cache. Returns None if there is none to compare with.
        """
        references = self.references(one.request.asker, one.request.pieces)
        return min(_distances((one, reference) for reference in references), default=None)

    def suspects(self) -> list[Asked]:
        """Return the answers whose smallest distance from an uncached answer to their prompt is above `bound`."""
        return [one for _, one in self.evidence.later if (self.apart(one) or 0.0) > self.bound]

    def excess(self, one: Asked) -> int:
        """Return how many of the cached tokens that the server reports for a request cannot be explained.

        Tokens are explained by a request that was sent before or at the same time and has the same prefix, salt and
        model (or a model in `alike`). Returns 0 if prompts are sent as words, because then tokens cannot be counted.
        """
        if not self.evidence.is_exact:
            return 0
        request, limit = one.request, 0
        if request.is_read:
            before = [
                other.request.pieces
                for other in self._by_salt[request.salt]
                if other is not one and other.batch <= one.batch and other.request.asker in self._kin[request.asker]
            ]
            limit = max((shared(request.pieces, pieces) for pieces in before), default=0)
        num_before = max(0, (one.answer.prompt_tokens or 0) - len(request.pieces))  # added by the server
        return max(0, (one.answer.cached_tokens or 0) - num_before - limit)

    def computed_alone(self, length: int) -> list[Asked]:
        """Return requests with unrelated prompts of this length that were sent alone and computed without the cache."""
        prompts = [
            (each.asker, prompt)
            for each in self.evidence.plan.controls
            if each.length == length
            for prompt in each.prompts
        ]
        return [one for key in prompts for one in self.references(*key) if one.is_alone]

    def is_sensitive(self, length: int) -> bool:
        """Return whether answers to prompts of this length depend on the beginning of the prompt.

        To measure this, the run sends pairs of prompts that have only their last tokens in common. The median distance
        between the two answers of a pair must be above `bound`.
        """
        found = self._controls[length]
        return bool(found) and median(found) > self.bound

    @cached_property
    def _controls(self) -> dict[int, list[float]]:
        # Distances between answers to the two prompts of each control, by the length of the prompts.
        found: dict[int, list[float]] = {}
        for control in self.evidence.plan.controls:
            ones, others = (self.references(control.asker, prompt) for prompt in control.prompts)
            found.setdefault(control.length, []).extend(_distances((one, other) for one in ones for other in others))
        return found

    @cached_property
    def _unsteady_from(self) -> float:
        # Rounding does not cause distances above half the median distance between answers to different prompts.
        found = [each for found in self._controls.values() for each in found]
        return max(_MIN_UNSTEADY, median(found) / 2) if found else math.inf

    @cached_property
    def alike(self) -> frozenset[frozenset[ModelClient]]:
        """Pairs of models that gave the same answers to the same prompts, and so may share cached blocks.

        If no answers of a pair could be compared, models of two servers count as alike, because they may be the same
        model. Two models of one server then count as different.
        """
        found: dict[frozenset[ModelClient], list[float]] = {}
        for question in self.evidence.plan.questions:
            pair = frozenset({question.giver, question.taker})
            if len(pair) == 2:
                mine = self.references(question.giver, question.pair.earlier)
                theirs = self.references(question.taker, question.pair.later)
                found.setdefault(pair, []).extend(_distances((one, other) for one in mine for other in theirs))
        return frozenset(pair for pair, seen in found.items() if self._is_alike(pair, seen))

    def _is_alike(self, pair: frozenset[ModelClient], seen: Sequence[float]) -> bool:
        return max(seen) <= self.bound if seen else len({asker.endpoint for asker in pair}) == 2

    @cached_property
    def _kin(self) -> dict[ModelClient, frozenset[ModelClient]]:
        askers = {one.request.asker for one in self.evidence.asked}
        return {asker: frozenset({asker}).union(*(pair for pair in self.alike if asker in pair)) for asker in askers}


def _distances(pairs: Iterable[tuple[Asked, Asked]]) -> list[float]:
    found = (distance(one.answer, other.answer) for one, other in pairs)
    return [each for each in found if each is not None]
