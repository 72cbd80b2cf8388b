"""Facts: what a request's line in the log says, and the metrics count; nothing of the prompt's text."""

from dataclasses import dataclass, field
from typing import cast

from starlette.types import Scope

from kvtier.engine.observability.tracing.trace_context import TraceContext
from kvtier.web.request_ids import RequestIds

_PLACE = "kvtier.facts"


@dataclass(slots=True)
class Facts:
    """What is known of one request. Each part that learns something writes it here; *fields* go into the log."""

    request_id: str
    tenant: str | None = None
    client_left: bool = False
    trace: TraceContext | None = None  # the span that what is done for the request is a part of
    fields: dict[str, object] = field(default_factory=dict)

    @property
    def ids(self) -> RequestIds:
        """By which its lines are found in the log."""
        return RequestIds(self.request_id, None if self.trace is None else self.trace.trace_id)

    def put(self, scope: Scope) -> None:
        """Keep these facts in the *scope* of their request."""
        scope[_PLACE] = self


def facts_of(scope: Scope) -> Facts:
    """The facts of the request with this *scope*."""
    return cast(Facts, scope[_PLACE])
