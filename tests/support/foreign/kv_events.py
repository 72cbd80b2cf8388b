"""vLLM's own publisher of KV events, and LMCache's events as its connector makes vLLM's of them: `python
kv_events.py ENDPOINT REPLAY_ENDPOINT`, in a venv with both. Told what to do line by line, as `lmcache_client.py` is."""

import json
import sys
from types import SimpleNamespace

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.integration.vllm.vllm_multi_process_adapter import LMCacheMPWorkerAdapter
from lmcache.utils import CacheEvent, CacheRemoveEvent
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from vllm.distributed.kv_events import BlockStored, KVCacheEvent, KVEventBatch, ZmqEventPublisher

CHUNK = 256

publisher = ZmqEventPublisher(0, *sys.argv[1:])
made: list[CacheEvent] = []
adapter = object.__new__(LMCacheMPWorkerAdapter)  # of its parts only those that make events, without a server
adapter.lmcache_tokens_per_chunk = CHUNK
adapter._kv_event_hasher = TokenHasher(chunk_size=CHUNK)
connector = object.__new__(LMCacheMPConnector)
connector._enable_kv_events = True
connector.worker_adapter = SimpleNamespace(get_kv_events=lambda: made)


def vllm_stores(tokens: list[int], size: int, names: list[int], parent: int | None) -> None:
    """Blocks on the device."""
    _publish([BlockStored(names, parent, tokens, size, None, "GPU", None, [None] * len(names), 0, "full_attention")])


def lmcache_stores(tokens: list[int], start: int) -> list[str]:
    """The chunks of a prompt from token *start* on; their names."""
    key = IPCCacheServerKey.from_token_ids("m", 1, 0, tokens, start, len(tokens), "request")
    events = adapter._build_store_kv_events(key)
    _publish_lmcaches(events)
    return [event.block_hashes[0].hex() for event in events]


def lmcache_removes(names: list[str]) -> None:
    """Chunks that have left host memory."""
    _publish_lmcaches([CacheRemoveEvent([bytes.fromhex(name) for name in names], "CPU")])


def _publish_lmcaches(events: list[CacheEvent]) -> None:
    made[:] = events
    found = connector.get_kv_connector_kv_cache_events()
    assert found is not None
    _publish([*found.get_all_events()])


def _publish(events: list[KVCacheEvent]) -> None:
    publisher.publish(KVEventBatch(ts=1.0, events=events))


for line in sys.stdin:
    name, *arguments = json.loads(line)
    print("answer", json.dumps(globals()[name](*arguments)), flush=True)
