"""LMCache's own client classes, told what to do line by line: `python lmcache_client.py URL`, in a venv with lmcache.

A line is a JSON list, a function's name and its arguments. The answer is a line that begins with `answer`; there may be
others, of the libraries.
"""

import inspect
import json
import os
import sys
from typing import Any

import lmcache
import torch
import zmq
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.transfer_context.worker_transfer import EngineDrivenTransferContext
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

CHUNK = 256
NUM_LAYERS, NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, WIDTH = 4, 64, 2, 128, 128  # as vLLM has them on a CPU
BLOCKS_IN_CHUNK = CHUNK // BLOCK_SIZE
TIMEOUT_S = 120.0


class OlderContext:
    """lmcache 0.5.5's transfer context, which is told its instance and its client with each call."""

    def __init__(self, instance: int, client: Any) -> None:
        self._instance = instance
        self._client = client
        self._context = EngineDrivenTransferContext()

    @property
    def engine_driven_context(self) -> object:
        return self._context.engine_driven_context

    def register(self, kv: dict, model: str, num_ranks: int, blocks_in_chunk: int, timeout_s: float) -> None:
        self._context.register(self._instance, kv, model, num_ranks, blocks_in_chunk, self._client, timeout_s)

    def unregister(self) -> Any:
        return self._client.unregister_kv_cache_engine_driven_context(self._instance)

    def submit_store(self, request: str, asked: IPCCacheServerKey, *arguments: Any) -> Any:
        return self._context.submit_store(request, asked, self._instance, *arguments)

    def submit_retrieve(self, request: str, asked: IPCCacheServerKey, *arguments: Any) -> Any:
        return self._context.submit_retrieve(request, asked, self._instance, *arguments)


is_older = len(inspect.signature(EngineDrivenTransferContext).parameters) == 0
Context = OlderContext if is_older else EngineDrivenTransferContext
client = RequestClientFactory.create(sys.argv[1], context=zmq.Context.instance())
torch.manual_seed(1)
kv = {f"layer {i}": torch.randn(NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, WIDTH) for i in range(NUM_LAYERS)}
contexts: dict[int, Any] = {}
kept: dict[str, list[torch.Tensor]] = {}
begun: dict[str, list[torch.Tensor]] = {}


def key(tokens: list[int], request: str, worker: int | None, salt: str, num_ranks: int = 1) -> IPCCacheServerKey:
    end = len(tokens) // CHUNK * CHUNK
    return IPCCacheServerKey.from_token_ids("m", num_ranks, worker, tokens, 0, end, request, salt)


def version() -> str:
    return lmcache.__version__


def chunk_size() -> int:
    """Ask as vLLM's connector does."""
    if hasattr(client, "negotiate_chunk_size"):  # lmcache 0.5.7
        return client.negotiate_chunk_size(BLOCK_SIZE).result(timeout=TIMEOUT_S)
    return client.get_chunk_size().result(timeout=TIMEOUT_S)


def ping(instance: int | None) -> bool:
    return client.ping(instance).result(timeout=TIMEOUT_S)


def attach(instance: int, num_ranks: int = 1) -> str:
    """By which memory it is attached, as a worker of an engine with so many ranks."""
    contexts[instance] = Context(instance, client)
    contexts[instance].register(kv, "m", num_ranks, BLOCKS_IN_CHUNK, TIMEOUT_S)
    return type(contexts[instance].engine_driven_context).__name__


def detach(instance: int) -> None:
    contexts.pop(instance).unregister().result(timeout=TIMEOUT_S)


def lookup(tokens: list[int], request: str, salt: str = "", num_ranks: int = 1) -> int | None:
    client.lookup(key(tokens, request, None, salt, num_ranks), 1).result(timeout=TIMEOUT_S)
    while (found := client.query_prefetch_status(request).result(timeout=TIMEOUT_S)) is None:
        pass
    return found


def end_session(request: str) -> None:
    client.end_session(request).result(timeout=TIMEOUT_S)


def store(instance: int, tokens: list[int], request: str, blocks: list[int], salt: str = "") -> bool:
    """Store what is in these blocks, and keep a copy of it to compare with."""
    keep(request, blocks)
    future = contexts[instance].submit_store(
        request, key(tokens, request, 0, salt), kv, [blocks], None, BLOCKS_IN_CHUNK
    )
    return bool(future.result(timeout=TIMEOUT_S))


def keep(request: str, blocks: list[int]) -> None:
    """Keep a copy of these blocks to compare with: every process of this script has the same ones at its start."""
    kept[request] = [layer[blocks].clone() for layer in kv.values()]


