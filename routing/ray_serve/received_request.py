"""An HTTP request on its way from the front to a replica, with the facts that the request router needs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from kvtier.routing.question import Question
from kvtier.routing.token_cache import TokenArray


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """A request as a client sent it."""

    method: str
    path: str
    query: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    client: tuple[str, int] | None = None


class Stage(IntEnum):
    """The progress of a call."""

    WAITING = 0  # the answer has not begun
    ANSWERING = 1
    ENDED = 2


@dataclass(frozen=True, slots=True)
class Wanted:
    """The prompt of a call.

    *tokens* is None if the tokens are unknown. *salt* is the salt with which replicas name the prompt's blocks. *who*
    is the header with the client's credentials.
    """

    question: Question
    tokens: TokenArray | None
    salt: str | None
    who: str


@dataclass(eq=False, slots=True, weakref_slot=True)
class Way:
    """The routing information of a call, which is passed as an argument of the call.

    The request router is in the caller's process and gets this object itself, not a copy. The replica gets an empty
    `Way`. A call without *wanted* goes to the replica that *key* selects. A call without both goes to any replica.

    The caller sets *stage* from its own thread as the answer arrives, and the request router reads it. If a way no
    longer exists, the request router concludes that its call has ended.
    """

    wanted: Wanted | None = None
    key: bytes | None = None
    stage: Stage = field(default=Stage.WAITING)

    def __reduce__(self) -> tuple[type["Way"], tuple[()]]:
        return Way, ()
