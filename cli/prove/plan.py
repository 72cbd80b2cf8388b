"""The plan of a run: which prompts to send, to which model and with which salt."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier.cli.prove.cold import CacheBypass
from kvtier.cli.prove.dialect import ModelClient
from kvtier.cli.prove.families import CUE, FAMILIES, SAME_PROMPT, Pair, Pieces, PromptGenerator
from kvtier.cli.prove.writing import PromptFormat, Words

OTHER_SALT = "another salt"


class Salts:
    """A generator of salts. They contain *run*, a random text, so that no earlier run had the same salts."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._num_made = 0

    def new(self) -> str:
        """Return a new salt, of characters that every server accepts."""
        self._num_made += 1
        return f"kvtier-prove-{self._run}-{self._num_made}"


@dataclass(frozen=True)
class RunSettings:
    """The settings with which a run makes random prompts and bypasses the server's cache.

    *writing* is the usual format of prompts: token ids or text. *words* is the format of prompts that must be text,
    because the text of an answer is appended to them. *cold* is the way to bypass the cache, or None if none is known.
    """

    source: random.Random
    salts: Salts
    writing: PromptFormat
    words: Words
    cold: CacheBypass | None


@dataclass(frozen=True, slots=True)
class Question:
    """A pair of prompts, to test whether the answer to the later prompt is correct when it may come from the cache.

    The earlier prompt is sent to the model *giver*, and then the later one to the model *taker*. If *is_alone*, no
    other request is sent at the same time.
    """

    family: str
    length: int  # requested length of the earlier prompt, in tokens
    pair: Pair
    giver: ModelClient
    taker: ModelClient
    earlier_salt: str | None
    later_salt: str | None
    is_alone: bool

    @property
    def shares(self) -> bool:
        """True if the second prompt (`pair.later`) may use cached blocks of the first prompt (`pair.earlier`)."""
        return self.giver == self.taker and self.earlier_salt == self.later_salt and self.pair.num_shared > 0


@dataclass(frozen=True, slots=True)
class Control:
    """Two prompts with different beginnings and the same end, to test whether answers depend on the beginning."""

    length: int
    asker: ModelClient
    prompts: tuple[Pieces, Pieces]


@dataclass(frozen=True, slots=True)
class ProofPlan:
    """The pairs of prompts that a run sends.

    *questions* test the cache. *controls* test whether answers depend on the beginning of a prompt.
    """

    questions: tuple[Question, ...]
    controls: tuple[Control, ...]


@dataclass(frozen=True, slots=True)
class Planner:
    """A planner of the questions to ask the models under test, whose clients are *askers*.

    The first model gets pairs of prompts of all `FAMILIES`, which are the ways to share a prefix. Each other model only
    gets pairs of equal prompts. If there are several models, each also gets a prompt that was first sent to another
    model, whose cached blocks it must not use. Salts are used only if the server honours them.
    """

    askers: Sequence[ModelClient]
    draw: PromptGenerator
    salts: Salts
    cold: CacheBypass | None

    def plan(self, lengths: Sequence[tuple[int, int]], num_rounds: int) -> ProofPlan:
        """Plan *num_rounds* rounds. For each of *lengths*, a round has one pair of prompts of each of the `FAMILIES`.

        Each of *lengths* has two numbers: the tokens of a prompt, and the parts (tokens or words) that it is made from.
        In every second round, requests are sent concurrently. Of every four rounds, the second and the third use a
        salt.
        """
        questions: list[Question] = []
        controls: list[Control] = []
        for length, num_pieces in lengths:
            for number in range(num_rounds):
                salt = self.salts.new() if self.cold is CacheBypass.SALT and number % 4 in (1, 2) else None
                questions += self._round(length, num_pieces, salt, number % 2 == 0)
                controls.append(Control(length, self.askers[0], self._alike_ends(num_pieces)))
        return ProofPlan(tuple(questions), tuple(controls))

    def _round(self, length: int, num_pieces: int, salt: str | None, is_alone: bool) -> Iterator[Question]:
        first = self.askers[0]
        for family, make in FAMILIES.items():
            yield Question(family, length, make(self.draw, num_pieces), first, first, salt, salt, is_alone)
        if self.cold is CacheBypass.SALT:
            yield Question(OTHER_SALT, length, self._same(num_pieces), first, first, salt, self.salts.new(), is_alone)
        for giver, taker in zip(self.askers, [*self.askers[1:], first], strict=True):
            if giver != taker:
                name = f"{taker.name} after {giver.name}"
                yield Question(name, length, self._same(num_pieces), giver, taker, salt, salt, is_alone)
            if taker != first:
                name = f"{taker.name}, {SAME_PROMPT}"
                yield Question(name, length, self._same(num_pieces), taker, taker, salt, salt, is_alone)

    def _same(self, num_pieces: int) -> Pair:
        return FAMILIES[SAME_PROMPT](self.draw, num_pieces)

    def _alike_ends(self, num_pieces: int) -> tuple[Pieces, Pieces]:
        prompt = self.draw.prompt(num_pieces)
        return prompt, self.draw.fresh(num_pieces - CUE) + prompt[-CUE:]
