"""Many of LMCache's own clients, each a process of its own, told what to do in lines of JSON: lmcache_clients.py URL.

Runs in the environment that install.py makes; knows nothing of kvtier. Its libraries are imported once, then clients
are forked: one takes a tenth of a second. Each line in is a JSON list, "start", "tell", "answer" or "kill" and a
client's number; each line out that begins with `answer` is the answer.
"""

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

for name, value in {"LMCACHE_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}.items():
    os.environ.setdefault(name, value)

import torch  # noqa: E402  # they read the environment
import zmq  # noqa: E402
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey  # noqa: E402
from lmcache.v1.multiprocess.transfer_context.worker_transfer import EngineDrivenTransferContext  # noqa: E402
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory  # noqa: E402

CHUNK = 256
NUM_LAYERS, NUM_HEADS, BLOCK, WIDTH = 4, 2, 128, 128  # in float32: 1 MiB a chunk
BLOCKS_IN_CHUNK = CHUNK // BLOCK
DOCUMENT_CHUNKS = 16
CHUNK_BYTES = 2 * NUM_LAYERS * NUM_HEADS * BLOCK * WIDTH * 4
NUM_READ_AGAIN = 4  # documents, the last ones
TIMEOUT_S = 60.0

torch.set_num_threads(1)


class Client:
    """One engine's worker and scheduler, with documents that it has stored."""

    def __init__(self, url: str, number: int, pipe: Connection) -> None:
        self._number = number
        self._pipe = pipe
        self._rng = random.Random(number)
        self._client = RequestClientFactory.create(url, context=zmq.Context())
        self._client.get_chunk_size().result(timeout=TIMEOUT_S)
        self._blocks = list(range(DOCUMENT_CHUNKS * BLOCKS_IN_CHUNK))
        shape = (len(self._blocks) + 2, NUM_HEADS, BLOCK, WIDTH)
        self._kv = {f"layer {i}": torch.full(shape, float(number + 1)) for i in range(NUM_LAYERS)}
        self._context = EngineDrivenTransferContext(number + 1, self._client)
        self._context.register(self._kv, "crowd", 1, BLOCKS_IN_CHUNK, TIMEOUT_S)
        self._num_documents = 0
        self._num_requests = 0

    def mixed(self, seconds: float, share: float = 1.0) -> dict:
        """Store new documents and load earlier ones, in turns at random, for so long; with pauses, so that this takes
        *share* of the time."""
        began_at = time.monotonic()
        return self._mixed(lambda: time.monotonic() - began_at >= seconds, share)

    def mixed_until_told(self) -> dict:
        """The same until another line comes for this client, which is not answered."""
        seen = self._mixed(self._pipe.poll)
        self._pipe.recv()
        return seen

    def _mixed(self, is_over: Callable[[], bool], share: float = 1.0) -> dict:
        seen = {"num_bytes": 0, "lookup_s": [], "num_missed": 0, "num_wrong": 0, "num_refused": 0, "seconds": 0.0}
        began_at = time.monotonic()
        while not is_over():
            turn_at = time.monotonic()
            if self._num_documents < NUM_READ_AGAIN or self._rng.random() < 0.5:
                seen["num_refused"] += not self.store()
            else:
                self._read(self._num_documents - 1 - self._rng.randrange(NUM_READ_AGAIN), seen)
            seen["num_bytes"] += DOCUMENT_CHUNKS * CHUNK_BYTES
            time.sleep((time.monotonic() - turn_at) * (1 / share - 1))
        return {**seen, "seconds": time.monotonic() - began_at}

    def store(self) -> bool:
        """Store one more document."""
        document = self._num_documents
        self._num_documents += 1
        self._mark(document)
        tokens, request = tokens_of(self._number, document), self._request()
        self._timed_lookup(tokens, request)
        key = self._key(tokens, request, 0)
        done = self._context.submit_store(request, key, self._kv, [self._blocks], None, BLOCKS_IN_CHUNK)
        is_stored = bool(done.result(timeout=TIMEOUT_S))
        self._client.end_session(request).result(timeout=TIMEOUT_S)
        return is_stored

    def stop_in_store(self) -> int:
        """Reserve slots, write to half of them, and say so; how many chunks were reserved."""
        self._num_documents += 1
        key = self._key(tokens_of(self._number, self._num_documents - 1), self._request(), 0)
        slots, _ = self._context.engine_driven_context.prepare_store(key, self._number + 1)
        for slot in slots[: len(slots) // 2]:
            slot.fill_(-1.0)
        return len(slots)

    def stop_in_load(self) -> int:
        """Store a document, look it up, be told where it is, read half of it, and say so; how many chunks that were."""
        self.store()
        tokens, request = tokens_of(self._number, self._num_documents - 1), self._request()
        self._timed_lookup(tokens, request)
        slots = self._context.engine_driven_context.prepare_retrieve(self._key(tokens, request, 0), self._number + 1)
        for slot in slots[: len(slots) // 2]:
            slot.sum()
        return len(slots)

    def go_on_forever(self) -> None:
        """Store and load until this process is killed."""
        while True:
            self.mixed(TIMEOUT_S)

    def read_all(self) -> dict:
        """Load the last documents, each compared with what was stored."""
        seen = {"num_bytes": 0, "lookup_s": [], "num_missed": 0, "num_wrong": 0}
        for document in range(max(0, self._num_documents - NUM_READ_AGAIN), self._num_documents):
            self._read(document, seen)
        return seen

    def find(self, number: int, document: int) -> int:
        """How many chunks of another client's document are there."""
        request = self._request()
        hits, _ = self._timed_lookup(tokens_of(number, document), request)
        self._client.end_session(request).result(timeout=TIMEOUT_S)
        return hits

    def _read(self, document: int, seen: dict) -> None:
        tokens, request = tokens_of(self._number, document), self._request()
        hits, took = self._timed_lookup(tokens, request)
        seen["lookup_s"].append(took)
        if hits == DOCUMENT_CHUNKS:
            self._mark(-1)
            key = self._key(tokens, request, 0)
            done = self._context.submit_retrieve(request, key, self._kv, [self._blocks], None, BLOCKS_IN_CHUNK)
            is_there = bool(done.result(timeout=TIMEOUT_S))
            seen["num_wrong"] += not (is_there and self._is_marked(document))
        else:
            seen["num_missed"] += 1
        self._client.end_session(request).result(timeout=TIMEOUT_S)

    def _mark(self, document: int) -> None:
        """Give each block of the engine's KV a number of its own, of the document."""
        for layer in self._kv.values():
            for block in self._blocks:
                layer[block, 0, 0, 0] = 1000 * document + block
                layer[block, -1, -1, -1] = 1000 * document + block

    def _is_marked(self, document: int) -> bool:
        whole = self._number + 1.0
        return all(
            layer[block, 0, 0, 0] == layer[block, -1, -1, -1] == 1000 * document + block
            and layer[block, 0, 1, 0] == layer[block, -1, -2, 1] == whole
            for layer in self._kv.values()
            for block in self._blocks
        )

    def _request(self) -> str:
        self._num_requests += 1
        return f"{self._number} {self._num_requests}"

    def _key(self, tokens: list[int], request: str, worker: int | None) -> IPCCacheServerKey:
        return IPCCacheServerKey.from_token_ids("crowd", 1, worker, tokens, 0, len(tokens), request)

    def _timed_lookup(self, tokens: list[int], request: str) -> tuple[int, float]:
        began_at = time.perf_counter()
        self._client.lookup(self._key(tokens, request, None), 1).result(timeout=TIMEOUT_S)
        while (found := self._client.query_prefetch_status(request).result(timeout=TIMEOUT_S)) is None:
            pass
        return found, time.perf_counter() - began_at


def tokens_of(number: int, document: int) -> list[int]:
    """A document of a client's, that no other has."""
    return [number % 50_000, document % 50_000, *range(DOCUMENT_CHUNKS * CHUNK - 2)]


def live(url: str, number: int, pipe: Connection) -> None:
    """What a client's process does."""
    client = Client(url, number, pipe)
    pipe.send({"ready": True})
    while True:
        name, *arguments = pipe.recv()
        pipe.send(getattr(client, name)(*arguments))


def main(url: str) -> None:
    """Answer until standard input ends, then kill all clients."""
    pids: dict[int, int] = {}
    pipes: dict[int, Connection] = {}
    for line in sys.stdin:
        verb, number, *arguments = json.loads(line)
        answer: object = None
        if verb == "start":
            pipes[number], theirs = Pipe()
            pids[number] = os.fork()
            if not pids[number]:
                try:
                    live(url, number, theirs)
                finally:
                    os._exit(1)
            theirs.close()
        elif verb == "tell":
            pipes[number].send(arguments)
        elif verb == "answer":
            answer = pipes[number].recv()
        elif verb == "kill":
            os.kill(pids[number], signal.SIGKILL)
            os.waitpid(pids.pop(number), 0)
            pipes.pop(number).close()
        print("answer", json.dumps(answer), flush=True)
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
