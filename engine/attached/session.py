"""Session: one connection of an engine to its sidecar."""

import contextlib
import errno
import os
import select
import socket
from collections.abc import Sequence
from weakref import WeakSet

from kvtier.engine.attached.wire import (
    VERSION,
    Frames,
    FromEngine,
    FromSidecar,
    Hello,
    Malformed,
    Map,
    Refused,
    Welcome,
    frame_of,
    message_of_sidecar,
)

ANSWER_S = 5.0  # for which the answer to `Hello` is waited for: the sidecar's thread never waits itself
PIECE_BYTES = 256 << 10
MAX_PIECES = 16  # that are read in one call: the rest in the next
MAX_HINT_BYTES = 1 << 20  # unsent; while there are more, a sidecar that does not read is sent no hints
MAX_UNSENT_BYTES = 64 << 20  # a sidecar that reads so little is taken for gone


class AttachRefused(ValueError):
    """The sidecar does not take this engine; the message says why, and what to do."""


class Session:
    """Sends and receives without waiting. The sidecar's segment is `file` until the session is closed. Owned by one
    thread; only `wait_readable` may be called by another.

    The sidecar takes the end of the connection for the end of all copies: `close` is called once nothing is copied any
    more, even if the sidecar has ended the session long before. A process that is forked off has no part in it.
    """

    def __init__(
        self, connection: socket.socket, frames: Frames, welcome: Welcome, file: int, come: Sequence[FromSidecar]
    ) -> None:
        """Made by `open_session`. *come*: what came with the welcome."""
        self.welcome = welcome
        self.file = file
        self.is_open = True
        self._connection = connection
        self._frames = frames
        self._unsent = bytearray()
        self._come = list(come)
        _sessions.add(self)

    @property
    def is_sending(self) -> bool:
        """Whether the sidecar has still to read some of what was sent."""
        return bool(self._unsent)

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that wait until the sidecar reads."""
        return len(self._unsent)

    def send(self, message: FromEngine) -> None:
        """Send the message as soon as the sidecar reads; nothing happens if it has gone.

        A sidecar that leaves `MAX_UNSENT_BYTES` unread is taken for gone.
        """
        if self.is_open:
            self._unsent += frame_of(message)
            self.flush()
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self.hang_up()

    def send_hint(self, message: FromEngine) -> None:
        """Send a message that may be lost, unless the sidecar has much to read already."""
        if len(self._unsent) < MAX_HINT_BYTES:
            self.send(message)

    def flush(self) -> None:
        """Go on with sending."""
        while self._unsent and self.is_open:
            try:
                num_sent = self._connection.send(self._unsent, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:  # what it had said is still to be read
                self._unsent.clear()
                return
            del self._unsent[:num_sent]

    def receive(self) -> Sequence[FromSidecar]:
        """What has come since the last call; none, and `is_open` is false, once the sidecar has gone."""
        messages, self._come = self._come, []
        for _ in range(MAX_PIECES if self.is_open else 0):
            try:
                data = self._connection.recv(PIECE_BYTES, socket.MSG_DONTWAIT)
                if not data:
                    self.is_open = False
                    break
                messages += map(message_of_sidecar, self._frames.receive(data))
            except BlockingIOError:
                break
            except (OSError, Malformed):
                self.is_open = False
                break
        return messages

    def wait_readable(self, timeout_s: float) -> None:
        """Wait until something has come, or the session has ended; *timeout_s* at most."""
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            waiting = select.poll()
            waiting.register(self._connection, select.POLLIN)
            waiting.poll(timeout_s * 1000)

    def hang_up(self) -> None:
        """Send and receive nothing more. The connection stays, and with it all that the engine leases, until `close`:
        copies may be under way."""
        self.is_open = False
        self._unsent.clear()
        self._come.clear()

    def close(self) -> None:
        """End the connection, and with it all that the engine leases."""
        self.hang_up()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self.close_file()

    def close_file(self) -> None:
        """Close the descriptor of the segment, which has been mapped."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def abandon(self) -> None:
        """Close the descriptors in a child that was forked. The connection goes on in its parent."""
        self.hang_up()
        self._connection.close()
        self.close_file()

    def leave_open(self) -> None:
        """Hang up, and leave the end of the connection to the end of this process: a copy hangs."""
        self.hang_up()
        self._connection.detach()
        self.close_file()


_sessions: WeakSet[Session] = WeakSet()


def _abandon_all() -> None:
    """A child that was forked copies nothing, as threads are not forked; it must not keep its parent's leases alive."""
    for session in list(_sessions):
        session.abandon()


os.register_at_fork(after_in_child=_abandon_all)


def open_session(path: str, hello: Hello | Map, timeout_s: float = ANSWER_S) -> Session:
    """Attach at the Unix socket *path*. OSError if nothing answers there within *timeout_s*, `AttachRefused` if the
    sidecar does not take the engine."""
    frames, payloads, files = Frames(), list[bytes](), list[int]()
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        undo.callback(_close_all, files)
        connection.settimeout(timeout_s)
        connection.connect(path)
        connection.sendall(frame_of(hello))
        try:
            while not payloads:
                data, found, _, _ = socket.recv_fds(connection, PIECE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
                files += found
                if not data:
                    raise ConnectionAbortedError(errno.ECONNABORTED, "it closed the connection before it answered")
                payloads = frames.receive(data)
            answer, *rest = map(message_of_sidecar, payloads)
        except Malformed as error:
            raise AttachRefused(f"what listens at {path} is no sidecar: {error}") from None
        if isinstance(answer, Refused):
            raise AttachRefused(answer.why)
        if not isinstance(answer, Welcome) or answer.version != VERSION or len(files) != 1:
            raise AttachRefused(f"the sidecar at {path} is of another version; install the same kvtier on both sides")
        connection.settimeout(None)
        undo.pop_all()
        return Session(connection, frames, answer, files[0], rest)
    raise AssertionError("an exit stack swallows nothing")


def _close_all(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)
