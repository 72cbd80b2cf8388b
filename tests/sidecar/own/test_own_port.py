"""The own endpoint's socket: clients that behave badly, or are killed; memory that stays flat."""

import os
import random
import resource
import select
import selectors
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from engine_bed import Bed, Engine, Plain, engine_bed, hello, in_books, names
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import DEADLINE_S

from kvtier.engine.attached import wire
from kvtier.sidecar.config import SocketConfig
from kvtier.sidecar.endpoints import engine_endpoint, socket_path
from kvtier.sidecar.port import MAX_MESSAGES
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.naming.block_hash import BlockName

HELLO = wire.frame_of(hello(engine=bytes(16)))  # the same each time, as it is in names of tests


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


@pytest.mark.parametrize(
    "garbage",
    [
        framed(b""),
        framed(b"\xff"),
        framed(b"\x91\xa5Hello"),
        framed(b"\x91\xa4Evil"),
        framed(b"\xa4Ping"),
        framed(msgspec.msgpack.encode({"type": "Ping"})),
        framed(b"\x91" * 100_000),  # nested deeper than a decoder goes
        HELLO + framed(b"\x91\xa7Welcome"),
        HELLO + framed(msgspec.msgpack.encode(["Reserve", "0", 1])),
        HELLO + framed(msgspec.msgpack.encode(["Reserve", 0, 1 << 63])),
        HELLO + framed(msgspec.msgpack.encode(["Release", 0, 7])),
        (1 << 30).to_bytes(4, "little"),
        HELLO + (1 << 30).to_bytes(4, "little"),
        HELLO + b"\xff\xff\xff\xff",
    ],
)
def test_garbage_ends_its_connection_and_no_other(bed: Bed, engine: Engine, garbage: bytes) -> None:
    plain = Plain(bed)
    plain.send(garbage)
    bed.settle()
    plain.read()

    assert plain.is_ended
    assert sum(bed.endpoint.counts().refused.values()) == 1
    assert engine.ask(wire.Ping(), wire.Pong)


def test_a_message_may_come_byte_by_byte(bed: Bed) -> None:
    plain = Plain(bed)
    for byte in HELLO + wire.frame_of(wire.Ping()):
        plain.send(bytes((byte,)))
        bed.turn()

    assert wire.Pong() in plain.read()


def test_engines_have_turns(bed: Bed, engine: Engine) -> None:
    flood = Engine(bed)
    flood.say(*[wire.Ping()] * 2000)

    engine.say(wire.Ping())
    bed.turn()
    engine.hear()

    assert wire.Pong() in engine.told
    assert bed.endpoint.counts().operations["ping"] <= MAX_MESSAGES + 1
    flood.close()


def test_memory_stays_flat_whatever_is_promised(bed: Bed, engine: Engine) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plains = [Plain(bed) for _ in range(50)]
    for plain in plains:
        plain.send(wire.frame_of(hello()) + (wire.MAX_FRAME_BYTES).to_bytes(4, "little") + bytes(1000))
    bed.settle()

    assert bed.port.num_clients == len(plains) + 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB
    for plain in plains:
        plain.close()


def test_a_client_waits_while_no_descriptor_is_left(bed: Bed, engine: Engine) -> None:
    waiting = Plain(bed)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        bed.settle()
        assert bed.endpoint.counts().refused == {"descriptors": 1}
        assert not select.select([bed.endpoint.file], [], [], 0)[0], "the sidecar's loop would not rest"
        assert engine.ask(wire.Ping(), wire.Pong)  # others are served
        bed.pass_time(1.1)
        assert bed.endpoint.counts().refused == {"descriptors": 2}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    waiting.send(wire.frame_of(hello()))
    bed.pass_time(1.1)

    assert isinstance(waiting.read()[0], wire.Welcome)
    waiting.close()


KILLED = """
import mmap, socket, sys
from kvtier.engine.attached import wire
path, num_bytes = sys.argv[1], int(sys.argv[2])
connection = socket.socket(socket.AF_UNIX)
connection.connect(path)
connection.sendall(sys.stdin.buffer.read())
data, files, _, _ = socket.recv_fds(connection, 1 << 20, 1)
frames = wire.Frames()
messages = [wire.message_of_sidecar(payload) for payload in frames.receive(data)]
while not any(isinstance(message, wire.Fetched) for message in messages):
    messages += [wire.message_of_sidecar(payload) for payload in frames.receive(connection.recv(1 << 20))]
reserved = next(message for message in messages if isinstance(message, wire.Reserved))
memory = mmap.mmap(files[0], num_bytes)
print("writing", flush=True)
while True:
    for slot in wire.numbers_in(reserved.slots, 1 << 31).tolist():
        memory[slot * 4096 : (slot + 1) * 4096] = bytes(4096)
"""


