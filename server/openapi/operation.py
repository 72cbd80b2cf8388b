"""Operation: what may be asked of one route by one method, and what comes back."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"


@dataclass(frozen=True, slots=True)
class Body:
    """A JSON object that is read as one of *kinds*, which are structs.

    Fields in *ignored* may have any value, those in *neutral* only the values there, as `request_body.fit` has it.
    """

    kinds: Sequence[type]
    ignored: Collection[str] = ()
    neutral: Mapping[str, Collection[object]] = field(default_factory=dict)
    is_required: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an answer of one status has in it: by media type a struct, or None for what is no JSON."""

    what: str
    content: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one route. *errors* are the statuses that its errors may have, beside those of every route."""

    tag: str
    method: str
    path: str  # as OpenAPI writes it: a name in braces for each part that is given
    summary: str
    outcomes: Mapping[int, Outcome]
    errors: Collection[int] = ()
    body: Body | None = None
    query: Mapping[str, object] = field(default_factory=dict)  # types by name; none has to be given
    is_deprecated: bool = False  # the same is to be had by another path

    @property
    def operation_id(self) -> str:
        """A name that no other operation has."""
        words = self.path.replace("{", "").replace("}", "").replace("-", "_").replace(".", "_").split("/")
        return "_".join([self.method.lower(), *filter(None, words)])
