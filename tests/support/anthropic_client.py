"""Anthropic's client for the servers of tests."""

import anthropic
import httpx2
from plain_http import NO_TLS
from serving import DEADLINE_S, MODEL, Address

GREEDY = {"extra_body": {"temperature": 0}}  # which the client has no parameter for any more


def client_of(server: Address, key: str = "none") -> anthropic.Anthropic:
    """A client that tries once, and leaves no connection open between its requests."""
    http = httpx2.Client(verify=NO_TLS, limits=httpx2.Limits(max_keepalive_connections=0))
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=DEADLINE_S, http_client=http)


def ask(server: Address, max_tokens: int = 8, key: str = "none", **asked: object) -> anthropic.types.Message:
    """The greedy answer to one request."""
    return client_of(server, key).messages.create(model=MODEL, max_tokens=max_tokens, **{**GREEDY, **asked})
