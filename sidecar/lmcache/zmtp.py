"""The server's side of ZMTP 3.0, ZeroMQ's protocol on a byte stream: messages of a DEALER socket, and replies to it."""

import struct
from collections.abc import Sequence

GREETING_BYTES = 64
_SIGNATURE = b"\xff\0\0\0\0\0\0\0\1\x7f"
_GREETING = _SIGNATURE + b"\3\0" + b"NULL".ljust(20, b"\0") + bytes(32)  # version 3.0, no security, as-server off
_MORE, _LONG, _COMMAND = 1, 2, 4  # flags of a frame
_READY = b"\5READY\x0bSocket-Type\0\0\0\6ROUTER\x08Identity\0\0\0\0"

MAX_MESSAGE_BYTES = 32 << 20  # six million token ids
MAX_FRAMES = 32  # of a message


class Garbage(ValueError):
    """The error of bytes that are not ZMTP 3, or exceed a limit. The connection cannot be used any more."""


class Zmtp:
    """The framing of one connection: bytes in, messages out.

    It holds the part of an incomplete message that has arrived, at most `MAX_MESSAGE_BYTES`. Memory for a frame is not
    allocated before the frame's bytes arrive, whatever size its header announces.

    Written from RFC 23 (https://rfc.zeromq.org/spec/23/). libzmq is not used, because its sockets accept messages of
    any number of frames into memory, and report neither which process a connection belongs to (SO_PEERCRED) nor when a
    connection has ended.
    """

    def __init__(self) -> None:
        self.has_more = False  # whether `receive` may have left complete messages in the buffer
        self.to_send = bytearray(_GREETING)  # taken and cleared by the connection's owner
        self._buffer = bytearray()
        self._frames: list[bytes] = []  # of the message that is not complete
        self._num_frame_bytes = 0
        self._is_greeted = False
        self._is_ready = False

    @property
    def num_held_bytes(self) -> int:
        """Number of received bytes whose messages have not been returned yet."""
        return len(self._buffer) + self._num_frame_bytes

    def receive(self, data: bytes, limit: int | None = None) -> list[list[bytes]]:
        """Add *data* to the received bytes. Return at most *limit* complete messages, each a list of frames.

        Further messages stay in the buffer, because they would take twenty times the memory as lists of frames.
        Raises `Garbage` if the data is invalid, so that the connection has to end.
        """
        self._buffer += data
        messages: list[list[bytes]] = []
        start = 0
        if not self._is_greeted:
            start = self._greet()
        if self._is_greeted:
            while len(messages) != limit and (end := self._frame(start, messages)) is not None:
                start = end
        self.has_more = len(messages) == limit
        del self._buffer[:start]
        return messages

    def _greet(self) -> int:
        """Check the part of the greeting that has arrived, and return how many bytes have been processed."""
        head = bytes(self._buffer[:GREETING_BYTES])
        if head[:1] not in (b"", b"\xff") or (len(head) > 9 and head[9] != 0x7F) or (len(head) > 10 and head[10] < 3):
            raise Garbage("a client does not begin with the greeting of ZMTP 3 (ZeroMQ's protocol)")
        if len(head) < GREETING_BYTES:
            return 0
        if head[12:32].rstrip(b"\0") != b"NULL":
            raise Garbage("a client uses a ZeroMQ security mechanism, but only NULL (none) is supported")
        self._is_greeted = True
        self.to_send += _frame_of(_COMMAND, _READY)
        return GREETING_BYTES

    def _frame(self, start: int, messages: list[list[bytes]]) -> int | None:
        """Process the frame at *start*, and return where it ends; None if it is not complete."""
        buffer = self._buffer
        if len(buffer) < start + 2:
            return None
        flags = buffer[start]
        if flags & ~(_MORE | _LONG | _COMMAND) or (flags & _COMMAND and flags & _MORE):
            raise Garbage("a client sent a frame of an unknown kind")
        body = start + 2
        if flags & _LONG:
            body = start + 9
            if len(buffer) < body:
                return None
            num_bytes: int = struct.unpack_from(">Q", buffer, start + 1)[0]
        else:
            num_bytes = buffer[start + 1]
        if self._num_frame_bytes + num_bytes > MAX_MESSAGE_BYTES:
            raise Garbage(f"a client sent a message of more than {MAX_MESSAGE_BYTES} bytes")
        end = body + num_bytes
        if len(buffer) < end:
            return None
        frame = bytes(memoryview(buffer)[body:end])
        if flags & _COMMAND:
            self._command(frame)
        else:
            self._message_frame(frame, bool(flags & _MORE), messages)
        return end

    def _command(self, body: bytes) -> None:
        name = body[1 : 1 + body[0]] if body else b""
        if name == b"READY" and not self._is_ready:
            if _properties(body[1 + len(name) :]).get(b"socket-type") != b"DEALER":
                raise Garbage("a client's ZeroMQ socket is not of the type DEALER")
            self._is_ready = True
        elif name == b"PING" and self._is_ready:  # ZMTP 3.1: a ttl, then a context to send back
            self.to_send += _frame_of(_COMMAND, b"\4PONG" + body[7:23])
        elif name not in (b"PONG", b"SUBSCRIBE", b"CANCEL"):
            raise Garbage("a client sent a command that is unknown or not expected now")

    def _message_frame(self, frame: bytes, has_more: bool, messages: list[list[bytes]]) -> None:
        if not self._is_ready:
            raise Garbage("a client sent a message before the handshake")
        self._frames.append(frame)
        self._num_frame_bytes += len(frame)
        if len(self._frames) > MAX_FRAMES:
            raise Garbage(f"a client sent a message of more than {MAX_FRAMES} frames")
        if not has_more:
            messages.append(self._frames)
            self._frames, self._num_frame_bytes = [], 0


def message_bytes(frames: Sequence[bytes]) -> bytes:
    """Encode the frames of one message as the bytes to send."""
    *first, last = frames
    return b"".join([*(_frame_of(_MORE, frame) for frame in first), _frame_of(0, last)])


def _frame_of(flags: int, body: bytes) -> bytes:
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | _LONG,)) + struct.pack(">Q", len(body)) + body


def _properties(data: bytes) -> dict[bytes, bytes]:
    """Return the properties in a READY command, by name in lower case."""
    properties: dict[bytes, bytes] = {}
    place = 0
    while place < len(data):
        value = place + 1 + data[place] + 4
        if value > len(data):
            raise Garbage("a client sent a READY command that ends within its properties")
        (num_bytes,) = struct.unpack_from(">I", data, value - 4)
        end = value + num_bytes
        if end > len(data):
            raise Garbage("a client sent a READY command that ends within its properties")
        properties[data[place + 1 : value - 4].lower()] = data[value:end]
        place = end
    return properties
