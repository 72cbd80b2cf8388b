"""Facts: what is known of one HTTP request, for its line in the log and for metrics; nothing of its text."""

from dataclasses import dataclass, field
from typing import cast

from starlette.types import Scope

_PLACE = "kvtier.facts"


@dataclass(slots=True)
class Facts:
    """Filled by each part that learns something. *fields* go into the log."""

    request_id: str
    tenant: str | None = None
    client_left: bool = False
    fields: dict[str, object] = field(default_factory=dict)

    def put(self, scope: Scope) -> None:
        """Make these the facts of the request."""
        scope[_PLACE] = self


def facts_of(scope: Scope) -> Facts:
    """The facts of the request that is being answered."""
    return cast(Facts, scope[_PLACE])
