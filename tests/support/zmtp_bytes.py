"""What a DEALER of ZeroMQ says, byte by byte, for who says it by hand."""

import msgspec

from kvtier.sidecar.lmcache.zmtp import message_bytes

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\3\1" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\5READY\x0bSocket-Type\0\0\0\6DEALER\x08Identity\0\0\0\0"
HANDSHAKE = GREETING + bytes((4, len(READY))) + READY
NOOP = message_bytes([msgspec.msgpack.encode(1), msgspec.msgpack.encode(24)])
NOOP_ANSWER = message_bytes([*map(msgspec.msgpack.encode, (1, 24, "OK"))])
