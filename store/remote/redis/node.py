"""`RedisNode`: a client of one server, which sends commands in pipelines over its own connections."""

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from redis.connection import BlockingConnectionPool, Connection, SSLConnection
from redis.exceptions import ConnectionError as NoConnection
from redis.exceptions import NoPermissionError, RedisError, ResponseError
from redis.exceptions import TimeoutError as NoAnswer

from kvtier.store.remote.redis.command import Command, Reply, batches
from kvtier.store.remote.redis.reply_parser import ReplyParser
from kvtier.store.remote.redis_settings import Address, RedisSettings

_READ_BYTES = 32 << 10  # of small replies that one system call receives
# Bytes per pipeline; up to two pipelines are in flight. A reply stays in the server's memory until it is sent. With 16
# values of 1 MiB per pipeline on 4 connections, the server took 2.3 times as long as with 4 values.
_BATCH_BYTES = 1 << 20


class RedisNode:
    """A client of one server. All methods are thread-safe.

    As many calls run concurrently as there are connections. Nothing is retried, so a silent server delays a call by
    only one timeout.
    """

    def __init__(self, address: Address, settings: RedisSettings) -> None:
        self.address = address
        self._lock = threading.Lock()  # guards the two below
        self._in_use: set[Connection] = set()
        self._is_closed = False
        self._value_bytes = 1 << 20  # expected for the next value: as many as the last one had
        self._pool = BlockingConnectionPool(
            max_connections=settings.num_connections,
            timeout=settings.timeout_s,
            connection_class=SSLConnection if settings.tls else Connection,
            redis_connect_func=self._greet,
            **_connecting(address, settings),
        )

    def ask(self, commands: Sequence[Command], until: float) -> list[Reply]:
        """Send *commands* and return the reply to each, or the error that says why there is none.

        Ends soon after *until*, a time of `time.monotonic`.
        """
        replies: list[Reply] = []
        try:
            with self._connected(until) as connection:
                for reply in self._conversation(connection, commands, until):
                    replies.append(reply)
        except (RedisError, OSError) as error:
            replies += [error] * (len(commands) - len(replies))
        return replies

    def primaries(self) -> "list[RedisNode]":
        """Return the servers that have the records, which is this one."""
        return [self]

    def close(self) -> None:
        """Close all connections. Calls that wait for a reply get an error instead."""
        with self._lock:
            self._is_closed = True
            for connection in self._in_use:  # the thread that uses it disconnects it
                in_use = connection._get_socket()
                if in_use is not None:
                    with suppress(OSError):
                        in_use.shutdown(socket.SHUT_RDWR)
        self._pool.disconnect(inuse_connections=False)

    @contextmanager
    def _connected(self, until: float) -> Iterator[Connection]:
        """Lend a connection to the `with` block.

        If the block fails, the connection is closed, because replies that nothing waits for may still arrive on it.
        """
        _check_time(until)
        connection = self._pool.get_connection()
        try:
            with self._within_reach(connection):
                yield connection
        except BaseException:
            connection.disconnect()
            raise
        finally:
            self._pool.release(connection)

    @contextmanager
    def _within_reach(self, connection: Connection) -> Iterator[None]:
        """Allow `close` to end the *connection* during the `with` block."""
        with self._lock:
            if self._is_closed:
                raise NoConnection("the connection is closed")
            self._in_use.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._in_use.discard(connection)

    def _greet(self, connection: Connection) -> None:
        """Log in and send a PING. If the server needs a password, its reply to the PING is an error that says so.

        If a large value were sent first instead, the server might close the connection without a reply.
        """
        with self._within_reach(connection):
            connection.on_connect()
            connection.send_command("PING")
            with suppress(NoPermissionError):  # a user without this permission has logged in
                connection.read_response()

    def _conversation(self, connection: Connection, commands: Sequence[Command], until: float) -> Iterator[Reply]:
        """Send *commands* in batches and yield the replies in order.

        Each batch is sent before the replies to the previous batch are read.
        """
        num_under_way = 0
        for batch in batches(commands, self._bytes_of, _BATCH_BYTES):
            _check_time(until)
            packed = connection.pack_commands([(command.name, *command.arguments) for command in batch])
            connection.send_packed_command(packed)
            yield from self._replies(connection, num_under_way, until)
            num_under_way = len(batch)
        yield from self._replies(connection, num_under_way, until)

    def _bytes_of(self, command: Command) -> int:
        return self._value_bytes if command.name == b"GET" else command.num_bytes

    def _replies(self, connection: Connection, num_replies: int, until: float) -> Iterator[Reply]:
        for _ in range(num_replies):
            reply = _reply(connection, until)
            if isinstance(reply, memoryview):
                self._value_bytes = len(reply)
            yield reply


def _check_time(until: float) -> None:
    if time.monotonic() > until:
        raise NoAnswer("the call timed out")


def _reply(connection: Connection, until: float) -> Reply:
    try:
        reply: Reply = connection.read_response(timeout=until - time.monotonic())
    except ResponseError as refusal:  # the connection stays usable
        return refusal
    return reply


def _connecting(address: Address, settings: RedisSettings) -> dict[str, Any]:
    """Return redis-py's connection options. They turn off optional commands, so no permission for those is needed."""
    options: dict[str, Any] = {
        "host": address.host,
        "port": address.port,
        "db": settings.db,
        "username": settings.username,
        "password": settings.password,
        "socket_timeout": settings.timeout_s,
        "socket_connect_timeout": settings.timeout_s,
        "socket_read_size": _READ_BYTES,
        "parser_class": ReplyParser,
        "protocol": 2,
        "driver_info": None,
    }
    if settings.tls is not None:
        files = settings.tls
        options |= {
            "ssl_ca_certs": files.ca_file,
            "ssl_certfile": files.cert_file,
            "ssl_keyfile": files.key_file,
        }
    return options
