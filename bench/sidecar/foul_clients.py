"""What can a client do that reads no answers, sends garbage, frames of a GiB, speaks for another's worker, or writes
into chunks that another has stored? How much memory does the sidecar take meanwhile, and how are others served?"""

import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq
from foreign.running import LmcacheClients, Sidecar, free_endpoint
from zmtp_bytes import HANDSHAKE

from bench.report import Effort, Row
from bench.rounds import at_most, never
from bench.sidecar.crowd import percentile
from kvtier.sidecar.lmcache.zmtp import message_bytes

BYSTANDER = 0
SLOT_BYTES = 4 * 256 * 256 * 2  # of a chunk of `LAYOUT`
ALONE_S = 4.0
MIN_S = 2.0  # that the other one is served beside each foul one, or just after it
LOOKS_S = 0.01  # between two looks at the sidecar's memory
MIB, GIB = 1 << 20, 1 << 30
MAX_GROWTH_MIB = 64  # a bystander's requests and freed pages of the allocator among it
NUM_GARBAGE, NUM_LARGE, NUM_UNFINISHED = 200, 20, 12
UNFINISHED_BYTES = 31 * MIB  # of each message that never ends; 256 MiB of all of them are kept
MAX_UNFINISHED_MIB = 256
DEAF_S = 180.0  # one that reads nothing is let go a minute after all buffers are full

# An operation that is not known is said again in the answer, so that few requests fill what the kernel buffers.
ECHOED = message_bytes([msgspec.msgpack.encode(1), msgspec.msgpack.encode("x" * 60_000)])

Address = tuple[str, int]


def foul_rows(effort: Effort, python: str, folder: Path) -> list[Row]:
    """Each foul client beside one of LMCache's own, which stores, loads and compares.

    A quick run leaves out the one that reads nothing, which is let go after a minute.
    """
    rows: list[Row] = []
    with Sidecar(free_endpoint(), "--host", "1GiB") as sidecar, LmcacheClients(python, sidecar.endpoint) as clients:
        host, _, port = sidecar.endpoint.removeprefix("tcp://").rpartition(":")
        address = (host, int(port))
        clients.start(BYSTANDER)
        clients.ask(BYSTANDER, "mixed", ALONE_S)
        alone = clients.ask(BYSTANDER, "mixed", ALONE_S)
        for name, (max_mib, deed) in effort.of(FOUL, quick=QUICK_FOUL).items():
            clients.tell(BYSTANDER, "mixed_until_told")
            with Memory.watched(sidecar.process.pid) as memory:
                num_ended, num_all = deed(address)
                time.sleep(MIN_S)
            clients.tell(BYSTANDER, "stop")
            beside = clients.answer(BYSTANDER)
            num_bad = sum(beside[what] for what in ("num_wrong", "num_refused", "num_missed"))
            rows += [
                Row(f"{name}: connections ended", num_ended, "", f"{num_all}", num_ended == num_all),
                at_most(f"{name}: the sidecar's memory grows by", memory.growth_mib, "MiB", max_mib, varies=False),
                never(f"{name}: another's loads or stores that went wrong", num_bad),
                Row(f"{name}: another's speed of that alone", speed(beside) / speed(alone), ""),
                Row(f"{name}: another's lookups, p99", 1e3 * percentile(beside["lookup_s"], 99), "ms"),
            ]
        rows += foreign_rows(sidecar.endpoint)
        rows += writing_rows(sidecar)
    return rows