@pytest.mark.long
def test_an_engine_that_is_killed_while_it_writes_leaves_nothing(bed: Bed, engine: Engine) -> None:
    engine.store(1, 10)
    chains, parents = names(1, 10), [None, *names(1, 9)]
    says = b"".join(
        map(
            wire.frame_of,
            (
                hello(),
                wire.Reserve(0, 20),
                wire.Reserve(1, 5),
                wire.Fetch(1, 0, wire.joined(chains), wire.starts_of(chains, parents), b"", False),
            ),
        )
    )
    for number in range(20):
        command = [sys.executable, "-c", KILLED, bed.path, str(bed.segment.num_bytes)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(says)
            process.stdin.close()
            turn_until_readable(bed, process.stdout.fileno())
            assert process.stdout.readline() == b"writing\n"
            assert bed.num_leases() == 35
            process.kill()
            process.wait(DEADLINE_S)
        bed.turn(2)

        assert bed.num_leases() == 0
        assert len(bed.endpoint.clients()) == 1
        bed.check()
        assert engine.store(10 + number, 3) == 3
    assert engine.load(1, 10) == (list(range(10)), {})


def turn_until_readable(bed: Bed, file: int) -> None:
    """The other side is a process of its own: the bed turns when that has sent something."""
    with selectors.DefaultSelector() as selector:
        selector.register(file, selectors.EVENT_READ)
        selector.register(bed.endpoint.file, selectors.EVENT_READ)
        while True:
            ready = selector.select(DEADLINE_S)
            assert ready, "nothing has come"
            if file in {key.fd for key, _ in ready}:
                return
            bed.turn()


# What a configuration asks for.


def test_the_socket_is_this_users_alone_unless_others_are_let_in(bed: Bed, tmp_path: Path) -> None:
    own, all_users = str(tmp_path / "own.sock"), str(tmp_path / "all.sock")
    endpoints = [engine_endpoint(own, [], bed.layouts), engine_endpoint(all_users, [os.geteuid() + 1], bed.layouts)]

    assert Path(own).stat().st_mode & 0o777 == 0o600
    assert Path(all_users).stat().st_mode & 0o777 == 0o666
    for endpoint in endpoints:
        endpoint.close()


def test_a_socket_that_was_left_is_taken_over_and_one_in_use_is_an_error(bed: Bed, tmp_path: Path) -> None:
    path = str(tmp_path / "engines")
    first = engine_endpoint(path, [], bed.layouts)
    with pytest.raises(OSError, match=r"another sidecar listens there.*choose another --socket"):
        engine_endpoint(path, [], bed.layouts)

    first.close()

    engine_endpoint(path, [], bed.layouts).close()


def test_where_the_socket_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    assert socket_path(SocketConfig()) == f"{tmp_path}/kvtier.sock"
    assert socket_path(SocketConfig(path="/a/b")) == "/a/b"
    assert socket_path(SocketConfig(path="none")) is None
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nowhere"))
    assert socket_path(SocketConfig()) in ("/run/kvtier.sock", None)


# Whatever comes.


def recorded() -> list[bytes]:
    """A session as its frames."""
    blocks = names(1, 4)
    fetch = wire.Fetch(1, 0, wire.joined(blocks), [wire.Start(0, None), wire.Start(2, blocks[0])], b"", False)
    return [
        wire.frame_of(message)
        for message in (
            hello(),
            wire.Reserve(0, 4),
            wire.Reserve(1, 3),
            wire.Publish(
                0, wire.packed([3, 2, 1, 0]), wire.joined(blocks), [wire.Chain(0, 4, None)], b"d" * 64, b"\0" * 32
            ),
            fetch,
            msgspec.structs.replace(fetch, number=2, group=1, is_for_later=True),
            wire.Refresh(0, wire.joined(blocks), b"\0\1\0\1"),
            wire.Forget(0, wire.joined(blocks[:1])),
            wire.Abandon(1, wire.packed([1])),
            wire.Release(1, wire.packed([3, 1])),
            wire.Clear(),
            wire.Ping(),
        )
    ]


def assert_unharmed(bed: Bed, engine: Engine) -> None:
    """The books agree, and the other engine has what it asks for."""
    bed.settle()
    bed.check()
    engine.hear()
    assert (engine.host, engine.disk) == in_books(bed.tiers())
    engine.store(99, 3)
    assert engine.load(99, 3)[0] == [0, 1, 2]
    assert engine.ask(wire.Ping(), wire.Pong)


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=300), is_attached=st.booleans(), is_framed=st.booleans())
def test_random_bytes_do_no_harm(data: bytes, is_attached: bool, is_framed: bool) -> None:
    with TemporaryDirectory() as folder, engine_bed(Path(folder), num_extents=2) as bed:
        engine, plain = Engine(bed), Plain(bed)
        plain.send((HELLO if is_attached else b"") + (framed(data) if is_framed else data))

        assert_unharmed(bed, engine)
        plain.close()
        bed.settle()
        assert bed.num_leases() == 0
        engine.close()


