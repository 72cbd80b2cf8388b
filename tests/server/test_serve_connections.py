"""Limits on what a connection may take of the server before its client has shown a key."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest
from serving import DEADLINE_S, MODEL, ServerInThread, come_true, serving, tables
from small_models import build
from starlette.responses import Response
from uvicorn.config import Config
from uvicorn.server import ServerState

from kvtier.web.gate import ConnectionLimits, Gate
from kvtier.web.http_connection import HttpConnection

KEYS = {"sk-ann-1111": "ann"}
SHORT_S = 0.2
FAR_S = 3600.0


@pytest.fixture(scope="module")
def patient() -> Iterator[ServerInThread]:
    """A server with small limits on sizes and connections, whose timeouts are never reached."""
    limits = {"max_body": 4000, "max_header": 2000, "header_timeout_s": FAR_S, "body_timeout_s": FAR_S}
    with serving(build("llama"), tables(40, **limits, max_connections_per_address=8), KEYS) as address:
        yield address


@pytest.fixture(scope="module")
def hasty() -> Iterator[ServerInThread]:
    """A server that waits for headers no longer than a moment."""
    with serving(build("llama"), tables(40, header_timeout_s=SHORT_S), KEYS) as address:
        yield address


@pytest.fixture(scope="module")
def hasty_for_bodies() -> Iterator[ServerInThread]:
    """A server that waits for bodies no longer than a moment, and for headers as long as they take."""
    with serving(build("llama"), tables(40, header_timeout_s=FAR_S, body_timeout_s=SHORT_S), KEYS) as address:
        yield address


def connected(server: ServerInThread) -> closing[socket.socket]:
    return closing(socket.create_connection(("127.0.0.1", server.port), DEADLINE_S))


def answer(connection: socket.socket) -> bytes:
    """All bytes that come until the server ends the connection."""
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    return received


def sent_until_cut(connection: socket.socket, data: bytes, limit: int) -> int:
    """How many bytes, *limit* at most, could be sent before the connection was cut."""
    num_bytes = 0
    try:
        while num_bytes < limit:
            num_bytes += connection.send(data)
    except (BrokenPipeError, ConnectionResetError):
        pass
    return num_bytes


def refused(server: ServerInThread, why: str) -> float:
    name = "kvtier_http_connections_refused_total"
    return server.server.entrance.registry.get_sample_value(name, {"why": why}) or 0.0


def all_left(server: ServerInThread) -> bool:
    return server.server.entrance.gate.num_open == 0


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b"POST /v1/comp",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Slow: ",
        b"GET /health HTTP/1.1\r\nHost: a\r\n\r\nGET /hea",  # the second request of a connection
    ],
)
def test_headers_that_do_not_come_in_time_end_the_connection(hasty: ServerInThread, beginning: bytes) -> None:
    before = refused(hasty, "header_time")
    with connected(hasty) as connection:
        connection.sendall(beginning)

        told = answer(connection)

    assert told.count(b"HTTP/1.1 408") == 1
    assert refused(hasty, "header_time") == before + 1
    come_true(lambda: all_left(hasty))


@pytest.mark.parametrize("body", [b"", b"{"])
def test_a_body_that_does_not_come_in_time_is_a_408_and_ends_the_connection(
    hasty_for_bodies: ServerInThread, body: bytes
) -> None:
    with connected(hasty_for_bodies) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer sk-ann-1111\r\n"
        connection.sendall(head + b"Content-Length: 1000\r\n\r\n" + body)

        told = answer(connection)

    assert told.startswith(b"HTTP/1.1 408")
    assert b"did not arrive" in told
    come_true(lambda: all_left(hasty_for_bodies))


@pytest.mark.parametrize(
    "line",
    [
        b"GET /" + b"a" * 3000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /health HTTP/1.1\r\nX-Long: " + b"a" * 3000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"X-Many: 1\r\n" * 300 + b"\r\n",
        b"GET /health HTTP/1.1\r\nX-Endless: " + b"a" * 3000,
        b"GET /health HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2;" + b"x" * 3000,
    ],
)
def test_headers_that_are_too_large_end_the_connection(patient: ServerInThread, line: bytes) -> None:
    before = refused(patient, "header_bytes")
    with connected(patient) as connection:
        connection.sendall(line)

        told = answer(connection)

    assert told.startswith((b"HTTP/1.1 431", b"HTTP/1.1 200"))  # GETs are answered before their bodies
    assert told.startswith(b"HTTP/1.1 431") == (refused(patient, "header_bytes") == before + 1)
    come_true(lambda: all_left(patient))


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer sk-ann-1111\r\n", b"413"),
        (b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n", b"401"),
        (b"PUT /v1/kvtier/documents/a HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer sk-ann-1111\r\n", b"413"),
    ],
)
@pytest.mark.parametrize("length", [b"Content-Length: 1000000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"])
def test_a_client_that_is_refused_cannot_go_on_sending(
    patient: ServerInThread, head: bytes, status: bytes, length: bytes
) -> None:
    piece = b"1000\r\n" + b"a" * 4096 + b"\r\n"  # more than the body may have, in one chunk
    with connected(patient) as connection:
        connection.sendall(head + length + piece)

        told = connection.recv(65536)
        num_bytes = sent_until_cut(connection, piece * 16, limit=1 << 30)

    assert told.startswith(b"HTTP/1.1 " + status)
    assert num_bytes < 1 << 26  # what fits in buffers, and comes until the answer is read
    come_true(lambda: all_left(patient))


def test_one_address_cannot_have_all_connections(patient: ServerInThread) -> None:
    before = refused(patient, "connections_of_address")
    idle = [socket.create_connection(("127.0.0.1", patient.port), DEADLINE_S) for _ in range(8)]
    come_true(lambda: patient.server.entrance.gate.num_open == 8)

    with connected(patient) as connection:
        told = answer(connection)
    for connection in idle:
        connection.close()
    come_true(lambda: all_left(patient))

    assert told.startswith(b"HTTP/1.1 503")
    assert refused(patient, "connections_of_address") == before + 1
    assert patient.get("/health").status_code == 200


def test_several_requests_at_once_on_one_connection_are_answered_in_their_order(patient: ServerInThread) -> None:
    body = b'{"model": "%s", "prompt": "a", "max_tokens": 1}' % MODEL.encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer sk-ann-1111\r\nContent-Length: %d\r\n\r\n"
    )
    first = head % len(body) + body
    last = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    with connected(patient) as connection:
        connection.sendall(first + first + last)

        told = answer(connection)

    assert told.count(b"HTTP/1.1 200") == 3
    assert told.endswith(b'{"status":"alive"}')


def test_the_gate_counts_addresses_and_networks() -> None:
    why: list[str] = []
    gate = Gate(ConnectionLimits(1000, 1.0, max_connections=4, max_per_address=2), why.append)

    entered = [gate.enter(host) for host in ("10.0.0.1", "10.0.0.1", "10.0.0.1", "::ffff:10.0.0.1")]
    entered += [gate.enter(host) for host in ("2001:db8::1", "2001:db8::2", "2001:db8::3", "10.0.0.2")]
    for host in ("10.0.0.1", "2001:db8::9"):
        gate.leave(host)
    entered_again = [gate.enter(host) for host in ("::ffff:10.0.0.1", "2001:db8::4", "10.0.0.3")]

    assert entered == [True, True, False, False, True, True, False, False]
    assert why == ["connections_of_address"] * 2 + ["connections"] * 3
    assert entered_again == [True, True, False]
    assert gate.num_open == 4


def test_an_answer_does_not_wait_for_the_client_to_acknowledge_its_headers() -> None:
    """A listener that knows no protocol, as `socket.create_server` makes it, has asyncio leave Nagle's algorithm on: on
    a connection that is kept each first token came 40 ms late, for which a client may keep an acknowledgement back."""
    gate = Gate(ConnectionLimits(1000, FAR_S, max_connections=4, max_per_address=4), lambda why: None)
    made: list[HttpConnection] = []

    def connection() -> HttpConnection:
        made.append(HttpConnection(Config(Response("here"), lifespan="off"), ServerState(), {}, gate=gate))
        return made[-1]

    async def is_sent_at_once() -> bool:
        bound = socket.create_server(("127.0.0.1", 0))
        async with await asyncio.get_running_loop().create_server(connection, sock=bound):
            reader, writer = await asyncio.open_connection(*bound.getsockname())
            writer.write(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
            assert b"200" in await reader.readline()
            accepted = made[0].transport.get_extra_info("socket")
            is_at_once = bool(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()
            return is_at_once

    assert asyncio.run(asyncio.wait_for(is_sent_at_once(), DEADLINE_S))
