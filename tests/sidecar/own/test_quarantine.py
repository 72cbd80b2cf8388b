"""Leases of engines whose session has ended: they last as long as a process of the engine may copy."""

import contextlib
import logging
import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import FakeClock
from engine_bed import Bed, Engine, Plain, engine_bed, names, publication
from waiting import DEADLINE_S, wait_for

from kvtier.engine.attached import wire
from kvtier.sidecar.endpoint import AttachedClient, Lease, LeaseUse
from kvtier.sidecar.http.views import leases_view, snapshot_of, stats_view
from kvtier.sidecar.own.endpoint import Mappers
from kvtier.sidecar.quarantine import PIECE_BYTES, Lifeline, Quarantine
from kvtier.sidecar.shares import Shares
from kvtier.store.memory_store import MemoryStore
from kvtier.transfer.transfer_engine import Route

A = b"a" * wire.ENGINE_BYTES
B = b"b" * wire.ENGINE_BYTES
NOTHING_SENSIBLE = wire.Abandon(0, wire.packed([1 << 30]))  # for which the sidecar ends the session


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    """Any engine may have all of host memory."""
    with engine_bed(tmp_path) as bed:
        bed.layouts.shares = Shares(lambda: 1 << 40, bed.layouts.ledger)
        yield bed


class Mapper(Plain):
    """A process that maps the segment for an engine, such as a worker of tensor parallelism."""

    def __init__(self, bed: Bed, engine: bytes) -> None:
        super().__init__(bed)
        self.send(wire.frame_of(wire.Map(wire.VERSION, "a worker", engine)))
        bed.settle()
        self.told = self.read()


def end_session(bed: Bed, engine: Engine) -> None:
    """Have the sidecar end the session of an engine that lives on, as it does with one that reads nothing."""
    engine.say(NOTHING_SENSIBLE)
    bed.settle()
    engine.hear()
    assert engine.is_ended
    assert engine not in bed.endpoint.clients()


def all_slots(bed: Bed, engine: Engine) -> set[int]:
    """Every slot that can be had, which are given back."""
    slots = engine.reserve(10_000)
    engine.say(wire.Abandon(0, wire.packed(slots)))
    bed.settle()
    return set(slots)


def test_slots_of_an_engine_that_may_still_write_are_given_to_nobody(bed: Bed, engine: Engine) -> None:
    stopped = Engine(bed, engine=A)
    slots = set(stopped.reserve(5))
    end_session(bed, stopped)

    assert not all_slots(bed, engine) & slots
    stopped.close()
    bed.settle()
    assert slots <= all_slots(bed, engine)


def test_slots_of_an_engine_that_may_still_read_keep_their_blocks(bed: Bed, engine: Engine) -> None:
    engine.store(1, 6)
    stopped = Engine(bed, engine=A)
    stopped.fetch(names(1, 6))
    stopped.next(wire.Fetched)
    end_session(bed, stopped)

    slots = {engine.host[0][name] for name in names(1, 6)}
    assert not all_slots(bed, engine) & slots
    assert engine.load(1, 6) == (list(range(6)), {}), "others read them"
    stopped.close()
    bed.settle()
    assert slots <= all_slots(bed, engine)


def test_what_a_stopped_engine_published_too_late_is_never_found(bed: Bed, engine: Engine) -> None:
    stopped = Engine(bed, engine=A)
    slots = stopped.reserve(3)
    late = wire.frame_of(NOTHING_SENSIBLE) + wire.frame_of(publication(stopped, names(7, 3), slots))
    stopped.send(late)
    bed.settle()
    engine.hear()

    assert not set(names(7, 3)) & set(engine.host[0])
    assert bed.num_leases() == 3
    stopped.close()
    bed.settle()
    assert bed.num_leases() == 0
    assert not set(names(7, 3)) & set(engine.host[0])


