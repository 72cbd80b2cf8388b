"""An engine that attaches to a sidecar's process with LMCache's protocol, in raw ZeroMQ frames."""

import mmap
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq
from lmcache_bed import OPS, REGISTRATION
from lmcache_bed import key as key_of

CHUNK = 16
TOKENS = list(range(4 * CHUNK + 3))
NUM_CHUNKS = 4
FIRST = 120_000  # milliseconds that a first answer may take on a busy machine


class Engine:
    """What LMCache's client says, over a real socket."""

    def __init__(self, endpoint: str, answer_ms: int | None = None) -> None:
        """*answer_ms*: how long an answer is waited for; then TimeoutError."""
        self._answer_ms = answer_ms
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)  # a test that fails must not wait for a sidecar that has gone
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(endpoint)
        self._uid = 0
        self.salt = ""
        self.pool = self.register()

    def register(self) -> Any:
        return self.ask("register", {**REGISTRATION, "num_physical_slots": CHUNK})

    def ask(self, operation: str, *payload: Any) -> Any:
        return self.answer(self.send(operation, *payload))

    def send(self, operation: str, *payload: Any) -> int:
        """Ask; the number of the request."""
        self._uid += 1
        self._socket.send_multipart([msgspec.msgpack.encode(value) for value in (self._uid, OPS[operation], *payload)])
        return self._uid

    def answer(self, uid: int) -> Any:
        """The answer to this request."""
        while True:
            if self._answer_ms is not None and not self._socket.poll(self._answer_ms):
                raise TimeoutError(f"request {uid} was not answered")
            assert self._socket.poll(FIRST), f"request {uid} was not answered"
            found, _, result = map(msgspec.msgpack.decode, self._socket.recv_multipart())
            if found == uid:
                return result

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
        return key_of(TOKENS, request, end=NUM_CHUNKS * CHUNK, worker=worker, cache_salt=self.salt)

    def bytes_of(self, slot: Any) -> memoryview:
        with open(f"/dev/shm/{self.pool['shm_name'].lstrip('/')}", "r+b") as file:
            mapped = mmap.mmap(file.fileno(), self.pool["pool_size"])
        return memoryview(mapped)[slot["offset"] : slot["offset"] + slot["length"]]

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()
