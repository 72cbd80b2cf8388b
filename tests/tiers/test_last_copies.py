"""No block without a copy below ever loses its slot, as long as copies keep up."""

import random

import numpy as np
import pytest

from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.lower.local_tiers import lower_tiers
from kvtier.tiers.lower.name_set import NAMESPACE_BYTES
from kvtier.tiers.naming.block_hash import BlockChain, ExtraKeys
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.naming.tier import Tier
from kvtier.transfer.block_memory import CpuMemory
from kvtier.transfer.lane import Finished, InlineLane
from kvtier.transfer.transfer_engine import Route, TransferEngine

SIZE = 4  # tokens of a block
CHUNK = 4 * SIZE  # tokens computed in a step
NUM_DEVICE, NUM_HOST = 120, 600


@pytest.fixture
def cache() -> TieredCache:
    """A small device, a host five times as large and a disk that holds everything; lanes finish at once."""
    finished = Finished()
    memory = CpuMemory(np.zeros((NUM_DEVICE, 64), np.uint8), NUM_HOST)
    lanes = {route: InlineLane(finished) for route in Route}
    disk = DiskTier(MemoryStore(1 << 26), bytes(NAMESPACE_BYTES))
    groups, transfers = [FullAttention(SIZE)], TransferEngine(lanes, finished)
    return TieredCache(groups, [memory], transfers, lower_tiers(groups, [memory], transfers, disk))


def answer(cache: TieredCache, salt: str, num_tokens: int) -> int:
    """Serve a prompt as the scheduler does, one chunk a step; the tokens that hit."""
    chain = BlockChain(SIZE, ExtraKeys(cache_salt=salt))
    chain.extend(list(range(num_tokens)))
    hit = cache.lookup(chain, num_tokens)
    while not cache.make_room(hit):
        cache.poll()
    promotion = cache.promote(hit)
    while not promotion.done:
        cache.poll()
    tables, done = promotion.tables, promotion.num_tokens
    while done < num_tokens:
        end = min(num_tokens, done + CHUNK)
        slots = cache.allocate([-(-end // SIZE) - len(tables[0])])
        assert slots is not None
        tables[0].extend(slots[0])
        cache.commit(tables, chain, done, end)
        cache.spill()
        cache.poll()
        done = end
    cache.release(tables)
    cache.spill()
    cache.poll()
    return promotion.num_tokens


def dropped(cache: TieredCache) -> int:
    """Number of blocks that left a tier although no other tier had them."""
    tiers = cache.statistics().tiers
    return tiers[Tier.DEVICE].dropped_spills + tiers[Tier.HOST].dropped_spills


@pytest.mark.parametrize("seed", [1692637484, random.randrange(1 << 32)], ids=["a hit on the device", "any"])
def test_chats_and_documents_of_all_lengths_drop_nothing(cache: TieredCache, seed: int) -> None:
    """With the first seed a document that is on the device whole is asked about: leased, it leaves few slots, and what
    was in them had not been copied, as its own blocks had been the oldest."""
    rng = random.Random(seed)
    chats: dict[str, int] = {}
    documents = [rng.randint(2, NUM_DEVICE - 8) * SIZE for _ in range(30)]

    for _ in range(250):
        if rng.random() < 0.4:
            document = int(len(documents) * rng.random() ** 2)
            answer(cache, f"document {document}", documents[document] + 1)
            continue
        chat = f"chat {rng.randrange(20)}"
        chats[chat] = chats.get(chat, 0) + rng.randint(1, 6 * SIZE)
        if chats[chat] > NUM_DEVICE * SIZE // 2:
            del chats[chat]
            continue
        answer(cache, chat, chats[chat])

    cache.check()
    assert dropped(cache) == 0, f"seed {seed}"
