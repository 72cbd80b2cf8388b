"""The error that a client gets if its answer ends too early."""

from kvtier.web.api_error import ApiError
from kvtier.web.event_stream import data_event


def replica_failed(what: str, status: int = 502) -> ApiError:
    """Return the error for a request whose replica failed as *what* says."""
    return ApiError(status, f"the replica {what}", code="replica_failed")


BROKEN_EVENT = b"\n\nevent: error\n" + data_event(
    {"type": "error", **replica_failed("ended before its answer did").content()}
)
