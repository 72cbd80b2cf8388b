"""A connection of an engine to its sidecar."""

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

ANSWER_S = 5.0  # timeout of the answer to `Hello`: the sidecar's thread itself never blocks
PIECE_BYTES = 256 << 10  # maximum number of bytes of one read from the connection
MAX_PIECES = 16  # maximum number of reads in one call of `receive`
MAX_HINT_BYTES = 1 << 20  # with more unsent bytes than this, no hints are sent
MAX_UNSENT_BYTES = 64 << 20  # with more unsent bytes than this, the sidecar counts as gone


class AttachRefused(ValueError):
    """Raised if the sidecar refuses this engine; the message says why, and what to do."""


class Session:
    """A connection of an engine to its sidecar. Sending and receiving never block.

    `file` is the file descriptor of the sidecar's shared memory, until the session is closed. When the engine closes
    the connection, the sidecar assumes that all copies have ended. So call `close` only when no copy is in flight, even
    if the sidecar ended the session long before. Only one thread may use the session, except for `wait_readable`. A
    forked child process cannot use it.
    """

    def __init__(
        self, connection: socket.socket, frames: Frames, welcome: Welcome, file: int, come: Sequence[FromSidecar]
    ) -> None:
        """Wrap a new connection; only `open_session` calls this. *come* has the messages received after *welcome*."""
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
        """True if bytes wait to be sent, because the sidecar has not read earlier ones yet."""
        return bool(self._unsent)

    def send(self, message: FromEngine) -> None:
        """Send a message now, or once the sidecar has read earlier ones. Do nothing if the sidecar is gone.

        If more than `MAX_UNSENT_BYTES` bytes wait to be sent, the sidecar counts as gone.
        """
        if self.is_open:
            self._unsent += frame_of(message)
            self.flush()
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self.disconnect()

    def send_hint(self, message: FromEngine) -> None:
        """Send a message, but drop it if `MAX_HINT_BYTES` or more bytes wait to be sent."""
        if len(self._unsent) < MAX_HINT_BYTES:
            self.send(message)

    def flush(self) -> None:
        """Send as many of the waiting bytes as the connection accepts now."""
        while self._unsent and self.is_open:
            try:
                num_sent = self._connection.send(self._unsent, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:  # messages that the sidecar has sent can still be received
                self._unsent.clear()
                return
            del self._unsent[:num_sent]

    def receive(self) -> Sequence[FromSidecar]:
        """Return the messages received since the last call. Once the sidecar is gone, `is_open` is False."""
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
        """Wait up to *timeout_s* for a message or the end of the session."""
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            waiting = select.poll()
            waiting.register(self._connection, select.POLLIN)
            waiting.poll(timeout_s * 1000)

    def disconnect(self) -> None:
        """Stop sending and receiving. Keep the connection open until `close`, because copies may still be in flight.

        The engine's leases last as long as the connection.
        """
        self.is_open = False
        self._unsent.clear()
        self._come.clear()

    def close(self) -> None:
        """End the connection, and with it all leases of the engine."""
        self.disconnect()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self.close_file()

    def close_file(self) -> None:
        """Close the file descriptor of the shared memory. Memory that is mapped already stays mapped."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def abandon(self) -> None:
        """Close the file descriptors in a forked child process. The parent process keeps its connection."""
        self.disconnect()
        self._connection.close()
        self.close_file()

    def leave_open(self) -> None:
        """Stop using the session, but leave its connection open until this process ends, because a copy hangs."""
        self.disconnect()
        self._connection.detach()
        self.close_file()


_sessions: WeakSet[Session] = WeakSet()


def _abandon_all() -> None:
    """Close the file descriptors in a forked child process, which must not keep its parent's leases alive."""
    for session in list(_sessions):
        session.abandon()


os.register_at_fork(after_in_child=_abandon_all)


def open_session(path: str, hello: Hello | Map, timeout_s: float = ANSWER_S) -> Session:
    """Connect to the sidecar at the Unix socket *path*, send *hello*, and return the session.

    Raises:
        OSError: If there is no answer within *timeout_s* seconds.
        AttachRefused: If the sidecar refuses the engine.
    """
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
                    raise ConnectionAbortedError(errno.ECONNABORTED, "the connection was closed without an answer")
                payloads = frames.receive(data)
            answer, *rest = map(message_of_sidecar, payloads)
        except Malformed as error:
            raise AttachRefused(f"the server at {path} is not a kvtier sidecar: {error}") from None
        if isinstance(answer, Refused):
            raise AttachRefused(answer.why)
        if not isinstance(answer, Welcome) or answer.version != VERSION or len(files) != 1:
            raise AttachRefused(
                f"the sidecar at {path} has another version of kvtier; install the same version for engine and sidecar"
            )
        connection.settimeout(None)
        undo.pop_all()
        return Session(connection, frames, answer, files[0], rest)
    raise AssertionError("unreachable: the exit stack above never suppresses an exception")


def _close_all(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)
