"""Layouts over a small segment and a store in memory, and chunks whose bytes follow from their names."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from chaos import FakeClock

from kvtier.sidecar.layout_tiers import LayoutTiers
from kvtier.sidecar.layouts import Layouts
from kvtier.sidecar.lmcache.chunk_layout import ChunkLayout
from kvtier.store.memory_store import MemoryStore
from kvtier.store.record import digest
from kvtier.tiers.device.eviction_order import NamedSpan
from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.lower.lower_tiers import Fetch
from kvtier.tiers.naming.block_hash import BlockChain, BlockName, ExtraKeys
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.naming.named_blocks import NamedBlocks, blocks_of, number_of, tenant_of
from kvtier.transfer.lane import Finished, InlineLane
from kvtier.transfer.segment import Segment
from kvtier.transfer.transfer_engine import Route, TransferEngine

EXTENT_BYTES = 64 << 10
CHUNK_TOKENS = 8


def layout(model: str = "m", width: int = 256, world_size: int = 1, chunk_tokens: int = CHUNK_TOKENS) -> ChunkLayout:
    """A layout with chunks of 2 * *width* * *chunk_tokens* bytes."""
    return ChunkLayout(model, "", "bfloat16", 1, 1, width, 4, chunk_tokens, chunk_tokens, world_size)


def content(layout: ChunkLayout, rank: int, name: BlockName) -> bytes:
    """The bytes that the chunk must have."""
    return random.Random(layout.digest + bytes([rank]) + name).randbytes(layout.chunk_bytes)


class LayoutBed:
    """What engines do with the sidecar's layouts, without an endpoint."""

    def __init__(self, folder: Path, num_extents: int = 4, store: MemoryStore | None = None) -> None:
        self.clock = FakeClock()
        self.segment = Segment(num_extents * EXTENT_BYTES, folder)
        self.segment.wait_backed(60)
        finished = Finished()
        self.transfers = TransferEngine({route: InlineLane(finished) for route in Route}, finished)
        self.store = store
        self.layouts = Layouts(self.segment, self.transfers, store, clock=self.clock, extent_bytes=EXTENT_BYTES)

    def settle(self) -> None:
        for _ in range(8):
            self.clock.now += 0.01
            self.layouts.poll()
            self.transfers.poll()

    def chain(self, tiers: LayoutTiers, document: int, num_chunks: int, salt: str | None = None) -> BlockChain:
        chain = BlockChain(tiers.layout.chunk_tokens, ExtraKeys(cache_salt=salt))
        chain.extend([document * 1000 + i for i in range(num_chunks * tiers.layout.chunk_tokens)])
        return chain

    def blocks(self, tiers: LayoutTiers, document: int, num_chunks: int) -> NamedBlocks:
        chain = self.chain(tiers, document, num_chunks)
        return blocks_of(chain, FullAttention(tiers.layout.chunk_tokens), np.arange(num_chunks))

    def put(self, tiers: LayoutTiers, document: int, num_chunks: int, rank: int = 0, salt: str | None = None) -> int:
        """Store a document's chunks, the last first, as far as there is room; how many."""
        names = self.chain(tiers, document, num_chunks, salt).names[::-1]
        slots = tiers.reserve(rank, num_chunks)
        names = names[len(names) - len(slots) :]
        for name, slot in zip(names, slots, strict=True):
            tiers.memories[rank].host_block(slot)[:] = content(tiers.layout, rank, name)
        digests = [digest(tiers.memories[rank].host_block(slot)) for slot in slots]
        owners = np.full(len(slots), number_of(tenant_of(salt)), np.uint64)
        if slots:
            rows = [NamedSpan(0, len(slots), list(names), None)]
            tiers.tiers.publish(rank, np.array(slots, np.intp), rows, digests, owners)
        self.settle()
        return len(slots)

    def fetch(self, tiers: LayoutTiers, document: int, num_chunks: int, rank: int = 0) -> Fetch:
        blocks = self.blocks(tiers, document, num_chunks)
        num_found = tiers.room_for(rank, tiers.tiers.find_run(rank, blocks.names))
        fetch = tiers.fetch(rank, self.blocks(tiers, document, num_found), lambda *_: None)
        self.settle()
        return fetch

    def release(self, fetch: Fetch) -> None:
        """End the leases, and wait for nothing more."""
        fetch.release(range(len(fetch.slots))[::-1])

    def get(self, tiers: LayoutTiers, document: int, num_chunks: int, rank: int = 0) -> list[int]:
        """Which of a document's first chunks can be had, with their own bytes and digests; nothing is leased after."""
        fetch = self.fetch(tiers, document, num_chunks, rank)
        names = self.chain(tiers, document, num_chunks).names
        had = [place for place in range(len(fetch.slots)) if fetch.slots[place] != ABSENT]
        for place in had:
            found = bytes(tiers.memories[rank].host_block(int(fetch.slots[place])))
            assert found == content(tiers.layout, rank, names[place]), "another chunk's bytes"
            assert fetch.digest(place) == digest(found)
        self.release(fetch)
        return had

    def held(self, all_tiers: Sequence[LayoutTiers]) -> list[int]:
        """How many extents each has."""
        return [tiers.held_bytes // EXTENT_BYTES for tiers in all_tiers]

    def close(self) -> None:
        self.transfers.close()
        self.segment.close()
