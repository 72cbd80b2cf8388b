"""How fast are servers of LMCache's protocol, through LMCache's own client? lmcache_measure.py ROUNDS NAME=URL ...

Runs in the environment that install.py makes; knows nothing of kvtier. Servers take turns. Prints one JSON object: for
each name the seconds of each round, by what was done.
"""

import json
import os
import sys
import time
from collections import defaultdict

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch  # lmcache reads the environment
import zmq
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.transfer_context.worker_transfer import EngineDrivenTransferContext
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

CHUNK = 256
BLOCK = 128
NUM_CHUNKS = 128  # stored and loaded in one go, of 1 MiB each
NUM_LAYERS, NUM_HEADS, WIDTH = 4, 2, 128  # in float32: 1 MiB a chunk
LONG = 131_072  # tokens that are looked up
TIMEOUT_S = 120.0


class Server:
    """One server, and the seconds that it took."""

    def __init__(self, name: str, url: str, number: int) -> None:
        self.name = name
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._client = RequestClientFactory.create(url, context=zmq.Context.instance())
        self._instance = number
        self._client.get_chunk_size().result(timeout=TIMEOUT_S)
        torch.manual_seed(0)
        blocks = 2 * NUM_CHUNKS + 2
        self._kv = {f"layer {i}": torch.randn(blocks, NUM_HEADS, BLOCK, WIDTH) for i in range(NUM_LAYERS)}
        self._context = EngineDrivenTransferContext(number, self._client)
        self._context.register(self._kv, "measured", 1, CHUNK // BLOCK, TIMEOUT_S)

    def round(self, number: int) -> None:
        """Store, look up, load; then look a long prompt up that is not there."""
        tokens = [(7 * i + 131 * number + self._instance) % 50_000 + number for i in range(NUM_CHUNKS * CHUNK)]
        blocks = [list(range(2 * NUM_CHUNKS))]
        self._lookup(tokens, f"cold {number}")
        self._timed("store", lambda: self._store(tokens, f"store {number}", blocks))
        before = {name: values[blocks[0]].clone() for name, values in self._kv.items()}
        hits = self._timed("lookup of 32,768 tokens, all hits", lambda: self._lookup(tokens, f"load {number}"))
        assert hits == NUM_CHUNKS, f"{self.name}: {hits} hits of {NUM_CHUNKS}"
        for values in self._kv.values():
            values[blocks[0]] = 0
        self._timed("retrieve", lambda: self._retrieve(tokens, f"load {number}", blocks))
        assert all(torch.equal(values[blocks[0]], before[name]) for name, values in self._kv.items()), self.name
        long = [number + 1, *range(100, 99 + LONG)]
        hits = self._timed("lookup of 131,072 tokens, a miss", lambda: self._lookup(long, f"long {number}"))
        assert hits == 0

    def _timed(self, what: str, do) -> object:
        began_at = time.perf_counter()
        result = do()
        self.seconds[what].append(time.perf_counter() - began_at)
        return result

    def _key(self, tokens: list[int], request: str, worker: int | None) -> IPCCacheServerKey:
        return IPCCacheServerKey(
            "measured", 1, worker, tuple(tokens), 0, len(tokens) // CHUNK * CHUNK, request, "", None, 1
        )

    def _lookup(self, tokens: list[int], request: str) -> int:
        self._client.lookup(self._key(tokens, request, None), 1).result(timeout=TIMEOUT_S)
        while (found := self._client.query_prefetch_status(request).result(timeout=TIMEOUT_S)) is None:
            pass
        return found

    def _store(self, tokens: list[int], request: str, blocks: list[list[int]]) -> None:
        key = self._key(tokens, request, 0)
        done = self._context.submit_store(request, key, self._kv, blocks, None, CHUNK // BLOCK)
        assert done.result(timeout=TIMEOUT_S), f"{self.name} did not store"

    def _retrieve(self, tokens: list[int], request: str, blocks: list[list[int]]) -> None:
        key = self._key(tokens, request, 0)
        done = self._context.submit_retrieve(request, key, self._kv, blocks, None, CHUNK // BLOCK)
        assert done.result(timeout=TIMEOUT_S), f"{self.name} did not load"


def main() -> None:
    """Measure all servers in turns."""
    num_rounds = int(sys.argv[1])
    servers = [Server(*argument.split("=", 1), number + 1) for number, argument in enumerate(sys.argv[2:])]
    for number in range(num_rounds + 1):
        for server in servers if number % 2 else servers[::-1]:
            server.round(number)
    print(json.dumps({server.name: {what: s[1:] for what, s in server.seconds.items()} for server in servers}))
    sys.stdout.flush()
    os._exit(0)  # some of the client's threads do not end


if __name__ == "__main__":
    main()
