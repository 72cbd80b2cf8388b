"""`RedisRemote`: records in a Valkey or Redis server, or in a cluster of them."""

import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Self

from redis.exceptions import AskError, AuthenticationError, NoPermissionError, OutOfMemoryError, RedisError

from kvtier.store.record import Fault
from kvtier.store.remote.redis.cluster import RedisCluster
from kvtier.store.remote.redis.command import Command, Reply, batches
from kvtier.store.remote.redis.node import RedisNode
from kvtier.store.remote.redis.parts import HEAD_BYTES, Parts, in_parts, joined
from kvtier.store.remote.redis_settings import RedisSettings
from kvtier.store.remote_store import RemoteRecord, RemoteUnavailable, RemoteUsage

_NO_CLUSTER = "cluster support disabled"
_NO_CERTIFICATE = "CERTIFICATE_VERIFY_FAILED"
_RIGHTS = "+get +getrange +set +exists +unlink +scan +ping +cluster|slots +asking"
_GROUP_BYTES = 16 << 20  # limit on records put together, because joining headers and payloads copies them
_MAX_TIMEOUTS = 2  # a whole call may take this many times `timeout_s`
_SCANNED_AT_ONCE = b"1000"
_GLOB = re.compile(rb"([*?\[\]\\^-])")


def is_wrong_type(reply: Reply) -> bool:
    """Return whether *reply* says that the key holds a value of another type, such as a list of another client."""
    return isinstance(reply, RedisError) and str(reply).startswith("WRONGTYPE")


def is_answer(reply: Reply) -> bool:
    """Return whether *reply* shows that the server handled the command.

    Two errors show that too: the server is full, or the key holds a value of another type.
    """
    return not isinstance(reply, Exception) or isinstance(reply, OutOfMemoryError) or is_wrong_type(reply)


def describe(error: Exception, where: str, prefix: str) -> str:
    """Describe in one line, without secrets, what happened at *where* and what to do."""
    said = " ".join(str(error).split())
    if isinstance(error, AuthenticationError):
        return f"{where}: refuses the user or the password ({said}); give one that ACL LIST shows"
    if isinstance(error, NoPermissionError):
        return f"{where}: the user lacks a permission ({said}); run ACL SETUSER name ~{prefix}* {_RIGHTS}"
    if isinstance(error, AskError):
        return f"{where}: is a node of a cluster; write redis+cluster:// instead of redis://"
    if _NO_CLUSTER in said:
        return f"{where}: is not a cluster; write redis:// instead of redis+cluster://"
    if _NO_CERTIFICATE in said:
        return f"{where}: its certificate is not signed by a trusted CA, or not for that name; give the CA's file"
    return f"{where}: {said}"


