"""Upstream: one request as it goes to a replica, and its answer as it comes back."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

import httpx

from kvtier.engine.server.api_error import ApiError

Headers = Sequence[tuple[bytes, bytes]]

MOST_WHOLE = 64 << 20  # bytes of an answer that says its length: it is read to its end before a byte is sent on

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_OF_THE_ROUTER = frozenset({b"host", b"content-length", b"expect", b"x-request-id", b"x-forwarded-for"})


class NoAnswer(Exception):
    """A replica did not answer, and nothing has been sent on. *was_connected*: it may have begun to work."""

    def __init__(self, why: str, was_connected: bool) -> None:
        super().__init__(why)
        self.why = why
        self.was_connected = was_connected


class Broken(Exception):
    """A replica's answer has ended too early. *why*: it died, or nothing has come for too long."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as a client sent it; *target* is its path and query. *headers* are those that go on."""

    method: str
    target: bytes
    headers: Headers
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """A replica's answer, of which a byte has come already; of one that says how long it is, all of it."""

    status: int
    headers: Headers
    first: bytes
    rest: AsyncIterator[bytes]
    is_whole: bool

    @property
    def is_events(self) -> bool:
        """Whether it is a stream of server-sent events, to which one can be added."""
        headers = dict(self.headers)
        is_plain = headers.get(b"content-encoding", b"identity") == b"identity"
        return is_plain and headers.get(b"content-type", b"").lower().startswith(b"text/event-stream")


@asynccontextmanager
async def answered(client: httpx.AsyncClient, url: str, asked: Asked) -> AsyncIterator[Answer]:
    """The answer of the replica at *url*; on leaving the replica learns that nobody reads any longer.

    Raises `NoAnswer` if nothing of it has come, ApiError for a request that HTTP does not allow; *rest* raises
    `Broken`.
    """
    # The target stands beside the URL, as it was sent: it is neither parsed nor made another.
    target = httpx.URL(url).raw_path.rstrip(b"/") + asked.target
    request = httpx.Request(
        asked.method, url, headers=[*asked.headers], content=asked.body, extensions={"target": target}
    )
    try:
        response = await client.send(request, stream=True)
    except (httpx.ConnectError, httpx.ConnectTimeout):
        raise NoAnswer("connect", was_connected=False) from None
    except httpx.LocalProtocolError as error:
        raise ApiError(400, f"the request cannot be passed on: {error}", code="invalid_request") from None
    except httpx.TransportError as error:
        raise NoAnswer(_why(error), was_connected=True) from None
    async with aclosing(response), aclosing(_pieces(response)) as pieces:
        length = response.headers.get("content-length", "")
        is_whole = length.isdecimal() and int(length) <= MOST_WHOLE
        try:
            first = b"".join([piece async for piece in pieces]) if is_whole else await anext(pieces, b"")
        except Broken as error:
            raise NoAnswer(error.why, was_connected=True) from None
        yield Answer(response.status_code, passed_on(response.headers.raw), first, pieces, is_whole)


async def _pieces(response: httpx.Response) -> AsyncGenerator[bytes]:
    try:
        async for piece in response.aiter_raw():
            yield piece
    except httpx.TransportError as error:
        raise Broken(_why(error)) from None


def _why(error: httpx.TransportError) -> str:
    return "timeout" if isinstance(error, httpx.TimeoutException) else "died"


def forwarded(headers: Iterable[tuple[bytes, bytes]], client: str, request_id: str) -> Headers:
    """A request's *headers* as they go on, with the address of its *client* behind those of the proxies before."""
    kept = [(name, value) for name, value in passed_on(headers) if name.lower() not in _OF_THE_ROUTER]
    before = [value for name, value in headers if name.lower() == b"x-forwarded-for"]
    return [*kept, (b"x-forwarded-for", b", ".join([*before, client.encode()])), (b"x-request-id", request_id.encode())]


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Those of the *headers* that are not of one connection alone."""
    headers = [*headers]
    named = b",".join(value for name, value in headers if name.lower() == b"connection")
    of_connection = _HOP_BY_HOP | {each.strip().lower() for each in named.split(b",")}
    return [(name.lower(), value) for name, value in headers if name.lower() not in of_connection]
