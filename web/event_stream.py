"""Encoding of server-sent events."""

import msgspec

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
DONE = b"data: [DONE]\n\n"  # the end of OpenAI's streams


def data_event(content: object) -> bytes:
    """Return an event without a name, as in OpenAI's API, with *content* as JSON."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def named_event(name: str, content: object) -> bytes:
    """Return an event with a name, as in Anthropic's API, with *content* as JSON."""
    return b"event: " + name.encode() + b"\n" + data_event(content)