@pytest.mark.parametrize("seed", range(8))
def test_sessions_with_flipped_bits_do_no_harm(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with engine_bed(tmp_path, num_extents=8, store=MemoryStore(1 << 20)) as bed:
        engine = Engine(bed)
        for _ in range(30):
            plain = Plain(bed)
            frames = recorded()
            for _ in range(rng.choice([1, 1, 2, 5])):
                place = rng.randrange(len(frames))
                flipped = bytearray(frames[place])
                flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
                frames[place] = bytes(flipped)
            if rng.random() < 0.3:
                rng.shuffle(frames)
            plain.send(b"".join(frames))
            assert_unharmed(bed, engine)
            plain.read()
            plain.close()
        bed.settle()
        assert bed.num_leases() == 0
        engine.close()


class Attacker:
    """Says what can be decoded, mostly of values that an engine may say."""

    def __init__(self, bed: Bed, rng: random.Random) -> None:
        self.engine = Engine(bed)
        self._rng = rng
        self._slots = [self.engine.reserve(20, 0), self.engine.reserve(10, 1)]
        self._says: list[Callable[[int], wire.FromEngine]] = [
            self._fetch,
            self._fetch,
            self._release,
            self._publish,
            self._publish,
            lambda group: wire.Reserve(group, self._odd(self._number(), [-1, 1 << 17, (1 << 17) + 1, 1 << 62])),
            lambda group: wire.Abandon(group, self._some_slots(group)),
            lambda group: wire.Refresh(group, (which := self._names()), bytes(self._odd(len(which) // 32, [0, 1]))),
            lambda group: wire.Forget(group, self._names()),
            lambda group: rng.choice([wire.Clear(), wire.Ping(), wire.Ping(), wire.Ping()]),
        ]

    def say(self) -> None:
        """Something."""
        self.engine.say(self._rng.choice(self._says)(self._odd(self._rng.randrange(2), [2, -1, 1 << 40])))

    def _odd(self, usual: Any, others: list[Any]) -> Any:
        """Now and then one of the others."""
        return self._rng.choice(others) if self._rng.random() < 0.03 else usual

    def _number(self) -> int:
        return self._rng.choice([0, 1, 2, 3, 12])

    def _names(self) -> bytes:
        document = names(self._rng.randrange(4), 40)
        drawn = self._rng.sample(document, self._rng.choice([0, 1, 2, 3, 12, 40]))
        drawn = self._odd(drawn, [drawn + drawn, document[:1] * 40])
        return wire.joined(drawn)[self._odd(0, [1]) :]

    def _some_slots(self, group: int, limit: int = 5) -> bytes:
        own = self._slots[group & 1]
        num = min(limit, len(own))
        drawn, self._slots[group & 1] = own[:num], own[num:]
        return wire.packed(self._odd(drawn, [[1], [0, 0], [-1], [1 << 30], drawn + drawn]))

    def _publish(self, group: int) -> wire.Publish:
        blocks = self._rng.sample(names(self._rng.randrange(4), 40), 5)
        blocks = self._rng.choice([blocks, blocks, [blocks[0]] * 5])
        which = self._some_slots(group)
        num = self._odd(len(which) // 4, [0, 6])
        cut = self._rng.randrange(num + 1)
        parents = [None, None, blocks[0], names(1, 1)[0], BlockName(bytes(32))]
        chains = [wire.Chain(0, cut, self._rng.choice(parents)), wire.Chain(cut, num, self._rng.choice(parents))]
        chains = [each for each in chains if each.start < each.end]
        chains = self._odd(chains, [[], chains[::-1], [wire.Chain(0, 1 << 40, b"")], [wire.Chain(-5, 3, None)]])
        return wire.Publish(
            group, which, wire.joined(blocks[:num]), chains, bytes(16 * num), self._rng.randbytes(8 * num)
        )

    def _fetch(self, group: int) -> wire.Fetch:
        starts = self._odd([], [[wire.Start(0, bytes(32))], [wire.Start(99, None)], [wire.Start(-1, b"x")]])
        tenant = self._odd(b"", [bytes(8), bytes(7)])
        number = self._rng.randrange(1 << 20)
        return wire.Fetch(self._odd(number, [1]), group, self._names(), starts, tenant, self._rng.random() < 0.4)

    def _release(self, _: int) -> wire.Release:
        places = self._rng.sample(range(40), self._rng.randrange(12))
        return wire.Release(1, wire.packed(self._odd(places, [[-1], [0, 0], [1 << 30]])))


@pytest.mark.parametrize("seed", range(8))
def test_hostile_values_do_no_harm(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with engine_bed(tmp_path, num_extents=2, store=MemoryStore(1 << 20) if seed % 2 else None) as bed:
        engine = Engine(bed)
        num_malformed, num_sent = 0, 0
        for _ in range(25):
            attacker = Attacker(bed, rng)
            for _ in range(30):
                attacker.say()
                bed.turn()
                attacker.engine.hear()
                bed.check()
                num_sent += 1
                if attacker.engine.is_ended:
                    num_malformed += 1
                    break
            attacker.engine.close()
            assert_unharmed(bed, engine)
        assert bed.num_leases() == 0
        assert num_malformed > 3
        assert num_sent > 5 * num_malformed
        engine.close()
