"""`kvtier sidecar` as a process: engines attach, it ends when it is told to, and what it stored is there again."""

import mmap
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from foreign.running import Sidecar
from lmcache_bed import OPS, REGISTRATION
from lmcache_bed import key as key_of

pytestmark = pytest.mark.long

CHUNK = 16
TOKENS = list(range(4 * CHUNK + 3))
NUM_CHUNKS = 4
FIRST = 120_000  # milliseconds that a first answer may take on a busy machine


class Engine:
    """What LMCache's client says, over a real socket."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(endpoint)
        self._uid = 0
        self.pool = self.ask("register", {**REGISTRATION, "num_physical_slots": CHUNK})

    def ask(self, operation: str, *payload: Any) -> Any:
        self._uid += 1
        encoded = [msgspec.msgpack.encode(value) for value in (self._uid, OPS[operation], *payload)]
        self._socket.send_multipart(encoded)
        assert self._socket.poll(FIRST), f"{operation} was not answered"
        return msgspec.msgpack.decode(self._socket.recv_multipart()[2])

    def lookup(self, request: str) -> int:
        self.ask("lookup", self.key(request, worker=None), 1)
        while (found := self.ask("status", request)) is None:
            pass
        return int(found)

    def store(self, request: str, fill: int) -> None:
        context = self.ask("prepare_store", self.key(request), 1)["context"]
        for index, slot in zip(context["chunk_indices"], context["slots"], strict=True):
            self.bytes_of(slot)[:] = bytes([fill + index]) * slot["length"]
        assert self.ask("commit_store", self.key(request), 1, b"") is True

    def retrieve(self, request: str) -> Sequence[set[int]]:
        answer = self.ask("prepare_retrieve", self.key(request), 1)
        assert answer["success"]
        found = [set(self.bytes_of(slot)) for slot in answer["context"]["slots"]]
        assert self.ask("commit_retrieve", self.key(request), 1) is True
        return found

    def key(self, request: str, worker: int | None = 0) -> dict[str, Any]:
        return key_of(TOKENS, request, end=NUM_CHUNKS * CHUNK, worker=worker)

    def bytes_of(self, slot: Any) -> memoryview:
        with open(f"/dev/shm/{self.pool['shm_name'].lstrip('/')}", "r+b") as file:
            mapped = mmap.mmap(file.fileno(), self.pool["pool_size"])
        return memoryview(mapped)[slot["offset"] : slot["offset"] + slot["length"]]

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    options = ["--host", "64MiB", "--disk", f"{tmp_path / 'store'}:64MiB", "--chunk-tokens", str(CHUNK)]
    with Sidecar(f"ipc://{tmp_path / 'door.sock'}", *options) as running:
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
    os.kill(sidecar.process.pid, signal.SIGSTOP)  # so that both are there when it looks
    os.kill(sidecar.process.pid, signal.SIGTERM)
    os.kill(sidecar.process.pid, signal.SIGINT)
    os.kill(sidecar.process.pid, signal.SIGCONT)

    assert sidecar.process.wait(120) in (128 + signal.SIGTERM, 128 + signal.SIGINT)


def test_an_address_that_is_taken_is_one_line_with_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=r"sidecar: cannot listen at .* choose another --listen"):
            Sidecar(endpoint, "--host", "64MiB")
