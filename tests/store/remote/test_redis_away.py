"""Redis servers that are away, silent, or none at all: each call ends, and says why in a line."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis_servers import HOST, RedisServer, free_port, running_server
from remote_cases import needs_redis, put_blocks, read_blocks, why_unavailable
from store_cases import NAMESPACE, blob_of, key_of
from waiting import is_in, join, wait_for

from kvtier.store.record import Fault
from kvtier.store.remote.redis.node import RedisNode
from kvtier.store.remote.redis_remote import RedisRemote
from kvtier.store.remote.redis_settings import Address, RedisSettings
from kvtier.store.remote_store import RemoteUnavailable

pytestmark = needs_redis

FAR_S = 60.0  # a timeout that no test waits for
SOON_S = 0.2  # a timeout that tests do wait for
LATE_S = 20.0  # when a call must have ended in any case
MIB = 1 << 20


def test_nobody_there_is_told_in_a_line(tmp_path: Path) -> None:
    with RedisRemote(RedisSettings((Address(HOST, free_port()),))) as store:
        assert store.where in why_unavailable(lambda: read_blocks(store, 1))
        assert "refused" in why_unavailable(lambda: store.exist_many([key_of(1)]))


def test_a_server_that_starts_again_is_found_again(tmp_path: Path) -> None:
    with running_server(tmp_path) as server, RedisRemote(server.settings(num_connections=2)) as store:
        put_blocks(store, 1)
        server.kill()
        why_unavailable(lambda: read_blocks(store, 1))

        server.start_again()

        assert read_blocks(store, 1) == [Fault.MISSING]
        assert put_blocks(store, 1) == [True]


def test_a_server_that_hangs_ends_no_call_late_and_answers_later(redis_server: RedisServer) -> None:
    with RedisRemote(redis_server.settings(timeout_s=SOON_S)) as store:
        put_blocks(store, 1)
        redis_server.pause()
        try:
            for call in (
                lambda: read_blocks(store, 1, 2, 3),
                lambda: put_blocks(store, *range(8), num_bytes=9 * MIB),
                lambda: store.exist_many([key_of(1)]),
            ):
                began = time.monotonic()
                why_unavailable(call)
                assert time.monotonic() - began < LATE_S
        finally:
            redis_server.resume()

        wait_for(lambda: _first(lambda: read_blocks(store, 1)) == blob_of(1).digest)


def _first(call: Callable[[], list[Any]]) -> Any:
    """The first result; None where there is none, as the server has much to do yet."""
    with suppress(RemoteUnavailable):
        return call()[0]
    return None


def test_closing_ends_calls_that_wait(redis_server: RedisServer) -> None:
    store = RedisRemote(redis_server.settings(timeout_s=FAR_S))
    put_blocks(store, 1)
    told: list[str] = []
    redis_server.pause()
    try:
        waiting = threading.Thread(target=lambda: told.append(why_unavailable(lambda: read_blocks(store, 1))))
        waiting.start()
        wait_for(lambda: waiting.ident is not None and is_in(waiting.ident, RedisNode.ask))

        store.close()

        join(waiting)
    finally:
        redis_server.resume()
    assert "closed" in told[0]


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[RedisSettings]:
    """A server that has this *answer* for whoever connects; it ends with its clients."""
    with socket.create_server((HOST, 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listening.accept()
                    threading.Thread(target=answer_one, args=(client,), daemon=True).start()

        def answer_one(client: socket.socket) -> None:
            with client, suppress(OSError):
                answer(client)

        threading.Thread(target=serve, daemon=True).start()
        yield RedisSettings((Address(HOST, listening.getsockname()[1]),), timeout_s=SOON_S)
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)


def is_silent(client: socket.socket) -> None:
    while client.recv(1 << 16):
        pass


def drips(client: socket.socket) -> None:
    """A value that comes byte by byte, never silent for long, and would take hours."""
    client.recv(1 << 16)
    client.sendall(b"$1000000\r\n")
    client.settimeout(0.02)
    while True:
        client.sendall(b"x")
        with suppress(TimeoutError):
            client.recv(1 << 16)


def drips_a_line(client: socket.socket) -> None:
    client.settimeout(0.02)
    while True:
        client.sendall(b"1")
        with suppress(TimeoutError):
            client.recv(1 << 16)


def says(answer: bytes) -> Callable[[socket.socket], None]:
    def answer_and_end(client: socket.socket) -> None:
        client.recv(1 << 16)
        client.sendall(answer)

    return answer_and_end


STRANGE: dict[str, Callable[[socket.socket], None]] = {
    "silence": is_silent,
    "a value byte by byte": drips,
    "a line without an end, byte by byte": drips_a_line,
    "a line without an end": says(b"x" * (1 << 20)),
    "a web server": says(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "a value that ends elsewhere": says(b"$3\r\nabcdef\r\n"),
    "a value longer than any": says(b"$99999999999999\r\n"),
    "a length that is none": says(b"$abc\r\n"),
    "a list of lists": says(b"*1\r\n" * 5000),
    "a redirection to nowhere": says(b"-MOVED nowhere\r\n"),
    "a redirection to no port": says(b"-MOVED 1 there:x\r\n"),
    "half a value": says(b"$1000\r\nabc"),
    "nothing": says(b""),
}


@pytest.mark.parametrize("strange", STRANGE)
def test_what_is_no_server_of_redis_ends_no_call_late(strange: str) -> None:
    with answering(STRANGE[strange]) as settings, RedisRemote(settings) as store:
        began = time.monotonic()
        why_unavailable(lambda: read_blocks(store, 1))
        assert time.monotonic() - began < LATE_S


def test_a_server_that_is_no_cluster_says_how_to_write_that(redis_server: RedisServer) -> None:
    with RedisRemote(replace(redis_server.settings(), is_cluster=True)) as store:
        assert "write redis://" in why_unavailable(lambda: read_blocks(store, 1))
        assert "write redis://" in why_unavailable(lambda: store.forget(NAMESPACE))