@dataclass
class Memory:
    """What the process has of its own, beside shared memory and files."""

    before_mib: float
    max_mib: float

    @property
    def growth_mib(self) -> float:
        """By how much it has grown at most."""
        return self.max_mib - self.before_mib

    @staticmethod
    @contextmanager
    def watched(pid: int) -> Iterator["Memory"]:
        """Look again and again for the time of a block."""
        memory = Memory(own_mib(pid), 0.0)
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(LOOKS_S):
                memory.max_mib = max(memory.max_mib, own_mib(pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield memory
        finally:
            is_over.set()
            watcher.join()


def own_mib(pid: int) -> float:
    """Anonymous memory of the process now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def reads_nothing(address: Address) -> tuple[int, int]:
    """Ask as much as is taken and read no answer, until the connection ends."""
    with socket.create_connection(address) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(HANDSHAKE)
        deaf.settimeout(1.0)
        give_up_at = time.monotonic() + DEAF_S
        left = b""
        while time.monotonic() < give_up_at:
            left = left or ECHOED
            try:
                left = left[deaf.send(left) :]
            except TimeoutError:
                continue
            except OSError:
                return 1, 1
    return 0, 1


def sends_garbage(address: Address) -> tuple[int, int]:
    """Bytes at random, half of the times after a handshake."""
    rng = random.Random(1)
    beginnings = [HANDSHAKE if number % 2 else b"" for number in range(NUM_GARBAGE)]
    return sum(is_ended(address, [begin, b"\xf8" + rng.randbytes(100_000)]) for begin in beginnings), NUM_GARBAGE


def sends_large(address: Address) -> tuple[int, int]:
    """Frames of a GiB, of which all is sent that is taken."""
    header = b"\2" + struct.pack(">Q", GIB)
    return sum(is_ended(address, [HANDSHAKE + header, *[bytes(MIB)] * 1024]) for _ in range(NUM_LARGE)), NUM_LARGE


def ends_nothing(address: Address) -> tuple[int, int]:
    """Messages that never end, in more connections than there is room for."""
    header = b"\2" + struct.pack(">Q", UNFINISHED_BYTES + 1)
    connections = []
    for _ in range(NUM_UNFINISHED):
        connection = socket.create_connection(address)
        connections.append(connection)
        with suppress(OSError):
            connection.sendall(HANDSHAKE + header + bytes(UNFINISHED_BYTES))
    time.sleep(1.0)
    num_ended = sum(has_ended(connection) for connection in connections)
    for connection in connections:
        connection.close()
    limit = MAX_UNFINISHED_MIB * MIB // UNFINISHED_BYTES
    return num_ended, NUM_UNFINISHED - limit


FOUL: Mapping[str, tuple[int, Callable[[Address], tuple[int, int]]]] = {
    "a client that reads nothing": (MAX_GROWTH_MIB, reads_nothing),
    "clients that send garbage": (MAX_GROWTH_MIB, sends_garbage),
    "clients with frames of 1 GiB": (MAX_GROWTH_MIB, sends_large),
    "clients with messages that never end": (MAX_GROWTH_MIB + MAX_UNFINISHED_MIB, ends_nothing),
}


QUICK_FOUL = {name: deed for name, deed in FOUL.items() if deed[1] is not reads_nothing}


def is_ended(address: Address, pieces: list[bytes]) -> bool:
    """Whether the sidecar ends a connection at which these are sent."""
    with socket.create_connection(address) as connection:
        with suppress(OSError):
            for piece in pieces:
                connection.sendall(piece)
        connection.settimeout(DEAF_S)
        with suppress(OSError):
            while connection.recv(1 << 16):
                pass
            return True
        return has_ended(connection)


def has_ended(connection: socket.socket) -> bool:
    """Whether the other side has closed it, as far as is known now."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def speed(seen: Any) -> float:
    """Bytes a second."""
    return seen["num_bytes"] / seen["seconds"]


LAYOUT = {
    "instance_id": 7,
    "model_name": "own",
    "world_size": 1,
    "block_size": 128,
    "num_layers": 4,
    "hidden_dim_size": 256,
    "dtype_str": "bfloat16",
    "use_mla": True,
    "num_physical_slots": 256,
}


def key_of(first_token: int) -> dict[str, object]:
    """A key of two chunks, as LMCache 0.5.6 has it."""
    tokens = list(range(first_token, first_token + 512))
    key = {"model_name": "own", "world_size": 1, "worker_id": 0, "token_ids": tokens, "start": 0, "end": 512}
    return key | {"request_id": f"r{first_token}", "cache_salt": "", "request_configs": None, "num_kv_readers": 1}


def foreign_rows(endpoint: str) -> list[Row]:
    """One that reserves slots, and another that says to be that worker: it ends, commits, reads and registers."""
    key, layout = key_of(1000), LAYOUT
    with zmq.Context() as context, Dealer(context, endpoint) as owner, Dealer(context, endpoint) as other:
        owner.ask(14, layout)
        slots = owner.ask(16, key, 7)["context"]["slots"]
        harmless = [
            other.ask(17, key, 7, b"") is False,
            other.ask(16, key, 7)["context"]["slots"] == [],
            other.ask(18, key, 7)["success"] is False,
            # Refused, but told of the segment: without it a client would send every chunk by value.
            other.ask(14, layout)["pool_size"] > 0,
            other.ask(15, 7) is None,
            other.ask(13, "r1000") is None,
        ]
        is_kept = len(slots) == 2 and owner.ask(17, key, 7, b"") is True
    name = "a client that speaks for another's worker"
    return [
        Row(f"{name}: refused", sum(harmless), "", f"{len(harmless)}", all(harmless)),
        Row(f"{name}: the other's store is kept", is_kept, "", "1", is_kept),
    ]


def writing_rows(sidecar: Sidecar) -> list[Row]:
    """A client that overwrites chunks which another client has stored. Each client that maps the memory can do that."""
    num_wrong = num_refused = 0
    num_rounds = 20
    with zmq.Context() as context, Dealer(context, sidecar.endpoint) as owner, sidecar.segment.open("r+b") as memory:
        owner.ask(14, LAYOUT)
        for number in range(num_rounds):
            key = key_of(10_000 * (number + 2))
            places = [slot["offset"] for slot in owner.ask(16, key, 7)["context"]["slots"]]
            for place in places:
                memory.seek(place)
                memory.write(bytes([number + 1]) * SLOT_BYTES)
            memory.flush()
            owner.ask(17, key, 7, b"")
            owner.ask(8, {**key, "worker_id": None}, 1)
            found = owner.ask(9, key["request_id"])
            while found is None:
                found = owner.ask(9, key["request_id"])
            owner.ask(13, key["request_id"])
            memory.seek(places[number % 2] + 997 * number)
            memory.write(b"\xff")
            memory.flush()
            loaded = owner.ask(18, key, 7)
            num_refused += not loaded["success"]
            for slot in loaded["context"].get("slots", []):
                memory.seek(slot["offset"])
                num_wrong += memory.read(SLOT_BYTES) != bytes([number + 1]) * SLOT_BYTES
            owner.ask(19, key, 7)
            owner.ask(13, key["request_id"])
    name = "a client that writes into stored chunks"
    return [
        never(f"{name}: wrong chunks that another loads", num_wrong),
        Row(f"{name}: loads refused", num_refused, "", f"{num_rounds}", num_refused == num_rounds),
    ]


class Dealer:
    """Asks one request after the other."""

    def __init__(self, context: "zmq.Context[Any]", endpoint: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self._socket.connect(endpoint)

    def ask(self, operation: int, *payload: object) -> Any:
        """What is answered."""
        self._socket.send_multipart([msgspec.msgpack.encode(value) for value in (1, operation, *payload)])
        return msgspec.msgpack.decode(self._socket.recv_multipart()[2])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._socket.close()
