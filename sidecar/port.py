"""Port: the listening sockets at which engines connect, and the messages from and to their connections."""

import contextlib
import errno
import os
import selectors
import socket
import stat
import struct
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from types import TracebackType
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

MAX_CLIENTS = 512
MAX_HELD_BYTES = 256 << 20  # incomplete messages of all clients together
PIECE_BYTES = 256 << 10  # read from one client per turn
MAX_MESSAGES = 16  # delivered from one client per turn
MAX_UNREAD_BYTES = 1 << 20  # backpressure: nothing is read from a client with more unread answers
MAX_QUEUED_BYTES = 64 << 20  # a client with more unread answers is disconnected
STUCK_S = 60.0  # a client that has unread answers and reads nothing for this long is disconnected
ACCEPT_PAUSE_S = 1.0  # no connections are accepted for this long after descriptors or memory have run out

_M = TypeVar("_M")
_M_co = TypeVar("_M_co", covariant=True)


class Framing(Protocol[_M_co]):
    """The rule that cuts the bytes of one connection into messages."""

    to_send: bytearray  # what the framing itself sends; the connection's owner takes and clears it

    @property
    def num_held_bytes(self) -> int:
        """Number of received bytes whose messages have not been returned yet."""

    @property
    def has_more(self) -> bool:
        """True if there are complete messages that `receive` has not returned yet."""

    def receive(self, data: bytes, limit: int) -> Sequence[_M_co]:
        """Add *data* to the received bytes, and return up to *limit* complete messages.

        Raises ValueError if the data is invalid, so that the connection has to end.
        """


class Client(Generic[_M]):
    """The connection of a client. Other modules use this object to identify the client, and to send to it."""

    def __init__(self, connection: socket.socket, framing: Framing[_M], now: float) -> None:
        self.connection = connection
        self.framing = framing
        self.messages: deque[_M] = deque()  # complete, and not delivered yet
        self.unread = bytearray()  # bytes that are still to be sent
        self.file: int | None = None  # a descriptor to pass with the first of the unread bytes
        self.since = now  # time of the connection
        self.moved_at = now  # when the client last read bytes, or when unread bytes began to queue
        self.is_open = True

    @property
    def is_reading(self) -> bool:
        """True if the client has read enough of its answers to be sent more."""
        return len(self.unread) <= MAX_UNREAD_BYTES

    @property
    def has_more(self) -> bool:
        """True if messages of the client have been received but not delivered yet."""
        return bool(self.messages) or self.framing.has_more


class Message(NamedTuple, Generic[_M]):
    """A message from a client."""

    client: Client[_M]
    content: _M


