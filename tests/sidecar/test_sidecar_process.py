"""`kvtier sidecar` as a process: engines attach, it ends when it is told to, and what it stored is there again."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from foreign.running import Sidecar
from raw_engine import CHUNK, NUM_CHUNKS, Engine
from waiting import stop

pytestmark = pytest.mark.long


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    options = ["--host", "64MiB", "--disk", f"{tmp_path / 'store'}:64MiB", "--chunk-tokens", str(CHUNK)]
    with Sidecar(f"ipc://{tmp_path / 'endpoint.sock'}", *options) as running:
        yield running


def test_chunks_outlive_the_engine_that_stored_them_and_the_sidecar_that_kept_them(sidecar: Sidecar) -> None:
    first = Engine(sidecar.endpoint)
    assert first.lookup("cold") == 0
    first.store("cold", fill=65)
    first.close()

    second = Engine(sidecar.endpoint)
    assert second.lookup("warm") == NUM_CHUNKS
    assert second.retrieve("warm") == [{65}, {66}, {67}, {68}]
    second.close()
    segment = sidecar.segment
    assert sidecar.stop() == 0
    assert not segment.exists(), "its shared memory is left"

    sidecar.start()
    third = Engine(sidecar.endpoint)
    assert third.lookup("from disk") == NUM_CHUNKS
    assert third.retrieve("from disk") == [{65}, {66}, {67}, {68}]
    third.close()


def test_what_a_killed_sidecar_left_in_shared_memory_goes_with_the_next_start(sidecar: Sidecar) -> None:
    engine = Engine(sidecar.endpoint)
    engine.store("a", fill=1)
    left = sidecar.segment
    sidecar.kill()
    assert left.exists()

    sidecar.start()

    assert not left.exists()
    again = Engine(sidecar.endpoint)
    assert again.lookup("a") in range(NUM_CHUNKS + 1)
    again.close()
    engine.close()


def test_a_second_signal_ends_it_at_once(sidecar: Sidecar) -> None:
    stop(sidecar.process.pid)  # so that both are there when it looks
    os.kill(sidecar.process.pid, signal.SIGTERM)
    os.kill(sidecar.process.pid, signal.SIGINT)
    os.kill(sidecar.process.pid, signal.SIGCONT)

    assert sidecar.process.wait(120) in (128 + signal.SIGTERM, 128 + signal.SIGINT)


def test_an_address_that_is_taken_is_one_line_with_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=r"sidecar: cannot listen at .* choose another --listen"):
            Sidecar(endpoint, "--host", "64MiB")
