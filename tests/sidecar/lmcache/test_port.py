"""Connections: the wire spoken by libzmq and by hand, clients that behave badly, memory that stays flat."""

import contextlib
import os
import random
import resource
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from chaos import FakeClock
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_bed import CHUNK, REGISTRATION, Bed, RawClient, key
from plain_connection import Plain
from waiting import DEADLINE_S
from zmtp_bytes import GREETING, HANDSHAKE, NOOP, NOOP_ANSWER

from kvtier.sidecar import port as port_module
from kvtier.sidecar.lmcache.zmtp import GREETING_BYTES, MAX_MESSAGE_BYTES, Garbage, Zmtp, message_bytes
from kvtier.sidecar.port import Port, listen
from kvtier.sidecar.refusals import Refusals


@pytest.fixture
def tcp() -> Iterator[tuple[Port, int]]:
    listener = listen("tcp://127.0.0.1:0")
    with Port([listener], FakeClock(), Refusals(FakeClock()).refused, Zmtp) as port:
        yield port, listener.getsockname()[1]


def test_libzmq_connects_by_tcp_too(tcp: tuple[Port, int]) -> None:
    port, number = tcp
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0  # else a test that fails waits until everything has been sent
        dealer.connect(f"tcp://127.0.0.1:{number}")
        dealer.send_multipart([b"a", b"", b"b" * 100_000])
        while not (messages := list(port.receive())):
            dealer.poll(1)
        port.send(messages[0].client, message_bytes([*messages[0].content, b"c"]))

        assert dealer.recv_multipart() == [b"a", b"", b"b" * 100_000, b"c"]


def test_a_heartbeat_of_libzmq_is_answered(bed: Bed) -> None:
    plain = Plain(bed)
    plain.read(GREETING_BYTES + 2 + 41)

    plain.send(b"\4\x0b\4PING\0\x0acont")

    assert plain.read(11) == b"\4\x09\4PONGcont"


def test_a_message_may_come_byte_by_byte(bed: Bed) -> None:
    plain = Plain(bed, b"")
    for byte in HANDSHAKE + NOOP:
        plain.send(bytes((byte,)))

    assert plain.read(GREETING_BYTES + 2 + 41 + len(NOOP_ANSWER)).endswith(NOOP_ANSWER)


def test_clients_have_turns(bed: Bed) -> None:
    flood = Plain(bed)
    flood.socket.settimeout(DEADLINE_S)
    flood.socket.sendall(NOOP * 2000)
    other = Plain(bed)
    other.socket.sendall(NOOP)

    for _ in range(8):
        bed.endpoint.receive()

    other.socket.settimeout(DEADLINE_S)
    assert other.socket.recv(1000).endswith(NOOP_ANSWER)
    assert 16 <= bed.endpoint.statistics().operations["noop"] < 200
    assert bed.endpoint.receive() is True  # the flood's are left


def test_a_lookup_beside_ten_thousand_requests_is_answered_in_the_next_turns(bed: Bed, client: RawClient) -> None:
    document = list(range(8 * CHUNK))
    client.store(document, "store")
    flood, other = Plain(bed), Plain(bed)
    other.read(GREETING_BYTES + 2 + 41)
    flood.socket.settimeout(DEADLINE_S)
    flood.socket.sendall(NOOP * 10_000)
    lookup = [(1, 8, key(document, "own", worker=None), 1), (2, 9, "own")]
    for frames in lookup:
        other.socket.sendall(message_bytes([*map(msgspec.msgpack.encode, frames)]))

    for _ in range(4):
        bed.turn()

    other.socket.settimeout(DEADLINE_S)
    assert other.socket.recv(1000).endswith(message_bytes([*map(msgspec.msgpack.encode, (2, 9, 8))]))
    assert bed.endpoint.statistics().operations["noop"] <= 16 * 6


def test_a_client_that_reads_no_answers_is_read_no_further_and_let_go(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_module, "MAX_UNREAD_BYTES", 4000)
    deaf = Plain(bed)
    deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    bed.settle()
    (client,) = bed.port.clients
    client.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    served = -1
    while bed.endpoint.statistics().operations.get("noop", 0) > served:  # until nothing moves any more
        served = bed.endpoint.statistics().operations.get("noop", 0)
        with contextlib.suppress(BlockingIOError):
            deaf.socket.send(NOOP * 1000)
        bed.settle()

    assert served > 100
    assert 4000 < len(client.unread) < 8000
    assert RawClient(bed).ask("noop") == "OK"  # others are served
    bed.pass_time(59)
    assert client.is_open
    bed.pass_time(2)
    assert not client.is_open
    assert bed.refusals.counts["unread"] == 1


