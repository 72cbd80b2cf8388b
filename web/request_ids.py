"""RequestIds: by which the lines of one request are found in the log."""

import re
import uuid
from contextvars import ContextVar
from dataclasses import dataclass

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class RequestIds:
    """The id of a request, and that of its trace if it has one."""

    request_id: str
    trace_id: str | None = None

    def fields(self) -> dict[str, str]:
        """The ids as fields of a line."""
        trace = {} if self.trace_id is None else {"trace_id": self.trace_id}
        return {"request_id": self.request_id, **trace}

    def begin(self) -> None:
        """Have all lines that this task logs from now on be the request's, and those of tasks that it starts."""
        _current.set(self)


_current: ContextVar[RequestIds | None] = ContextVar("request", default=None)


def current_ids() -> RequestIds | None:
    """The request that this task works for; None outside of requests, and on threads of their own."""
    return _current.get()


def request_id_of(header: str | None) -> str:
    """The id in the header `x-request-id`, if it is one that may stand in a log, else a new one."""
    return header if header is not None and _REQUEST_ID.fullmatch(header) else uuid.uuid4().hex
