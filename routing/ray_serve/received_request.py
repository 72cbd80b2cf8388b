"""An HTTP request on its way from `Front` to a replica, with the data that Ray's request router needs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvtier.routing.question import Question
from kvtier.routing.token_cache import TokenArray


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """An HTTP request as a client sent it."""

    method: str
    path: str
    query: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    client: tuple[str, int] | None = None


class Stage(IntEnum):
    """The progress of a call from `Front` to a replica."""

    WAITING = 0  # the answer has not begun
    ANSWERING = 1
    ENDED = 2


@dataclass(frozen=True, slots=True)
class Wanted:
    """The prompt of a call, by which the request router chooses the replica.

    *tokens* is None if the tokens are unknown. *salt* is the salt in the hashes of the prompt's blocks. *who* is the
    header with the client's credentials.
    """

    question: Question
    tokens: TokenArray | None
    salt: str | None
    who: str


@dataclass(eq=False, slots=True, weakref_slot=True)
class Way:
    """The data for routing one call. It is passed to the request router as an argument of the call.

    A call with a prompt (*wanted*) goes to the replica that the policy chooses for the prompt. A call with only a *key*
    goes to the replica that consistent hashing of the key selects. A call with neither goes to any replica.

    `Front`, which makes the call, and the request router run in two threads of one process and use the same object.
    `Front` updates *stage*. The router has only a weak reference to the object. Once the object no longer exists, the
    router treats the call as ended. The replica gets an empty `Way`, because it does not need the data.
    """

    wanted: Wanted | None = None
    key: bytes | None = None
    stage: Stage = field(default=Stage.WAITING)

    def __reduce__(self) -> tuple[type["Way"], tuple[()]]:
        return Way, ()
