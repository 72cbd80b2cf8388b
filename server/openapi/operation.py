"""Operation: the description of one method of one route, from which its documentation is made."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"


@dataclass(frozen=True, slots=True)
class Body:
    """The description of a request's body: a JSON object that is parsed as one of the structs in *kinds*.

    The body may also have fields that the structs do not have. A field in *ignored* may have any value. A field in
    *neutral* may only have the values that *neutral* lists for it (see `request_body.fit`).
    """

    kinds: Sequence[type]
    ignored: Collection[str] = ()
    neutral: Mapping[str, Collection[object]] = field(default_factory=dict)
    is_required: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """The description of an operation's answer with one HTTP status.

    *content* maps each media type of the answer to a struct, or to None if the media type is not JSON.
    """

    what: str  # a description in a few words
    content: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Operation:
    """An HTTP method of a route. *errors* has the HTTP statuses of its errors, except those that all routes have."""

    tag: str
    method: str
    path: str  # in OpenAPI's notation, with the names of parameters in braces
    summary: str
    outcomes: Mapping[int, Outcome]
    errors: Collection[int] = ()
    body: Body | None = None
    query: Mapping[str, object] = field(default_factory=dict)  # types by name; all are optional

    @property
    def operation_id(self) -> str:
        """Unique name of the operation."""
        words = self.path.replace("{", "").replace("}", "").replace("-", "_").replace(".", "_").split("/")
        return "_".join([self.method.lower(), *filter(None, words)])
