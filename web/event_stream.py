"""Encoding of server-sent events, and the event for a replica that failed."""

import msgspec

from kvtier.web.api_error import ApiError

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
DONE = b"data: [DONE]\n\n"  # the end of OpenAI's streams


def data_event(content: object) -> bytes:
    """Return an event without a name, as in OpenAI's API, with *content* as JSON."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def named_event(name: str, content: object) -> bytes:
    """Return an event with a name, as in Anthropic's API, with *content* as JSON."""
    return b"event: " + name.encode() + b"\n" + data_event(content)


def replica_failed(what: str, status: int = 502) -> ApiError:
    """Return the error for a failed replica of a router. Its message is "the replica" followed by *what*."""
    return ApiError(status, f"the replica {what}", code="replica_failed")


BROKEN_EVENT = b"\n\nevent: error\n" + data_event(
    {"type": "error", "error": replica_failed("ended in the middle of its response").content().error}
)
