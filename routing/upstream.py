"""The router's HTTP requests to replicas, and their answers."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import dataclass
from io import BytesIO

from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientHandlerType,
    ClientRequest,
    ClientResponse,
    ClientSession,
    ConnectionTimeoutError,
)
from starlette import datastructures
from yarl import URL

from kvtier.web.api_error import ApiError
from kvtier.web.browser_check import is_same_origin

Headers = Sequence[tuple[bytes, bytes]]

MAX_WHOLE = 64 << 20  # bytes; an answer with a known length up to this is received completely before it is forwarded

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
    """Raised if a replica did not answer. Nothing has been sent to the client yet.

    *why* is "connect" if no connection could be opened, "died" if the connection was lost, and "timeout" if the answer
    did not arrive in time. *was_connected* is false only for "connect". If it is true, the replica may have executed
    the request.
    """

    def __init__(self, why: str, was_connected: bool) -> None:
        super().__init__(why)
        self.why = why
        self.was_connected = was_connected


class Broken(Exception):
    """Raised if a replica's answer ended too early. *why* is "died" if the connection was lost, else "timeout"."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True, slots=True)
class Asked:
    """A client's request to be sent to a replica. *target* is its path and query, *headers* the headers to forward."""

    method: str
    target: bytes
    headers: Headers
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """A replica's answer. *first* is the first part of its body, and *rest* yields the other parts.

    If *is_whole* is true, *first* is the complete body.
    """

    status: int
    headers: Headers
    first: bytes
    rest: AsyncIterator[bytes]
    is_whole: bool

    @property
    def is_events(self) -> bool:
        """True if the answer is an uncompressed stream of server-sent events, so that an event can be appended."""
        headers = dict(self.headers)
        is_plain = headers.get(b"content-encoding", b"identity") == b"identity"
        return is_plain and headers.get(b"content-type", b"").lower().startswith(b"text/event-stream")


@asynccontextmanager
async def answered(session: ClientSession, url: str, asked: Asked) -> AsyncIterator[Answer]:
    """Send a request to the replica at *url*, and yield the answer.

    *session* must have the middleware `no_retry`. If the context ends before the answer does, the connection is closed,
    which tells the replica to stop. `Answer.rest` raises `Broken` if the answer ends too early.

    Raises:
        NoAnswer: If the replica failed before any part of its answer could be forwarded.
        ApiError: If the request cannot be forwarded, for example because its path is invalid.
    """
    with closing(await _response(session, url, asked)) as response:
        async with aclosing(_pieces(response)) as pieces:
            is_whole = response.content_length is not None and response.content_length <= MAX_WHOLE
            try:
                first = b"".join([piece async for piece in pieces]) if is_whole else await anext(pieces, b"")
            except Broken as error:
                raise NoAnswer(error.why, was_connected=True) from None
            yield Answer(response.status, passed_on(response.raw_headers), first, pieces, is_whole)


async def _response(session: ClientSession, url: str, asked: Asked) -> ClientResponse:
    """Send the request, and return the response when its status and headers have arrived."""
    try:
        # The target must begin with a slash, or it would become part of the replica's address. It is sent unchanged.
        if not asked.target.startswith(b"/"):
            raise ValueError("the request target must be a path that begins with a slash")
        target = URL(url + asked.target.decode("ascii"), encoded=True)
        headers = [(name.decode(), value.decode()) for name, value in asked.headers]
        body = BytesIO(asked.body) if asked.body else None
        return await session.request(asked.method, target, headers=headers, data=body, allow_redirects=False)
    except ValueError as error:  # first, because aiohttp's error for a URL is also a ClientError
        raise ApiError(400, f"the request cannot be forwarded: {error}", code="invalid_request") from None
    except (ClientError, OSError) as error:
        raise NoAnswer(_why(error), was_connected=True) from None


async def no_retry(request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
    """Send a request only once, and raise `NoAnswer` if it fails.

    This is a middleware for a `ClientSession`. Without it, aiohttp would repeat GET, PUT and other methods after a
    failure.
    """
    try:
        return await handler(request)
    except (ClientConnectorError, ConnectionTimeoutError):
        raise NoAnswer("connect", was_connected=False) from None
    except (ClientError, OSError) as error:
        raise NoAnswer(_why(error), was_connected=True) from None


async def _pieces(response: ClientResponse) -> AsyncGenerator[bytes]:
    try:
        async for piece in response.content.iter_any():
            yield piece
    except (ClientError, OSError) as error:
        raise Broken(_why(error)) from None


def _why(error: Exception) -> str:
    return "timeout" if isinstance(error, TimeoutError) else "died"


def forwarded(headers: Iterable[tuple[bytes, bytes]], client: str, request_id: str) -> Headers:
    """Return the headers to send to a replica: the client's *headers* with x-forwarded-for and x-request-id.

    Headers that concern only the connection to the router are left out. The address *client* is appended to
    x-forwarded-for. The header origin is left out if it is the router's own address, because the replica would take
    that address for a foreign site.
    """
    headers = [*headers]
    of_router = _OF_THE_ROUTER.union([b"origin"] if is_same_origin(datastructures.Headers(raw=headers)) else [])
    kept = [(name, value) for name, value in passed_on(headers) if name.lower() not in of_router]
    before = [value for name, value in headers if name.lower() == b"x-forwarded-for"]
    return [*kept, (b"x-forwarded-for", b", ".join([*before, client.encode()])), (b"x-request-id", request_id.encode())]


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the *headers* without hop-by-hop headers, which concern only one connection."""
    headers = [*headers]
    named = b",".join(value for name, value in headers if name.lower() == b"connection")
    of_connection = _HOP_BY_HOP | {each.strip().lower() for each in named.split(b",")}
    return [(name.lower(), value) for name, value in headers if name.lower() not in of_connection]