def test_a_flood_of_small_messages_is_kept_as_it_came(bed: Bed) -> None:
    flood = Plain(bed)
    bed.settle()
    (client,) = bed.port.clients
    flood.socket.settimeout(DEADLINE_S)
    flood.socket.sendall(NOOP * 10_000)

    while bed.endpoint.receive():
        assert len(client.messages) <= 16
        assert client.framing.num_held_bytes <= port_module.PIECE_BYTES

    bed.until(lambda: bed.endpoint.statistics().operations["noop"] == 10_000 or None)


def test_answers_that_were_held_wait_for_a_client_that_reads(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_module, "MAX_UNREAD_BYTES", 4000)
    worker = RawClient(bed)
    worker.register()
    document = list(range(100 * CHUNK))
    worker.store(document, "store")
    deaf = Plain(bed)
    deaf.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    bed.settle()
    client = bed.port.clients[-1]
    client.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    bed.lanes["host_to_device"].is_stopped = True  # where chunks are verified
    register = message_bytes([*map(msgspec.msgpack.encode, (99, 14, {**REGISTRATION, "instance_id": 2}))])
    ask = [
        message_bytes([*map(msgspec.msgpack.encode, (uid, 18, key(document, f"r{uid}"), 2))]) for uid in range(50)
    ]  # each is answered with 100 slots, 6 KB
    deaf.send(register + b"".join(ask))
    bed.until(lambda: bed.endpoint.statistics().num_held == 50 or None)

    bed.lanes["host_to_device"].is_stopped = False
    bed.settle()

    assert 4000 < len(client.unread) < 4000 + 10_000
    assert bed.endpoint.statistics().num_held > 30
    bed.pass_time(3600)
    assert client.is_open, "it may be copying: its first answers say where"
    assert bed.num_leases() >= 100
    deaf.socket.close()
    bed.settle()
    assert not client.is_open
    assert bed.endpoint.statistics().num_held == 0
    assert bed.num_leases() == 0


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" + bytes(9),
        GREETING.replace(b"NULL", b"PLAI"),
        GREETING.replace(b"\3\1", b"\2\1"),
        GREETING + NOOP,
        HANDSHAKE.replace(b"\6DEALER", b"\3REQ\0\0\0"),
        HANDSHAKE + b"\x08\1x",
        HANDSHAKE + b"\5\1x",
        HANDSHAKE + b"\4\6\5ERROR",
        HANDSHAKE + b"\2" + struct.pack(">Q", 1 << 30),
        HANDSHAKE + b"\2" + struct.pack(">Q", (1 << 64) - 1),
        HANDSHAKE + b"\1\1x" * 33,
    ],
)
def test_garbage_ends_its_connection_and_no_other(bed: Bed, client: RawClient, garbage: bytes) -> None:
    plain = Plain(bed, b"")
    with contextlib.suppress(ConnectionError):
        plain.send(garbage)

    assert plain.is_ended()
    assert bed.refusals.counts["garbage"] == 1
    assert client.ask("noop") == "OK"


def test_messages_that_never_end_have_a_bound(bed: Bed, client: RawClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_module, "MAX_HELD_BYTES", 8 << 20)
    begun = HANDSHAKE + b"\2" + struct.pack(">Q", MAX_MESSAGE_BYTES) + bytes(3 << 20)
    plains = [Plain(bed, begun) for _ in range(2)]
    held = sum(client.framing.num_held_bytes for client in bed.port.clients)
    assert 6 << 20 <= held < 7 << 20

    with contextlib.suppress(ConnectionError):
        Plain(bed, begun)
        bed.settle()

    assert bed.refusals.counts["held"] == 1
    assert bed.port.num_clients == 3
    for plain in plains:
        plain.socket.close()
    bed.settle()
    assert bed.port.num_clients == 1
    assert client.ask("noop") == "OK"


def test_memory_stays_flat_whatever_is_promised(bed: Bed) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plains = [Plain(bed, HANDSHAKE + b"\2" + struct.pack(">Q", MAX_MESSAGE_BYTES) + bytes(1000)) for _ in range(50)]
    bed.settle()
    assert bed.port.num_clients == len(plains)

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


def test_a_path_is_its_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "endpoint.sock"
    listener = listen(f"ipc://{path}")

    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(OSError, match="in use"):
        listen(f"ipc://{path}")
    listener.close()  # as when its process is killed: the path stays
    listen(f"ipc://{path}").close()


def test_a_path_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")

    with pytest.raises(OSError, match="in use"):
        listen(f"ipc://{tmp_path}/notes")

    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize("url", ["", "tcp://", "tcp://localhost", "ipc://", "udp://a:1", "grpc://a:1"])
def test_an_address_that_is_none_is_told(url: str) -> None:
    with pytest.raises(ValueError, match="give tcp://"):
        listen(url)


def test_another_user_is_not_let_in(tmp_path: Path) -> None:
    refusals = Refusals(FakeClock())
    with Port(
        [listen(f"ipc://{tmp_path}/s")], FakeClock(), refusals.refused, Zmtp, allowed_uids=[os.geteuid() + 1]
    ) as port:
        plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        plain.connect(f"{tmp_path}/s")
        assert list(port.receive()) == []

        plain.settimeout(DEADLINE_S)
        assert plain.recv(100) == b""
    assert refusals.counts["uid"] == 1


