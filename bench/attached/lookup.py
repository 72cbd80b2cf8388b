"""How long does a look-up of 8,192 blocks take, beside the same tiers in this process?"""

import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.attached.client import BLOCK_TOKENS, GROUPS, Client
from bench.attached.sidecar_process import sidecar_process
from bench.report import Effort, Row
from bench.rounds import at_most
from kvtier.store.record import digest
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.device.eviction_order import NamedSpan
from kvtier.tiers.lower.local_tiers import lower_tiers
from kvtier.tiers.lower.lower_tiers import LowerTiers
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.transfer.block_memory import CpuMemory
from kvtier.transfer.lane import Finished, InlineLane
from kvtier.transfer.transfer_engine import Route, TransferEngine

BLOCK_BYTES = 4096
PART = 128  # blocks that a device pool copies down at a time


@dataclass(frozen=True)
class Size:
    """Sizes of the benchmark: blocks of a document, documents, and look-ups that are timed."""

    num_blocks: int
    num_documents: int
    num_rounds: int


def lookup_rows(effort: Effort, folder: Path) -> list[Row]:
    """Alternately, of documents that are in host memory, and of prompts of which nothing is anywhere."""
    with sidecar_process(folder, host="512MiB", disk=None) as sidecar:
        client = Client(sidecar.socket, BLOCK_BYTES)
        try:
            size = effort.of(Size(8192, 4, 400), quick=Size(1024, 2, 20))
            return _rows(client, size)
        finally:
            client.close()


def _rows(client: Client, size: Size) -> list[Row]:
    chains = [client.chain(document, size.num_blocks) for document in range(size.num_documents)]
    for document in range(size.num_documents):
        client.write(document, size.num_blocks)
    client.wait(lambda: all(client.lookup(chain) == size.num_blocks for chain in chains))
    caches = {"sidecar": _cache(client.tiers), "in this process": _cache(_local(client, chains))}
    rows = []
    for kind, asked in (("hits", chains), ("misses", [client.chain(100 + i, size.num_blocks) for i in range(4)])):
        took = _alternate(caches, asked, size, size.num_blocks if kind == "hits" else 0)
        there, here = took["sidecar"], took["in this process"]
        p50, p99 = statistics.median(there), statistics.quantiles(there, n=100)[-1]
        ratio = p50 / statistics.median(here)
        name = f"look-up of {size.num_blocks:,} names, {kind}"
        rows += [
            at_most(f"{name}: p50", 1e3 * p50, "ms", 4),
            at_most(f"{name}: p99", 1e3 * p99, "ms", 8),
            at_most(f"{name}: of the same in this process", ratio, "", 2)
            if kind == "hits"
            else Row(f"{name}: of the same in this process", ratio, ""),
        ]
    return rows


def _alternate(
    caches: dict[str, TieredCache], chains: list[BlockChain], size: Size, expected: int
) -> dict[str, list[float]]:
    rng, took = random.Random(1), {name: list[float]() for name in caches}
    for _ in range(size.num_rounds):
        chain = rng.choice(chains)
        for name in rng.sample(list(caches), len(caches)):
            began_at = time.perf_counter()
            hit = caches[name].lookup(chain, size.num_blocks * BLOCK_TOKENS + 1)
            took[name].append(time.perf_counter() - began_at)
            assert hit.num_tokens == expected * BLOCK_TOKENS, f"{hit.num_tokens} tokens were found"
    return took


def _cache(lower: LowerTiers) -> TieredCache:
    memory = CpuMemory(np.zeros((64, BLOCK_BYTES), np.uint8), 0)
    return TieredCache(GROUPS, [memory], _transfers(), lower)


def _transfers() -> TransferEngine:
    finished = Finished()
    return TransferEngine({route: InlineLane(finished) for route in Route}, finished)


def _local(client: Client, chains: list[BlockChain]) -> LowerTiers:
    """The same documents in host memory of this process, copied down as a device pool does."""
    memory = CpuMemory(np.zeros((1, BLOCK_BYTES), np.uint8), sum(len(chain.names) for chain in chains))
    tiers = lower_tiers(GROUPS, [memory], _transfers())
    for chain in chains:
        names = chain.names[::-1]
        for start in range(0, len(names), PART):
            part = list(names[start : start + PART])
            slots = tiers.reserve(0, len(part))
            digests = []
            for name, slot in zip(part, slots, strict=True):
                block = memory.host_block(slot)
                block[:] = client.content(name).data
                digests.append(digest(block))
            row = NamedSpan(0, len(part), part, names[start + PART] if start + PART < len(names) else None)
            tiers.publish(0, np.array(slots, np.intp), [row], digests, np.zeros(len(part), np.uint64))
    return tiers
