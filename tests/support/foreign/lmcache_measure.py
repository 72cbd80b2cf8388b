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
NUM_CHUNKS = 128  # stored and loaded in one go, of 1 MiB each: 32,768 tokens
NUM_LAYERS, NUM_HEADS, WIDTH = 4, 2, 128  # in float32: 1 MiB a chunk
LENGTHS = (32_768, 131_072)  # tokens that are looked up
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
        self._blocks = [list(range(2 * NUM_CHUNKS))]
        self._long = self._tokens(0, LENGTHS[-1])
        for end in range(LENGTHS[0], LENGTHS[-1] + 1, LENGTHS[0]):
            self._store(self._long, f"store long {end}", end - LENGTHS[0], end)

    def round(self, number: int) -> None:
        """Store, look up, load; then look prompts of other lengths up that are there, and that are not."""
        tokens = self._tokens(number + 1, LENGTHS[0])
        self._lookup(tokens, f"cold {number}")
        self._timed("store", lambda: self._store(tokens, f"store {number}", 0, len(tokens)))
        for kind in ("all hits", "all hits again"):
            for length, prompt in zip(LENGTHS, (tokens, self._long), strict=True):
                self._look_up(prompt, f"lookup of {length:,} tokens, {kind}", number, length // CHUNK)
        for length, prompt in zip(LENGTHS, (tokens, self._long), strict=True):
            self._lookup(prompt, f"holder {length} {number}")
            what = f"lookup of {length:,} tokens, all hits, held by another request"
            self._look_up(prompt, what, number, length // CHUNK)
            self._do_not_load(prompt, f"holder {length} {number}")
        self._lookup(tokens, f"load {number}")
        before = {name: values[self._blocks[0]].clone() for name, values in self._kv.items()}
        for values in self._kv.values():
            values[self._blocks[0]] = 0
        self._timed("retrieve", lambda: self._retrieve(tokens, f"load {number}"))
        assert all(torch.equal(values[self._blocks[0]], before[name]) for name, values in self._kv.items()), self.name
        self._client.end_session(f"load {number}").result(timeout=TIMEOUT_S)
        for length in LENGTHS:
            absent = [number + 1, *range(100, 99 + length)]
            self._look_up(absent, f"lookup of {length:,} tokens, a miss", number, 0)

    def _look_up(self, tokens: list[int], what: str, number: int, num_there: int) -> None:
        request = f"{what} {number}"
        found = self._timed(what, lambda: self._lookup(tokens, request))
        assert found == num_there, f"{self.name}: {what}: {found}, not {num_there}"
        self._do_not_load(tokens, request)

    def _tokens(self, number: int, length: int) -> list[int]:
        return [(7 * i + 131 * number + self._instance) % 50_000 + number for i in range(length)]

    def _timed(self, what: str, do) -> object:
        began_at = time.perf_counter()
        result = do()
        self.seconds[what].append(time.perf_counter() - began_at)
        return result

    def _key(self, tokens: list[int], request: str, worker: int | None, start: int, end: int) -> IPCCacheServerKey:
        return IPCCacheServerKey.from_token_ids("measured", 1, worker, tokens, start, end, request)

    def _whole(self, tokens: list[int], request: str, worker: int | None) -> IPCCacheServerKey:
        return self._key(tokens, request, worker, 0, len(tokens) // CHUNK * CHUNK)

    def _lookup(self, tokens: list[int], request: str) -> int:
        self._client.lookup(self._whole(tokens, request, None), 1).result(timeout=TIMEOUT_S)
        while (found := self._client.query_prefetch_status(request).result(timeout=TIMEOUT_S)) is None:
            pass
        return found

    def _do_not_load(self, tokens: list[int], request: str) -> None:
        """As the connector does it for a request that has all of it on its device already."""
        self._client.free_lookup_locks(self._whole(tokens, request, None), 1).result(timeout=TIMEOUT_S)
        self._client.end_session(request).result(timeout=TIMEOUT_S)

    def _store(self, tokens: list[int], request: str, start: int, end: int) -> None:
        key = self._key(tokens, request, 0, start, end)
        done = self._context.submit_store(request, key, self._kv, self._blocks, None, CHUNK // BLOCK)
        assert done.result(timeout=TIMEOUT_S), f"{self.name} did not store"

    def _retrieve(self, tokens: list[int], request: str) -> None:
        key = self._whole(tokens, request, 0)
        done = self._context.submit_retrieve(request, key, self._kv, self._blocks, None, CHUNK // BLOCK)
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
