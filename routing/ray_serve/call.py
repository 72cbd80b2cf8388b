"""Call: an HTTP request on its way from the front to a replica, and what the request router needs of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvtier.routing.question import Question
from kvtier.routing.token_cache import TokenArray


@dataclass(frozen=True, slots=True)
class Call:
    """A request as a client sent it."""

    method: str
    path: str
    query: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    client: tuple[str, int] | None = None


class Stage(IntEnum):
    """How far a call is."""

    WAITING = 0  # its answer has not begun
    ANSWERING = 1
    ENDED = 2


@dataclass(frozen=True, slots=True)
class Wanted:
    """The prompt of a call: its *tokens* if they are known, the *salt* that replicas name its blocks with, and *who*
    asks."""

    question: Question
    tokens: TokenArray | None
    salt: str | None
    who: str


@dataclass(eq=False, slots=True, weakref_slot=True)
class Way:
    """Where a call should go. It is an argument of the call for the request router's sake, which is in the process of
    the caller: it sees this very object, and the replica an empty one.

    The caller sets *stage* as the answer comes, from its own thread; the request router reads it, and takes a way that
    is no more for one that has ended. A call without
    *wanted* goes where *key* says, and without either anywhere.
    """

    wanted: Wanted | None = None
    key: bytes | None = None
    stage: Stage = field(default=Stage.WAITING)

    def __reduce__(self) -> tuple[type["Way"], tuple[()]]:
        return Way, ()