def test_blocks_that_were_still_to_come_are_not_kept(tmp_path: Path) -> None:
    with engine_bed(tmp_path, num_extents=2, store=MemoryStore(1 << 20)) as bed:
        bed.layouts.shares = Shares(lambda: 1 << 40, bed.layouts.ledger)
        other, stopped = Engine(bed), Engine(bed, engine=A)
        for document in (1, 2, 3, 4):
            assert other.store(document, 20) == 20
        bed.lanes[Route.DISK_TO_HOST].is_stopped = True
        stopped.fetch([*names(4, 2), *names(1, 3)])
        stopped.next(wire.Fetched)
        end_session(bed, stopped)
        bed.lanes[Route.DISK_TO_HOST].is_stopped = False
        bed.settle()

        (held,) = bed.sidecar.quarantined()
        assert [lease.num_chunks for lease in held.leases] == [2]
        assert bed.num_leases() == 2
        stopped.close()
        bed.settle()
        assert bed.num_leases() == 0
        other.close()


def test_a_block_that_came_and_was_not_told_of_is_not_kept(tmp_path: Path) -> None:
    with engine_bed(tmp_path, num_extents=2, store=MemoryStore(1 << 20)) as bed:
        bed.layouts.shares = Shares(lambda: 1 << 40, bed.layouts.ledger)
        other, stopped = Engine(bed), Engine(bed, engine=A)
        for document in (1, 2, 3, 4):
            assert other.store(document, 20) == 20
        stopped.fetch(names(1, 3))
        bed.endpoint.receive()
        for _ in range(3):  # the blocks land, and the endpoint has no turn to tell of them
            bed.layouts.poll()
            bed.lanes[Route.DISK_TO_HOST].work()
            bed.transfers.poll()
        bed.layouts.poll()
        assert bed.num_leases() == 3
        stopped.say(NOTHING_SENSIBLE)
        bed.endpoint.receive()

        assert bed.num_leases() == 0
        stopped.close()
        other.close()


def test_an_engine_that_is_killed_keeps_its_slots_while_a_worker_of_it_lives(bed: Bed, engine: Engine) -> None:
    killed = Engine(bed, engine=A)
    workers = [Mapper(bed, A), Mapper(bed, A)]
    others_worker = Mapper(bed, B)
    slots = set(killed.reserve(4))

    killed.close()
    bed.settle()
    assert not all_slots(bed, engine) & slots
    workers[0].close()
    bed.settle()
    assert not all_slots(bed, engine) & slots
    workers[1].close()
    bed.settle()

    assert slots <= all_slots(bed, engine)
    others_worker.close()


def test_a_worker_whose_connection_the_sidecar_has_ended_counts_until_it_closes_its_end(
    bed: Bed, engine: Engine
) -> None:
    killed, worker = Engine(bed, engine=A), Mapper(bed, A)
    slots = set(killed.reserve(4))
    worker.send(wire.frame_of(wire.Ping()))  # which no worker says
    bed.settle()
    worker.read()
    assert worker.is_ended
    killed.close()
    bed.settle()

    assert not all_slots(bed, engine) & slots
    worker.close()
    bed.settle()
    assert slots <= all_slots(bed, engine)


def test_a_worker_is_given_the_segment_and_told_nothing_more(bed: Bed, engine: Engine) -> None:
    worker = Mapper(bed, A)
    engine.store(1, 20)
    for _ in range(100):
        bed.pass_time(10)
        engine.hear()

    (welcome,) = worker.told
    assert isinstance(welcome, wire.Welcome)
    assert welcome.boot == engine.welcome.boot
    assert len(worker.files) == 1
    assert worker.read() == []
    assert not worker.is_ended
    assert len(bed.endpoint.clients()) == 1
    worker.close()


def test_an_engine_that_attaches_again_copies_nothing_of_what_it_had(bed: Bed, engine: Engine) -> None:
    before = Engine(bed, engine=A)
    connection = bed.port.clients[-1].connection
    worker = Mapper(bed, A)
    slots = set(before.reserve(4))
    end_session(bed, before)
    assert not all_slots(bed, engine) & slots

    other = Engine(bed, engine=B)
    assert not all_slots(bed, engine) & slots
    after = Engine(bed, engine=A)

    assert slots <= all_slots(bed, engine)
    assert connection.fileno() == -1, "it is closed"
    for each in (before, worker, other, after):
        each.close()


