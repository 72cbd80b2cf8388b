"""The requests of a run, in order, with their answers."""

from dataclasses import dataclass, field

from kvtier.cli.prove.answer import Answer
from kvtier.cli.prove.cold import CacheBypass
from kvtier.cli.prove.dialect import ModelClient
from kvtier.cli.prove.families import Pieces
from kvtier.cli.prove.plan import ProofPlan, Question


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt for the model *asker*. Only cached blocks under *salt* may serve it, and none if *is_read* is False.

    A request is a *reference* if the server must compute its prompt in full, because no cache can have its prefix.
    """

    asker: ModelClient
    pieces: Pieces
    salt: str | None = None
    is_read: bool = True
    is_reference: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A request and its answer. All requests of one *batch* were sent concurrently."""

    request: Request
    answer: Answer
    batch: int
    is_alone: bool


@dataclass
class Evidence:
    """The results of a plan.

    *asked* has all requests, and *later* has those for the later prompt of each question. *shapes* has the distances
    between answers with the same tokens that were computed in different shapes.
    """

    plan: ProofPlan
    is_exact: bool  # each piece is one token
    cold: CacheBypass | None
    asked: list[Asked] = field(default_factory=list)
    later: list[tuple[Question, Asked]] = field(default_factory=list)
    shapes: list[float] = field(default_factory=list)
    was_evicted: bool = False  # prompts were evicted from device memory, as far as requests can do that
