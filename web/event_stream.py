"""The bytes of server-sent events."""

import msgspec

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
DONE = b"data: [DONE]\n\n"  # with which OpenAI's streams end


def data_event(content: object) -> bytes:
    """An event without a name, as OpenAI's are, with *content* as JSON."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def named_event(name: str, content: object) -> bytes:
    """An event with a name, as Anthropic's are, with *content* as JSON."""
    return b"event: " + name.encode() + b"\n" + data_event(content)
