"""A worker's mapping of a sidecar's memory, with real sidecars that come and go at one socket."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from engine_bed import GROUPS, hello
from sidecars import small_config
from waiting import DEADLINE_S, join, wait_for

from kvtier.connectors.vllm_connector.mapped_segment import MappedSegment
from kvtier.connectors.vllm_connector.step_work import Segment
from kvtier.engine.attached import wire
from kvtier.engine.attached.session import open_session
from kvtier.sidecar.build_sidecar import build_sidecar
from kvtier.sidecar.endpoints import endpoints_of
from kvtier.sidecar.sidecar import Sidecar

HELLO = hello()


@contextmanager
def running(path: str) -> Iterator[Sidecar]:
    config = small_config(socket={"path": path}, http={"port": "none"}, lmcache={"listen": f"ipc://{path}-lmcache"})
    sidecar = build_sidecar(config, endpoints_of(config, {}))
    thread = threading.Thread(target=sidecar.run)
    thread.start()
    try:
        yield sidecar
    finally:
        sidecar.stop()
        join(thread)
        sidecar.close()


def boot_at(path: str) -> bytes:
    session = open_session(path, HELLO)
    session.close()
    return session.welcome.boot


@pytest.fixture
def segment() -> Iterator[MappedSegment]:
    segment = MappedSegment([group.block_bytes for group in GROUPS])
    yield segment
    segment.close()


def test_the_memory_of_the_next_sidecar_is_mapped_before_a_step_wants_it(
    segment: MappedSegment, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")
    with running(path) as sidecar:
        first = boot_at(path)
        segment.want(Segment(first, path, HELLO))
        wait_for(lambda: segment.is_ready(first))
        segment.want(Segment(first, path, HELLO))
        sidecar.layouts.segment.memory[:5] = 7
    with running(path):
        second = boot_at(path)
        wait_for(lambda: segment.is_ready(second))

        assert segment.boot == first, "the scheduler's half may still lease slots of the first"
        assert bytes(segment.slots(0)[0, :5]) == b"\7" * 5
        segment.want(Segment(second, path, HELLO))
        assert segment.boot == second
        assert bytes(segment.slots(0)[0, :5]) == bytes(5)


def test_of_two_sidecars_that_came_meanwhile_the_last_one_is_mapped(segment: MappedSegment, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    boots = []
    for _ in range(3):
        with running(path):
            boots.append(boot_at(path))
            segment.want(Segment(boots[0], path, HELLO))
            wait_for(lambda: segment.is_ready(boots[-1]))

    segment.want(Segment(boots[1], path, HELLO))
    assert segment.boot == boots[0]
    segment.want(Segment(boots[2], path, HELLO))
    assert segment.boot == boots[2]


def test_a_worker_keeps_its_connection_while_it_maps_the_memory(segment: MappedSegment, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with ExitStack() as stack:
        sidecar = stack.enter_context(running(path))
        engine = open_session(path, HELLO)
        engine.send(wire.Reserve(0, 5))
        segment.want(Segment(engine.welcome.boot, path, HELLO))
        wait_for(lambda: segment.is_ready(engine.welcome.boot))
        segment.want(Segment(engine.welcome.boot, path, HELLO))
        wait_for(lambda: sidecar.ask(lambda: any(client.leases for client in sidecar.clients())).result(DEADLINE_S))

        engine.close()  # as when the scheduler's process is killed
        wait_for(lambda: not sidecar.ask(sidecar.clients).result(DEADLINE_S))
        (held,) = sidecar.ask(sidecar.quarantined).result(DEADLINE_S)
        assert [lease.num_chunks for lease in held.leases] == [5]
        segment.close()

        wait_for(lambda: not sidecar.ask(sidecar.quarantined).result(DEADLINE_S))
