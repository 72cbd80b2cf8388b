"""The ids that are added to all log lines of one request."""

import re
import uuid
from contextvars import ContextVar
from dataclasses import dataclass

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class RequestIds:
    """The id of a request, and the id of its trace if there is one."""

    request_id: str
    trace_id: str | None = None

    def fields(self) -> dict[str, str]:
        """Return the ids as fields of a log line."""
        trace = {} if self.trace_id is None else {"trace_id": self.trace_id}
        return {"request_id": self.request_id, **trace}

    def begin(self) -> None:
        """Add these ids to all further log lines of the current task, and of tasks that it starts."""
        _current.set(self)


_current: ContextVar[RequestIds | None] = ContextVar("request", default=None)


def current_ids() -> RequestIds | None:
    """Return the ids of the request that the current task works on, or None if it works on no request."""
    return _current.get()


def request_id_of(header: str | None) -> str:
    """Return the id in the header `x-request-id` if it is valid and safe to log, else a new id."""
    return header if header is not None and _REQUEST_ID.fullmatch(header) else uuid.uuid4().hex
