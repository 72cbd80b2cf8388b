"""OpenAI's client of the Responses API for the servers of tests."""

from openai.types.responses import Response, ResponseStreamEvent
from serving import MODEL, Address

GREEDY = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}


def respond(server: Address, key: str = "none", **asked: object) -> Response:
    """The greedy answer to one request."""
    return server.openai(key).responses.create(**{**GREEDY, **asked})


def events_of(server: Address, **asked: object) -> list[ResponseStreamEvent]:
    """All events of a greedy answer that is streamed."""
    return list(server.openai().responses.create(**{**GREEDY, **asked, "stream": True}))