def store_as_rank(instance: int, rank: int, num_ranks: int, tokens: list[int], request: str, blocks: list[int]) -> bool:
    """`store`, of one of several ranks; kept for the request and the rank."""
    keep(f"{request} {rank}", blocks)
    asked = key(tokens, request, rank, "", num_ranks)
    future = contexts[instance].submit_store(request, asked, kv, [blocks], None, BLOCKS_IN_CHUNK)
    return bool(future.result(timeout=TIMEOUT_S))


def retrieve_as_rank(
    instance: int, rank: int, num_ranks: int, tokens: list[int], request: str, blocks: list[int], like: str
) -> list[bool]:
    """`retrieve`, of one of several ranks, compared with what it has stored itself."""
    return _retrieved(instance, key(tokens, request, rank, "", num_ranks), request, blocks, f"{like} {rank}")


def with_image(tokens: list[int], start: int, length: int, identifier: str) -> list[int]:
    """The tokens as LMCache's connector names them to servers, where an image has a span of placeholders."""
    from lmcache.integration.vllm.utils import apply_mm_hashes_to_token_ids  # vLLM takes seconds to import
    from vllm.multimodal.inputs import PlaceholderRange

    span = PlaceholderRange(offset=start, length=length)
    return apply_mm_hashes_to_token_ids(torch.tensor(tokens), [identifier], [span]).tolist()


def begin_store(instance: int, tokens: list[int], request: str) -> int:
    """Reserve slots and never commit them; how many chunks."""
    return len(client.prepare_store(key(tokens, request, 0, ""), instance).result(timeout=TIMEOUT_S).context["slots"])


def begin_copy(instance: int, tokens: list[int], request: str) -> int:
    """Reserve slots and keep them mapped, as a thread does that is about to copy; how many chunks."""
    context = contexts[instance].engine_driven_context
    slots, _ = context.prepare_store(key(tokens, request, 0, ""), instance)
    begun[request] = slots
    return len(slots)


def finish_copy(request: str) -> None:
    """Write to the slots that `begin_copy` was given, whatever has happened since."""
    for slot in begun.pop(request):
        slot.fill_(-1)


def begin_retrieve(instance: int, tokens: list[int], request: str) -> int:
    """Be told where chunks are and never say that they were loaded; how many."""
    return len(
        client.prepare_retrieve(key(tokens, request, 0, ""), instance).result(timeout=TIMEOUT_S).context["slots"]
    )


def retrieve(instance: int, tokens: list[int], request: str, blocks: list[int], like: str) -> list[bool]:
    """Load into these blocks: whether that succeeded, and whether they are what was stored for the request *like*."""
    return _retrieved(instance, key(tokens, request, 0, ""), request, blocks, like)


def _retrieved(instance: int, asked: IPCCacheServerKey, request: str, blocks: list[int], like: str) -> list[bool]:
    for layer in kv.values():
        layer[blocks] = 0
    future = contexts[instance].submit_retrieve(request, asked, kv, [blocks], None, BLOCKS_IN_CHUNK)
    succeeded = bool(future.result(timeout=TIMEOUT_S))
    pairs = zip(kv.values(), kept[like], strict=True)
    return [succeeded, all(torch.equal(layer[blocks], stored) for layer, stored in pairs)]


def load_found(instance: int, tokens: list[int], request: str, like: str, salt: str = "") -> list[int]:
    """Look the prompt up and load what is there, as the connector does: how many chunks were promised, how many of them
    the load has given, and how many of those are not what was stored for the request *like*."""
    found = lookup(tokens, request, salt) or 0
    blocks = list(range(NUM_BLOCKS - found * BLOCKS_IN_CHUNK, NUM_BLOCKS))
    for layer in kv.values():
        layer[blocks] = 0
    num_loaded = num_wrong = 0
    if found:
        asked = key(tokens[: found * CHUNK], request, 0, salt)
        future = contexts[instance].submit_retrieve(request, asked, kv, [blocks], None, BLOCKS_IN_CHUNK)
        num_loaded = found if future.result(timeout=TIMEOUT_S) else 0
    for chunk in range(num_loaded):
        span = slice(chunk * BLOCKS_IN_CHUNK, (chunk + 1) * BLOCKS_IN_CHUNK)
        pairs = zip(kv.values(), kept[like], strict=True)
        num_wrong += not all(torch.equal(layer[blocks[span]], stored[span]) for layer, stored in pairs)
    end_session(request)
    return [found, num_loaded, num_wrong]


def clear() -> None:
    forced = [True] if inspect.signature(client.clear).parameters else []  # 0.5.5 has no such parameter
    client.clear(*forced).result(timeout=TIMEOUT_S)


for line in sys.stdin:
    name, *arguments = json.loads(line)
    function: Any = globals()[name]
    print("answer", json.dumps(function(*arguments)), flush=True)
os._exit(0)
