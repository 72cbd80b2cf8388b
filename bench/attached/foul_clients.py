"""What does a client cost that stops reading, or sends garbage, huge frames, or another one's slots?"""

import contextlib
import random
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.attached.client import BLOCK_TOKENS, Client
from bench.attached.sidecar_process import SidecarProcess, sidecar_process
from bench.report import Effort, Row
from bench.rounds import at_most, never
from kvtier.engine.attached.session import Session, open_session
from kvtier.engine.attached.wire import VERSION, Abandon, GroupShape, Hello, Ping, Publish, frame_of, packed

BLOCK_BYTES = 64 << 10
NUM_BLOCKS = 16
MIB = 1 << 20
MAX_GROWN_MIB = 96  # what one connection may have unread is 64 MiB
MAX_SENT = 10_000  # thousands of pings of a client that reads no answer
UNREAD_S = 2.0  # a client that cannot send anything for so long is not read any more
ENDS_WITHIN_S = 20.0


def foul_client_rows(effort: Effort, folder: Path) -> list[Row]:
    """Each foul one in turn, beside one that goes on writing and reading; the foul one's connection has to end."""
    rows = []
    with sidecar_process(folder, host="256MiB", disk=None) as sidecar:
        other = Client(sidecar.socket, BLOCK_BYTES)
        other.write(0, NUM_BLOCKS)
        other.wait(lambda: other.read(0, NUM_BLOCKS) == NUM_BLOCKS)
        for name, acts in FOUL.items():
            before, num_wrong = sidecar.resident_bytes(), 0
            is_ended = acts(sidecar)
            grown = sidecar.resident_bytes() - before
            for document in range(1, 5):
                other.write(document, NUM_BLOCKS)
                num_wrong += other.read(0, NUM_BLOCKS) != NUM_BLOCKS
            rows += [
                Row(f"{name}: its connection ends, or is not read any more", is_ended, "", "1", is_ended),
                at_most(f"{name}: memory grown", grown / MIB, "MiB", MAX_GROWN_MIB, varies=False),
                never(f"{name}: another one's loads that failed", num_wrong),
            ]
        rows.append(Row("another one was attached anew", other.tiers.standing().num_attached - 1, "times", "0"))
        other.close()
    return rows


def _attached(sidecar: SidecarProcess) -> Session:
    return open_session(str(sidecar.socket), _hello())


def _hello() -> Hello:
    return Hello(VERSION, "foul", "foul", b"f" * 16, [GroupShape(BLOCK_TOKENS, False, BLOCK_BYTES)])


def _stop_reading(sidecar: SidecarProcess) -> bool:
    """Ask again and again, and read no answer: after a while nothing more can be sent."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
        connection.settimeout(UNREAD_S)
        connection.connect(str(sidecar.socket))
        connection.sendall(frame_of(_hello()))
        try:
            for _ in range(MAX_SENT):
                connection.sendall(frame_of(Ping()) * 1000)
        except (TimeoutError, ConnectionError):
            return True
    return False


def _send_garbage(sidecar: SidecarProcess) -> bool:
    rng = random.Random(1)
    return all(_is_ended_after(sidecar, rng.randbytes(rng.randrange(1, 4096)) + bytes(64)) for _ in range(50))


def _send_huge_frames(sidecar: SidecarProcess) -> bool:
    return _is_ended_after(sidecar, (1 << 30).to_bytes(4, "little") + bytes(MIB))


def _send_others_slots(sidecar: SidecarProcess) -> bool:
    """Publish and give back slots that were never reserved."""
    ended = []
    for message in (Abandon(0, packed([0, 1, 2])), Publish(0, packed([0]), bytes(32), [], bytes(16), bytes(8))):
        session = _attached(sidecar)
        session.send(message)
        ended.append(_has_ended(session))
        session.close()
    return all(ended)


def _has_ended(session: Session) -> bool:
    give_up_at = time.monotonic() + ENDS_WITHIN_S
    while session.is_open and time.monotonic() < give_up_at:
        session.wait_readable(0.1)
        session.receive()
    return not session.is_open


def _is_ended_after(sidecar: SidecarProcess, data: bytes) -> bool:
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
        connection.settimeout(ENDS_WITHIN_S)
        connection.connect(str(sidecar.socket))
        connection.sendall(frame_of(_hello()))
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
            while connection.recv(1 << 16):
                pass
        return True


FOUL: Mapping[str, Callable[[SidecarProcess], bool]] = {
    "reads nothing": _stop_reading,
    "garbage": _send_garbage,
    "a frame of 1 GiB": _send_huge_frames,
    "another one's slots": _send_others_slots,
}
