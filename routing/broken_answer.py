"""What a client is told whose answer ends too early."""

from kvtier.web.api_error import ApiError
from kvtier.web.event_stream import data_event


def replica_failed(what: str, status: int = 502) -> ApiError:
    """The error of a request to a replica which did *what* is said."""
    return ApiError(status, f"the replica {what}", code="replica_failed")


BROKEN_EVENT = b"\n\nevent: error\n" + data_event(
    {"type": "error", **replica_failed("ended before its answer did").content()}
)
