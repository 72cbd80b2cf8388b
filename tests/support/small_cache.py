"""A cache of a few small blocks, and how tests drive it."""

import random
from typing import Any

from chaos import World

from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.up.load_planner import Demand, LoadPlanner, LoadSpeeds
from kvtier.tiers.up.prefill_speed import PrefillSpeed
from kvtier.tiers.up.promotion import Hit, Promotion

BLOCK_SIZE = 4


BLOCK_BYTES = 64


DOCUMENT = 40  # tokens: ten blocks


CHARGE = 4096 + 512  # what the store counts for such a block


def world(
    num_device_slots: int = 16, num_host_slots: int = 40, store: MemoryStore | None = None, **options: Any
) -> World:
    """*options* are `World`'s."""
    store = MemoryStore(100 * CHARGE) if store is None else store
    groups = [FullAttention(BLOCK_SIZE)]
    return World(groups, [BLOCK_BYTES], num_device_slots, num_host_slots, store, random.Random(1), **options)


def read(world: World, document: str, num_tokens: int = DOCUMENT + 1) -> Promotion:
    """Answer a prompt of the document: promote what is there, compute the rest, leave. What the promotion brought."""
    chain = world.chain(document, num_tokens)
    hit = world.cache.lookup(chain, num_tokens)
    while not world.cache.make_room(hit):
        world.settle()
    promotion = world.cache.promote(hit)
    world.settle()
    assert promotion.done
    compute_and_leave(world, promotion, chain)
    world.cache.spill()
    world.settle()
    world.check()
    return promotion


def compute_and_leave(world: World, promotion: Promotion, chain: BlockChain) -> None:
    tables = promotion.tables
    for block_id in range(promotion.num_blocks, len(chain.names)):  # as a model does, copies in between
        slots = world.cache.allocate([block_id + 1 - len(table) for table in tables])
        assert slots is not None
        for table, new in zip(tables, slots, strict=True):
            table.extend(new)
        world.compute(tables, chain, block_id * BLOCK_SIZE, (block_id + 1) * BLOCK_SIZE)
        world.cache.spill()
        world.settle()
    world.cache.release(tables)


class DemandNoted(LoadPlanner):
    """Keeps what it is asked about."""

    demand: Demand | None = None

    def load_seconds(self, demand: Demand, speeds: LoadSpeeds) -> float | None:
        self.demand = demand
        return super().load_seconds(demand, speeds)


def demand_of(world: World, hit: Hit) -> Demand | None:
    """What the cache tells a planner that the hit has to move; None where it asks none."""
    planner = DemandNoted(PrefillSpeed(), 1, world.clock)
    world.cache.plans.load_seconds(hit, planner)
    return planner.demand


def balance(promotion: Promotion) -> tuple[int, int, int, int]:
    """Tokens of the prompt from device, host, disk, and computed."""
    tokens = promotion.balance(DOCUMENT + 1)
    return tokens.device, tokens.host, tokens.disk, tokens.recomputed
