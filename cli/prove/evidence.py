"""The requests of a run, in order, with their answers."""

from dataclasses import dataclass, field

from kvtier.cli.prove.answer import Answer
from kvtier.cli.prove.cold import CacheBypass
from kvtier.cli.prove.dialect import ModelClient
from kvtier.cli.prove.families import Pieces
from kvtier.cli.prove.plan import ProofPlan, Question


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt for the model of the client *asker*.

    The server may use only blocks that are cached under *salt*. If *is_read* is False, it may use none. A request is a
    *reference* if the server must compute the whole prompt, so that no cache can affect the answer.
    """

    asker: ModelClient
    pieces: Pieces
    salt: str | None = None
    is_read: bool = True
    is_reference: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A request that was sent, and its answer. All requests of one *batch* were sent concurrently."""

    request: Request
    answer: Answer
    batch: int
    is_alone: bool


@dataclass
class Evidence:
    """The requests and answers of a run of `kvtier prove`, from which its verdict is derived.

    *asked* has all requests. Pairs of prompts test the cache: *later* has the requests for the second prompt of each
    pair, which may be cache hits. *shapes* has differences in log probability between answers that were computed
    without the cache. They should be equal, but were computed in batches of different shapes.
    """

    plan: ProofPlan
    is_exact: bool  # each piece is one token
    cold: CacheBypass | None
    asked: list[Asked] = field(default_factory=list)
    later: list[tuple[Question, Asked]] = field(default_factory=list)
    shapes: list[float] = field(default_factory=list)
    was_evicted: bool = False  # other prompts were sent, to evict cached blocks from device memory
