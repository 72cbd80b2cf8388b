"""A sidecar that a service manager starts: it listens before there is a process, and the next one takes over."""

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from raw_engine import CHUNK, NUM_CHUNKS, Engine
from service_manager import ServiceManager
from waiting import DEADLINE_S

from kvtier.transfer.segment import leftovers

pytestmark = pytest.mark.long


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    with ServiceManager(tmp_path) as made:
        yield made
    list(leftovers(Path("/dev/shm")))
    assert made.segments() == [], "shared memory is left"


def arguments(tmp_path: Path, host: str = "64MiB") -> list[str]:
    """Of a sidecar with sixteen extents."""
    (tmp_path / "sidecar.toml").write_text('extent = "4MiB"\n')
    return [
        "sidecar",
        *("--config", str(tmp_path / "sidecar.toml"), "--host", host, "--disk", f"{tmp_path / 'store'}:64MiB"),
        *("--listen", f"ipc://{tmp_path / 'endpoint.sock'}", "--chunk-tokens", str(CHUNK), "--http-port", "none"),
        *("--socket", str(tmp_path / "own.sock")),
    ]


def register_again(engine: Engine) -> Any:
    """What LMCache's client does once it has noticed; the segment that it is told."""
    assert [engine.ask("ping", 1) for _ in range(2)] == [False, True]
    return engine.register()


@pytest.mark.parametrize("how", [signal.SIGUSR1, signal.SIGKILL])
def test_an_engine_goes_on_with_the_next_process(tmp_path: Path, manager: ServiceManager, how: signal.Signals) -> None:
    manager.start(*arguments(tmp_path))
    engine = Engine(f"ipc://{tmp_path / 'endpoint.sock'}")
    engine.store("cold", fill=65)
    segment = Path("/dev/shm") / engine.pool["shm_name"].lstrip("/")
    inode = segment.stat().st_ino
    assert engine.lookup("warm") == NUM_CHUNKS
    engine.ask("end_session", "warm")
    assert sorted(manager.names()) == ["engine", "lmcache", "segment"]

    assert manager.end(how) == (0 if how is signal.SIGUSR1 else -how)
    assert (segment.stat().st_ino, sorted(manager.names())) == (inode, ["engine", "lmcache", "segment"])
    uid = engine.send("lookup", engine.key("meanwhile", worker=None), 1)  # nobody listens, but the socket is there
    manager.start(*arguments(tmp_path))

    assert engine.answer(uid) is None
    assert engine.ask("status", "meanwhile") == 0
    assert register_again(engine) == engine.pool, "another segment than it has mapped"
    assert segment.stat().st_ino == inode
    assert manager.names().count("segment") == manager.names().count("lmcache") == 1
    if how is signal.SIGUSR1:
        assert engine.lookup("from disk") == NUM_CHUNKS
        assert engine.retrieve("from disk") == [{65}, {66}, {67}, {68}]
    engine.salt = "another"
    engine.store("anew", fill=97)
    assert engine.lookup("again") == NUM_CHUNKS
    assert engine.retrieve("again") == [{97}, {98}, {99}, {100}]
    engine.close()
    assert manager.stop() == 0
    assert not segment.exists()


def test_where_an_engine_may_still_be_copying_the_next_process_puts_nothing(
    tmp_path: Path, manager: ServiceManager
) -> None:
    manager.start(*arguments(tmp_path))
    engine = Engine(f"ipc://{tmp_path / 'endpoint.sock'}")
    before = engine.ask("prepare_store", engine.key("begun"), 1)["context"]["slots"]
    assert len(before) == NUM_CHUNKS
    manager.end(signal.SIGKILL)

    manager.start(*arguments(tmp_path))

    assert register_again(engine) == engine.pool
    after = engine.ask("prepare_store", engine.key("again"), 1)["context"]["slots"]
    extents = [{slot["offset"] >> 22 for slot in slots} for slots in (before, after)]
    assert len(after) == NUM_CHUNKS
    assert not extents[0] & extents[1]
    assert "1 of 16 extents are not used, because engines may still copy" in manager.log.read_text()
    manager.end(signal.SIGUSR1)
    manager.start(*arguments(tmp_path))
    assert "2 of 16 extents are not used" in manager.log.read_text()
    engine.close()
    assert manager.stop() == 0


def test_a_segment_of_another_size_is_dropped_and_told(tmp_path: Path, manager: ServiceManager) -> None:
    manager.start(*arguments(tmp_path))
    (before,) = manager.segments()
    manager.end(signal.SIGUSR1)
    assert before.exists()

    manager.start(*arguments(tmp_path, host="32MiB"))

    engine = Engine(f"ipc://{tmp_path / 'endpoint.sock'}")
    assert not before.exists()
    assert engine.pool["pool_size"] == 32 << 20
    assert "is not taken over: its size differs from what host.capacity and extent" in manager.log.read_text()
    assert manager.names().count("segment") == 1
    engine.store("a", fill=1)
    engine.close()
    assert manager.stop() == 0


def test_a_stop_leaves_nothing_to_anybody(tmp_path: Path, manager: ServiceManager) -> None:
    manager.start(*arguments(tmp_path))
    assert len(manager.segments()) == 1

    assert manager.end(signal.SIGTERM) == 0

    assert (manager.names(), manager.segments()) == ([], [])


def test_sockets_of_a_socket_unit_are_served_and_requests_from_before_the_start_too(tmp_path: Path) -> None:
    endpoint, http = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    endpoint_port, http_port = endpoint.getsockname()[1], http.getsockname()[1]
    other = socket.create_server(("127.0.0.1", 0))
    with endpoint, http, other, ServiceManager(tmp_path, lmcache=endpoint, http=http, metrics=other) as manager:
        early = socket.create_connection(("127.0.0.1", http_port), DEADLINE_S)
        early.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        options = arguments(tmp_path)
        options[options.index("--listen") + 1] = f"tcp://127.0.0.1:{endpoint_port}"
        options[options.index("--http-port") + 1] = str(http_port)
        manager.start(*options)

        assert early.recv(100).startswith(b"HTTP/1.1 200")
        early.close()
        engine = Engine(f"tcp://127.0.0.1:{endpoint_port}")
        engine.store("a", fill=1)
        assert engine.lookup("b") == NUM_CHUNKS
        assert httpx.get(f"http://127.0.0.1:{http_port}/v1/kvtier/clients", timeout=DEADLINE_S).json()["clients"]
        assert sorted(manager.names()) == ["engine", "segment"], "sockets that the unit has are not kept twice"
        assert "the descriptor 'metrics' is not used, and was closed" in manager.log.read_text()
        engine.close()
        assert manager.stop() == 0


def test_a_socket_that_listens_elsewhere_is_not_served(tmp_path: Path) -> None:
    everywhere = socket.create_server(("127.0.0.2", 0))
    with everywhere, ServiceManager(tmp_path, lmcache=everywhere) as manager:
        manager.start(*arguments(tmp_path))

        assert "listens at ('127.0.0.2'" in manager.log.read_text()
        engine = Engine(f"ipc://{tmp_path / 'endpoint.sock'}")
        assert engine.lookup("a") == 0
        engine.close()
        assert manager.stop() == 0