class RedisRemote:
    """A `RemoteStore` in Valkey or Redis.

    A record is stored under one key, `prefix{namespace and name in hex}`, except that a large record is split into
    parts. The server's `maxmemory` and its policy determine how much the server keeps and what it evicts. If a node of
    a cluster is down, reads of its records return `Fault.IO_ERROR` and puts return False. No connection is opened
    before the first call.
    """

    def __init__(self, settings: RedisSettings) -> None:
        self.where = settings.where
        self._settings = settings
        self._servers = RedisCluster(settings) if settings.is_cluster else RedisNode(settings.addresses[0], settings)
        self._prefix = settings.prefix.encode()
        self._expiry = () if settings.ttl_s is None else (b"EX", b"%d" % settings.ttl_s)
        self._usage = RemoteUsage()
        self._is_closed = False
        self._lock = threading.Lock()  # guards the usage

    def get_many(self, keys: Sequence[bytes]) -> list[memoryview | Fault]:
        names = [self._name(key) for key in keys]
        until = self._deadline()
        values = [_value_of(reply) for reply in self._asked([Command(b"GET", (name,)) for name in names], until)]
        self._count_reads(values)
        return [self._whole(name, value, until) for name, value in zip(names, values, strict=True)]

    def put_many(self, records: Sequence[RemoteRecord]) -> list[bool]:
        until = self._deadline()
        replies: list[Reply] = []
        for some in batches(records, lambda record: record.payload.nbytes, _GROUP_BYTES):  # to bound the copies
            replies += self._put(some, until)
        self._check(replies)
        return [not isinstance(reply, Exception) for reply in replies]

    def exist_many(self, keys: Sequence[bytes], apart: bool = False) -> list[bool | None]:
        replies = self._asked([Command(b"EXISTS", (self._name(key),)) for key in keys], self._deadline())
        self._count(RemoteUsage(num_questions=len(keys)))
        return [reply == 1 if is_answer(reply) else None for reply in replies]

    def forget(self, namespace: bytes) -> None:
        """See `RemoteStore`. Records that a cluster moves between nodes meanwhile may stay."""
        pattern = _GLOB.sub(rb"\\\1", self._prefix) + b"{" + namespace.hex().encode() + b"*"
        self._deadline()
        try:
            nodes = self._servers.primaries()
        except RedisError as error:
            raise self._unavailable(error) from None
        for node in nodes:
            for names in self._names_like(node, pattern):
                for reply in self._ask([Command(b"UNLINK", (name,)) for name in names], self._deadline()):
                    if isinstance(reply, Exception):
                        raise self._unavailable(reply)
                self._count(RemoteUsage(num_writes=1 + len(names)))

    def usage(self) -> RemoteUsage:
        with self._lock:
            return self._usage

    def close(self) -> None:
        self._is_closed = True
        self._servers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _name(self, key: bytes) -> bytes:
        """Return the server's key for *key*.

        A cluster hashes only the text in braces, so a record and its parts are in one hash slot, on one node.
        """
        return b"%b{%b}" % (self._prefix, key.hex().encode())

    def _deadline(self) -> float:
        """Return the deadline of a call that begins now. Raises `RemoteUnavailable` if the store is closed."""
        if self._is_closed:
            raise RemoteUnavailable(f"{self.where}: the store is closed")
        return time.monotonic() + _MAX_TIMEOUTS * self._settings.timeout_s

    def _asked(self, commands: Sequence[Command], until: float) -> list[Reply]:
        """Send *commands* and return the replies. Raises `RemoteUnavailable` if the server handled no command."""
        replies = self._ask(commands, until)
        self._check(replies)
        return replies

    def _ask(self, commands: Sequence[Command], until: float) -> list[Reply]:
        return self._servers.ask(commands, until) if commands else []

    def _check(self, replies: Sequence[Reply]) -> None:
        """Raise `RemoteUnavailable` if the server handled no command, judged by the *replies*."""
        if replies and not any(map(is_answer, replies)):
            raise self._unavailable(next(reply for reply in replies if isinstance(reply, Exception)))

    def _unavailable(self, error: Exception) -> RemoteUnavailable:
        if self._is_closed:
            return RemoteUnavailable(f"{self.where}: the store is closed")
        return RemoteUnavailable(describe(error, self.where, self._settings.prefix))

    def _whole(self, name: bytes, value: memoryview | Fault, until: float) -> memoryview | Fault:
        """Return the record that begins with *value*, or a fault. Reads the other parts of a large record."""
        parts = None if isinstance(value, Fault) else Parts.parse_name(value)
        if isinstance(value, Fault) or parts is None:
            return value
        replies = self._ask([Command(b"GET", (part,)) for part in parts.names(name)], until)
        rest = [_value_of(reply) for reply in replies]
        self._count_reads(rest)
        faults = [part for part in rest if isinstance(part, Fault)]
        return faults[0] if faults else joined(value, [part for part in rest if not isinstance(part, Fault)])

    def _put(self, records: Sequence[RemoteRecord], until: float) -> list[Reply]:
        """Put the records and return the reply for each. Small records are put together, large ones one by one."""
        names = [self._name(record.key) for record in records]
        values = [in_parts(record) for record in records]
        small = [i for i, (_, rest) in enumerate(values) if not rest]
        together = iter(self._set([(names[i], values[i][0]) for i in small], until))
        return [
            self._put_large(name, first, rest, until) if rest else next(together)
            for name, (first, rest) in zip(names, values, strict=True)
        ]

    def _put_large(self, name: bytes, first: bytes, rest: Sequence[memoryview], until: float) -> Reply:
        """Store a large record in parts. The first part, which names the others to readers, is stored last.

        Then delete unneeded parts: those of the overwritten record or, if the server rejected a part, the new ones.
        """
        (before,) = self._ask([Command(b"GETRANGE", (name, b"0", b"%d" % (HEAD_BYTES - 1)))], until)
        parts, old = Parts.parse_name(first), Parts.parse_name(before) if isinstance(before, memoryview) else None
        assert parts is not None
        replies = self._set(list(zip(parts.names(name), rest, strict=True)), until)
        refusals = [reply for reply in replies if isinstance(reply, Exception)]
        (done,) = refusals[:1] or self._set([(name, first)], until)
        in_vain = parts if isinstance(done, Exception) else old
        if in_vain is not None and old != parts:
            self._ask([Command(b"UNLINK", (part,)) for part in in_vain.names(name)], until)
        return done

    def _set(self, values: Sequence[tuple[bytes, bytes | memoryview]], until: float) -> list[Reply]:
        replies = self._ask([Command(b"SET", (name, value, *self._expiry)) for name, value in values], until)
        done = [value for (_, value), reply in zip(values, replies, strict=True) if not isinstance(reply, Exception)]
        self._count(RemoteUsage(num_writes=len(values), written_bytes=sum(map(len, done))))
        return replies

    def _names_like(self, node: RedisNode, pattern: bytes) -> Iterator[list[bytes]]:
        cursor = b"0"
        while True:
            scan = Command(b"SCAN", (cursor, b"MATCH", pattern, b"COUNT", _SCANNED_AT_ONCE))
            (reply,) = node.ask([scan], self._deadline())
            match reply:
                case [memoryview() as after, list() as names]:
                    yield [bytes(name) for name in names if isinstance(name, memoryview)]
                    cursor = bytes(after)
                case Exception():
                    raise self._unavailable(reply)
                case _:
                    raise RemoteUnavailable(f"{self.where}: SCAN did not return a list of names")
            if cursor == b"0":
                return

    def _count_reads(self, values: Sequence[memoryview | Fault]) -> None:
        num_bytes = sum(len(value) for value in values if isinstance(value, memoryview))
        self._count(RemoteUsage(num_reads=len(values), read_bytes=num_bytes))

    def _count(self, more: RemoteUsage) -> None:
        with self._lock:
            sums = (before + added for before, added in zip(astuple(self._usage), astuple(more), strict=True))
            self._usage = RemoteUsage(*sums)


def _value_of(reply: Reply) -> memoryview | Fault:
    if isinstance(reply, memoryview):
        return reply
    if reply is None:
        return Fault.MISSING
    return Fault.CORRUPT if is_wrong_type(reply) else Fault.IO_ERROR
