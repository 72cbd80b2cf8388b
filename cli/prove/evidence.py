"""Evidence: all that was asked, in order, with the answers."""

from dataclasses import dataclass, field

from kvtier.cli.prove.answer import Answer
from kvtier.cli.prove.asker import Asker
from kvtier.cli.prove.cold import Cold
from kvtier.cli.prove.families import Pieces
from kvtier.cli.prove.plan import Plan, Question


@dataclass(frozen=True, slots=True)
class Request:
    """What *asker* is asked. Blocks under *salt* may serve it, or none, if not *is_read*.

    The answer to a *reference* is computed as a whole: nothing like it was asked where it could be found.
    """

    asker: Asker
    pieces: Pieces
    salt: str | None = None
    is_read: bool = True
    is_reference: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A request and its answer. Those of one *batch* were asked at the same time."""

    request: Request
    answer: Answer
    batch: int
    is_alone: bool


@dataclass
class Evidence:
    """What came of a plan. *later* has the answers to its questions, *shapes* the distances of equal answers that were
    computed in other shapes."""

    plan: Plan
    is_exact: bool  # a piece is a token
    cold: Cold | None
    asked: list[Asked] = field(default_factory=list)
    later: list[tuple[Question, Asked]] = field(default_factory=list)
    shapes: list[float] = field(default_factory=list)
    is_pushed_out: bool = False  # of the device's memory, as well as can be done from outside