class Port(Generic[_M]):
    """Non-blocking sockets that accept clients at *listeners*, and deliver the clients' messages in turns.

    Owned by one thread, which calls `receive` when `fileno` is readable or `has_more` is true. The limits at the top of
    this module bound the memory of a `Port`. A client that sends invalid data or exceeds a limit loses its connection;
    other clients are not affected.

    Only processes of the users in *allowed_uids* may connect to a Unix socket. By default, this is the user of this
    process.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        clock: Callable[[], float],
        refused: Callable[[str, str], None],
        framing: Callable[[], Framing[_M]],
        allowed_uids: Collection[int] | None = None,
        farewell: Callable[[str], bytes] = lambda why: b"",
    ) -> None:
        """Register the listeners.

        *refused* is called for each refusal, with its kind and a description. *framing* creates the `Framing` of a
        new connection. *farewell* is called with the reason if a connection is refused, and returns the bytes to send.
        """
        self._clock = clock
        self._refused = refused
        self._framing = framing
        self._farewell = farewell
        self._allowed_uids = {os.geteuid()} if allowed_uids is None else set(allowed_uids)
        self._selector = selectors.EpollSelector()
        self._listeners = list(listeners)
        self._clients: dict[Client[_M], None] = {}  # oldest connection first
        self._gone: list[Client[_M]] = []
        self._accepts_again_at: float | None = None  # set while the listeners are not watched
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, None)

    def fileno(self) -> int:
        """Return a file descriptor that is readable while there is something to do (level-triggered)."""
        return self._selector.fileno()

    @property
    def clients(self) -> list[Client[_M]]:
        """Open connections, oldest first."""
        return list(self._clients)

    @property
    def num_clients(self) -> int:
        """Number of open connections."""
        return len(self._clients)

    @property
    def has_more(self) -> bool:
        """True if messages have been read but not delivered yet."""
        return any(client.has_more and client.is_reading for client in self._clients)

    def receive(self) -> Iterator[Message[_M]]:
        """Yield the messages that have been received, a few of each client.

        The caller must answer each message before it takes the next one. Before each message, this method checks that
        the client has at most `MAX_UNREAD_BYTES` of unread answers. So at most one answer is queued beyond this limit.
        """
        for key, events in self._selector.select(0):
            if key.data is None:
                self._accept(key.fileobj)  # type: ignore[arg-type]  # listeners are sockets
            elif key.data.is_open:
                self._move(key.data, events)
        for client in list(self._clients):
            for _ in range(MAX_MESSAGES):
                if not client.messages or not client.is_reading:
                    break
                yield Message(client, client.messages.popleft())
            if client.is_open and not client.messages and client.framing.has_more:
                self._take_in(client, b"")
            self._watch(client)

    def send(self, client: Client[_M], data: bytes, file: int | None = None) -> None:
        """Send these bytes to the client as soon as it reads; do nothing if it has disconnected.

        The descriptor *file*, if given, is passed with the first of the bytes. It may be given only if all earlier
        bytes have been sent.
        """
        if not client.is_open:
            return
        if file is not None:
            assert not client.unread, "a descriptor would go with other bytes"
            client.file = file
        self._queue(client, data)
        if len(client.unread) > MAX_QUEUED_BYTES:
            self._refused("unread", f"a client has not read {len(client.unread)} bytes; its connection is closed")
            self._end(client)

    def end(self, client: Client[_M]) -> None:
        """End this connection. The next `take_disconnected` returns the client."""
        self._end(client)

    def take_disconnected(self) -> list[Client[_M]]:
        """Return the clients whose connection has ended since the last call.

        This side of each connection is still open, and the caller must close it: see `Lifeline`.
        """
        gone, self._gone = self._gone, []
        return gone

    def tick(self, stays: Callable[[Client[_M]], bool] = lambda client: False) -> None:
        """Disconnect clients that do not read their answers, and accept connections again after a pause.

        Clients for which *stays* returns True are not disconnected.
        """
        if self._accepts_again_at is not None and self._clock() >= self._accepts_again_at:
            self._accepts_again_at = None
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ, None)
        for client in [client for client in self._clients if client.unread]:
            if self._clock() - client.moved_at > STUCK_S and not stays(client):
                self._refused("unread", "a client has read no answers for a minute; its connection is closed")
                self._end(client)

    def close(self) -> None:
        """End every connection and stop listening. The socket file of a Unix socket is not removed."""
        for client in list(self._clients):
            self._end(client)
        for listener in self._listeners:
            listener.close()
        self._listeners = []
        self._selector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self, listener: socket.socket) -> None:
        if self._accepts_again_at is not None:
            return
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._pause_accepting(error)
            return
        if len(self._clients) >= MAX_CLIENTS:
            self._turn_away(connection, "clients", f"{MAX_CLIENTS} clients are connected already")
        elif connection.family == socket.AF_UNIX and (uid := peer(connection).uid) not in self._allowed_uids:
            self._turn_away(connection, "uid", f"user {uid} is not allowed to connect")
        else:
            connection.setblocking(False)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client = Client(connection, self._framing(), self._clock())
            self._clients[client] = None
            self._selector.register(connection, selectors.EVENT_READ, client)

    def _pause_accepting(self, error: OSError) -> None:
        """Stop accepting connections for a while, because descriptors or memory have run out.

        During the pause, the listeners are not watched. They stay readable, which would keep the loop busy.
        """
        self._accepts_again_at = self._clock() + ACCEPT_PAUSE_S
        for listener in self._listeners:
            self._selector.unregister(listener)
        what = f"a client cannot be accepted ({error.strerror}) and waits"
        self._refused("descriptors", f"{what}; raise the limit of open files (LimitNOFILE, ulimit -n)")

    def _turn_away(self, connection: socket.socket, kind: str, why: str) -> None:
        self._refused(kind, why)
        with contextlib.suppress(OSError), connection:
            connection.setblocking(False)
            connection.send(self._farewell(why))

    def _move(self, client: Client[_M], events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write(client)
        if events & selectors.EVENT_READ and client.is_open:
            self._read(client)

    def _read(self, client: Client[_M]) -> None:
        try:
            data = client.connection.recv(PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(client)
            return
        if not self._take_in(client, data):
            return
        if client.framing.num_held_bytes > len(data) and self._num_held_bytes() > MAX_HELD_BYTES:
            self._refused("held", f"incomplete messages exceed {MAX_HELD_BYTES} bytes; a connection is closed")
            self._end(client)
            return
        if client.framing.to_send:
            to_send = bytes(client.framing.to_send)
            client.framing.to_send.clear()
            self._queue(client, to_send)

    def _take_in(self, client: Client[_M], data: bytes) -> bool:
        """Cut *data* into messages. If it is invalid, end the connection and return False."""
        try:
            client.messages += client.framing.receive(data, MAX_MESSAGES)
        except ValueError as error:
            self._refused("garbage", f"{error}; the connection is closed")
            self._end(client)
        return client.is_open

    def _queue(self, client: Client[_M], data: bytes) -> None:
        if not client.unread:
            client.moved_at = self._clock()
        client.unread += data
        self._write(client)

    def _write(self, client: Client[_M]) -> None:
        try:
            num_sent = self._sent(client)
        except BlockingIOError:
            num_sent = 0
        except OSError:
            self._end(client)
            return
        if num_sent:
            client.moved_at = self._clock()
        del client.unread[:num_sent]
        self._watch(client)

    def _sent(self, client: Client[_M]) -> int:
        if client.file is None or not client.unread:
            return client.connection.send(client.unread) if client.unread else 0
        num_sent = socket.send_fds(client.connection, [client.unread], [client.file])
        client.file = None
        return num_sent

    def _watch(self, client: Client[_M]) -> None:
        """Update the events (readable or writable) for which the connection is watched."""
        if not client.is_open:
            return
        is_read = client.is_reading and len(client.messages) < MAX_MESSAGES and not client.framing.has_more
        events = (selectors.EVENT_READ if is_read else 0) | (selectors.EVENT_WRITE if client.unread else 0)
        known = self._selector.get_map().get(client.connection)
        if known is None and events:
            self._selector.register(client.connection, events, client)
        elif known is not None and not events:
            self._selector.unregister(client.connection)
        elif known is not None and known.events != events:
            self._selector.modify(client.connection, events, client)

    def _end(self, client: Client[_M]) -> None:
        if client.is_open:
            client.is_open = False
            client.messages.clear()
            with contextlib.suppress(KeyError):
                self._selector.unregister(client.connection)
            del self._clients[client]
            self._gone.append(client)

    def _num_held_bytes(self) -> int:
        return sum(client.framing.num_held_bytes for client in self._clients)


def listen(url: str) -> socket.socket:
    """Return a socket that listens at *url*, which is `tcp://HOST:PORT` or `ipc://PATH`, as for ZeroMQ.

    Only the user of this process may connect to a path. A socket file that an ended process has left at the path is
    replaced. Raises OSError if the socket cannot listen at *url*, and ValueError if *url* has another form.
    """
    kind, _, place = url.partition("://")
    if kind == "ipc" and place:
        return listen_at_path(place)
    host, _, number = place.rpartition(":")
    if kind != "tcp" or not host or not number.isdigit():
        raise ValueError(f"{url!r} is not an address to listen at; give tcp://127.0.0.1:PORT or ipc:///PATH")
    return socket.create_server((host.strip("[]"), int(number)), family=_family(host), backlog=64)


def is_at(listener: socket.socket, url: str) -> bool:
    """Return whether the socket listens at *url*, which has the same form as for `listen`. Port 0 matches any port."""
    kind, _, place = url.partition("://")
    name = listener.getsockname()
    if kind == "ipc" or listener.family == socket.AF_UNIX:
        return kind == "ipc" and name == place
    host, _, number = place.rpartition(":")
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return name[0] in addresses and int(number) in (0, name[1])


def listen_at_path(path: str) -> socket.socket:
    """Return a socket that listens at *path*, for the user of this process only. Raise OSError if it cannot listen.

    A socket file that an ended process has left at the path is replaced.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                if stat.S_ISSOCK(os.lstat(path).st_mode):  # a plain file refuses connections too
                    os.unlink(path)
            except FileNotFoundError:
                pass
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    return listener


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class Peer(NamedTuple):
    """The process that has connected to a Unix socket."""

    pid: int
    uid: int


def peer(connection: socket.socket) -> Peer:
    """Return the process at the other end of a Unix socket, as the kernel identifies it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return Peer(*struct.unpack("3i", credentials)[:2])
