"""Data on each request, for the log and the metrics. It contains no text of the prompt."""

from dataclasses import dataclass, field
from typing import cast

from starlette.types import Scope

from kvtier.engine.observability.tracing.trace_context import TraceContext
from kvtier.web.request_ids import RequestIds

_PLACE = "kvtier.facts"


@dataclass(slots=True)
class Facts:
    """The data collected on one request while it is processed. *fields* are added to the request's log line."""

    request_id: str
    tenant: str | None = None
    client_left: bool = False
    trace: TraceContext | None = None  # the parent span of all work on the request
    fields: dict[str, object] = field(default_factory=dict)

    @property
    def ids(self) -> RequestIds:
        """The ids that mark the request's log lines."""
        return RequestIds(self.request_id, None if self.trace is None else self.trace.trace_id)

    def put(self, scope: Scope) -> None:
        """Store this data on a request in the request's ASGI *scope*."""
        scope[_PLACE] = self


def facts_of(scope: Scope) -> Facts:
    """Return the data collected on a request, which is stored in the request's ASGI *scope*."""
    return cast(Facts, scope[_PLACE])