def test_too_many_clients_are_refused(bed: Bed, client: RawClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_module, "MAX_CLIENTS", 2)
    second = Plain(bed)
    bed.settle()
    third = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    third.connect(bed.url.removeprefix("ipc://"))
    bed.settle()

    third.settimeout(DEADLINE_S)
    assert third.recv(100) == b""
    assert second.socket.fileno() >= 0
    assert client.ask("noop") == "OK"


@given(st.binary(max_size=400), st.booleans(), st.integers(1, 50))
@settings(max_examples=500, deadline=None)
def test_no_bytes_do_more_than_end_a_connection(data: bytes, is_greeted: bool, piece: int) -> None:
    zmtp = Zmtp()
    data = HANDSHAKE + data if is_greeted else data
    with contextlib.suppress(Garbage):
        for start in range(0, len(data), piece):
            zmtp.receive(data[start : start + piece])
    assert zmtp.num_held_bytes <= len(data)


@given(st.lists(st.lists(st.binary(max_size=600), min_size=1, max_size=5), max_size=4), st.integers(1, 700))
@settings(max_examples=100, deadline=None)
def test_messages_come_out_as_they_went_in(messages: list[list[bytes]], piece: int) -> None:
    zmtp = Zmtp()
    data = HANDSHAKE + b"".join(map(message_bytes, messages))

    out = [message for start in range(0, len(data), piece) for message in zmtp.receive(data[start : start + piece])]

    assert out == messages
    assert zmtp.num_held_bytes == 0


def _random_value(rng: random.Random, depth: int = 0) -> object:
    kinds: list[Callable[[], object]] = [
        lambda: rng.choice([0, 1, -1, 255, 1 << 31, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1]),
        lambda: rng.choice(["", "m", "r", "\0", "x" * 5000, "é"]),
        lambda: rng.randbytes(rng.randrange(20)),
        lambda: rng.choice([None, True, False, 0.5, float("nan"), float("inf")]),
        lambda: key([rng.randrange(100) for _ in range(20)], rng.choice("rst"), worker=rng.choice([None, 0, 1])),
        lambda: key([1] * 20, "r", start=rng.randrange(-9, 99), end=rng.randrange(-9, 1 << 40)),
        lambda: [] if depth > 2 else [_random_value(rng, depth + 1) for _ in range(rng.randrange(4))],
        lambda: {} if depth > 2 else {"instance_id": _random_value(rng, depth + 1), "model_name": "m"},
    ]
    return rng.choice(kinds)()


@pytest.mark.parametrize("seed", range(4))
def test_every_request_is_answered_whatever_it_is(bed: Bed, client: RawClient, seed: int) -> None:
    rng = random.Random(seed)
    client.store(list(range(5 * CHUNK)), "r")
    asked = 0
    for uid in range(1000, 1400):
        frames = [msgspec.msgpack.encode(_random_value(rng)) for _ in range(rng.randrange(4))]
        if frames and rng.random() < 0.3:  # broken somewhere
            broken = bytearray(rng.choice(frames))
            broken[rng.randrange(len(broken))] = rng.randrange(256)
            frames[rng.randrange(len(frames))] = bytes(broken[: rng.randrange(len(broken) + 1)])
        op = rng.choice([rng.randrange(40), rng.randrange(8, 24), "x", rng.randrange(-3, 1 << 40)])
        client.socket.send_multipart([msgspec.msgpack.encode(uid), msgspec.msgpack.encode(op), *frames])
        asked += 1
        if rng.random() < 0.2:
            client.socket.send_multipart([rng.randbytes(rng.randrange(9)) for _ in range(rng.randrange(1, 5))])

    answered = set()
    while len(answered & set(range(1000, 1400))) < asked:
        bed.clock.now += 0.01
        frames = bed.until(lambda: client.socket.recv_multipart(zmq.NOBLOCK) if client.socket.poll(1) else None)
        answered.add(msgspec.msgpack.decode(frames[0]))
    client.ask("end_session", "r")
    bed.check()


def test_deep_nesting_is_refused(bed: Bed, client: RawClient) -> None:
    deep = b"\x91" * 1_000_000
    for op in range(8, 24):
        client.socket.send_multipart([msgspec.msgpack.encode(op), msgspec.msgpack.encode(op), deep])
        assert client.receive()[0] == op
    client.socket.send_multipart([deep, deep])
    client.socket.send_multipart([msgspec.msgpack.encode(99), deep])
    frames = bed.until(lambda: client.socket.recv_multipart(zmq.NOBLOCK) if client.socket.poll(1) else None)
    assert frames == [msgspec.msgpack.encode(99), deep, msgspec.msgpack.encode(None)]