def test_an_engine_that_attaches_again_ends_its_session_before(bed: Bed, engine: Engine) -> None:
    before, worker = Engine(bed, engine=A), Mapper(bed, A)
    slots = set(before.reserve(4))

    after = Engine(bed, engine=A)
    before.hear()

    assert before.is_ended
    assert len(bed.endpoint.clients()) == 2
    assert slots <= all_slots(bed, engine)
    for each in (before, worker, after):
        each.close()


def test_the_operator_is_told_who_keeps_what(bed: Bed, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine.store(1, 4)
    stopped, worker = Engine(bed, engine=A), Mapper(bed, A)
    stopped.reserve(5, group=1)
    stopped.fetch(names(1, 4))
    stopped.next(wire.Fetched)
    (name,) = [client.name for client in bed.endpoint.clients() if client.leases]
    end_session(bed, stopped)
    bed.pass_time(4.9)
    assert "quarantine" not in caplog.text

    bed.pass_time(0.2)

    message = f"engine: 9 slots of {name} are in quarantine: its session has ended, but process {os.getpid()} may still"
    assert message in caplog.text
    assert caplog.text.count("in quarantine") == 1
    snapshot = snapshot_of(bed.sidecar)
    assert stats_view(snapshot)["quarantine"] == {"num_clients": 1, "num_chunks": 9}
    leases = [lease for lease in leases_view(snapshot) if lease["use"] == LeaseUse.QUARANTINED]
    assert {(lease["client"], lease["group"], lease["num_chunks"]) for lease in leases} == {(name, 0, 4), (name, 1, 5)}
    worker.close()
    stopped.close()
    bed.settle()
    assert f"engine: 9 slots of {name} left quarantine" in caplog.text
    assert stats_view(snapshot_of(bed.sidecar))["quarantine"] == {"num_clients": 0, "num_chunks": 0}


def test_more_than_so_many_sessions_in_quarantine_keep_engines_away(
    bed: Bed, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.sidecar.own.endpoint.MAX_CLIENTS", 1)
    stopped = Engine(bed, engine=A)
    stopped.reserve(2)
    end_session(bed, stopped)

    refused = Plain(bed)
    refused.send(wire.frame_of(wire.Map(wire.VERSION, "a worker", B)))
    bed.settle()

    (message,) = refused.read()
    assert isinstance(message, wire.Refused)
    assert "slots of 1 engines are in quarantine; end the processes that /v1/kvtier/leases names" in message.why
    stopped.close()
    bed.settle()
    Mapper(bed, B).close()


def test_all_leases_end_with_the_sidecar(tmp_path: Path) -> None:
    with engine_bed(tmp_path) as bed:
        engine, stopped = Engine(bed), Engine(bed, engine=A)
        stopped.reserve(2)
        engine.reserve(3)
        end_session(bed, stopped)
        bed.sidecar.flush(0.0)
        assert bed.num_leases() == 2
        bed.layouts.close()

        assert bed.num_leases() == 0
        engine.close()
        stopped.close()


@pytest.mark.parametrize(
    "says",
    [
        wire.Map(wire.VERSION, "a worker", b"short"),
        wire.Map(wire.VERSION - 1, "a worker", A),
    ],
)
def test_a_worker_that_cannot_be_is_refused(bed: Bed, engine: Engine, says: wire.Map) -> None:
    worker = Plain(bed)
    worker.send(wire.frame_of(says))
    bed.settle()
    worker.read()

    assert worker.is_ended
    assert engine.ask(wire.Ping(), wire.Pong)


FORKING = """
import os, sys
from kvtier.engine.attached import wire
from kvtier.engine.attached.session import open_session
shapes = [wire.GroupShape(16, False, 4096)]
session = open_session(sys.argv[1], wire.Hello(wire.VERSION, "a test", "m", b"n" * 16, shapes))
session.send(wire.Reserve(0, 4))
# Both write, the child once it has closed what was its parent's; each in one piece, as the pipe is one.
os.write(1, b"%d\\n" % os.fork())
sys.stdin.read()
"""


def test_a_child_that_is_forked_keeps_nothing_of_its_parents_session(bed: Bed) -> None:
    command = [sys.executable, "-c", FORKING, bed.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        while not select.select([parent.stdout], [], [], 0.01)[0]:
            bed.turn()
        child = max(int(parent.stdout.readline()) for _ in range(2))
        bed.settle()
        assert bed.num_leases() == 4

        parent.kill()
        parent.wait(DEADLINE_S)
        bed.settle()

        assert bed.num_leases() == 0
        assert bed.endpoint.clients() == []
        os.kill(child, 0)  # it lives, until its input ends


def test_a_lifeline_is_cut_when_the_last_copy_of_the_other_end_is_closed() -> None:
    own, other = socket.socketpair()
    copy = other.dup()
    lifeline = Lifeline.after_farewell(own)

    assert other.recv(1) == b"", "the other side is told"
    other.close()
    assert not lifeline.is_cut
    copy.close()

    assert lifeline.is_cut
    assert own.fileno() == -1


def test_a_lifeline_is_cut_by_a_reset() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    other = socket.create_connection(listener.getsockname())
    own, _ = listener.accept()
    lifeline = Lifeline(own)
    assert not lifeline.is_cut

    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    other.close()  # with a reset
    assert select.select([own], [], [], DEADLINE_S)[0]

    assert lifeline.is_cut, "at the first look"
    assert own.fileno() == -1
    listener.close()


@pytest.mark.parametrize(("num_slots", "holders"), [(0, ["process 7"]), (3, [])], ids=["no leases", "no process"])
def test_where_nothing_can_be_copied_leases_end_at_once(num_slots: int, holders: list[str]) -> None:
    quarantine = Quarantine(FakeClock())
    leases = tuple(Lease(LeaseUse.READ, 0, num_slots, 0.0) for _ in range(num_slots))
    ended: list[str] = []

    quarantine.hold("engine", AttachedClient("a", 0.0, None, leases), lambda: holders, lambda: ended.append("a"))

    assert ended == ["a"]
    assert len(quarantine) == 0


def test_a_session_is_in_quarantine_since_its_end() -> None:
    clock = FakeClock()
    quarantine, clock.now = Quarantine(clock), 100.0
    client = AttachedClient("a", 3.0, None, (Lease(LeaseUse.READ, 0, 2, 5.0),))

    quarantine.hold("engine", client, lambda: ["process 7"], lambda: None)

    (held,) = quarantine.clients()
    assert held == AttachedClient("a", 100.0, None, (Lease(LeaseUse.QUARANTINED, 0, 2, 5.0),))
    quarantine.close()


class Connected:
    """A client whose other end this process has."""

    def __init__(self) -> None:
        self.connection, self.other = socket.socketpair()


def test_mappers_are_their_engines_alone_and_gone_when_they_have_closed_their_end() -> None:
    mappers = Mappers()
    clients = [Connected() for _ in range(4)]
    for client, engine in zip(clients, (A, A, B, B), strict=True):
        mappers.add(client, engine)  # type: ignore[arg-type]  # as much of a client as is looked at
    for client in clients[1:3]:
        mappers.on_gone(client)  # type: ignore[arg-type]

    assert [len(mappers.names(engine)) for engine in (A, B)] == [2, 2]
    for client in clients[:3]:
        client.other.close()
    assert [len(mappers.names(engine)) for engine in (A, B)] == [1, 1]

    mappers.close()
    for client in clients:
        client.connection.close()
        client.other.close()


def test_a_lifeline_is_cut_behind_what_was_sent() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    other = socket.create_connection(listener.getsockname())
    own, _ = listener.accept()
    other.setblocking(False)
    lifeline = Lifeline.after_farewell(own)
    with contextlib.suppress(BlockingIOError):
        while True:
            other.send(bytes(PIECE_BYTES))
    other.close()

    wait_for(lambda: lifeline.is_cut)

    listener.close()
