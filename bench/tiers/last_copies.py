"""Does a prefix cache whose copies keep up ever lose the last copy of a block? A replay whose lanes finish at once.

Prompts run one after another through a device of 1% of all their blocks, a host of 5% and a disk that holds them all.
The prompts are made up (chats that grow, and documents up to the device's size that are asked about again and again);
with --trace FILE (JSON lines: input_length, hash_ids of blocks of 512 tokens, as Mooncake's) also those of a trace.
"""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bench.report import Row, arguments, publish
from kvtier.store.codec.seal import charged_bytes
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.cache import TieredCache
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.lower.local_tiers import lower_tiers
from kvtier.tiers.lower.name_set import NAMESPACE_BYTES
from kvtier.tiers.naming.block_hash import BlockChain
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.naming.tier import Tier
from kvtier.transfer.block_memory import CpuMemory
from kvtier.transfer.lane import Finished, InlineLane
from kvtier.transfer.transfer_engine import Route, TransferEngine

BLOCK_SIZE = 4  # tokens of the replay; a block stands for one of the trace, of 512 tokens
BLOCK_BYTES = 64
CHUNK_BLOCKS = 4  # that a step computes
DEVICE_SHARE, HOST_SHARE = 0.01, 0.05

Blocks = Sequence[int]  # of a prompt: equal numbers after equal beginnings are equal blocks


def made_up(num_prompts: int, seed: int = 0) -> Iterator[Blocks]:
    """Made-up prompts: three of four continue a chat, one asks about a document of up to 250 blocks."""
    rng = random.Random(seed)
    fresh = iter(range(1 << 30))
    chats: list[list[int]] = []
    documents = [[next(fresh) for _ in range(int(rng.paretovariate(1.0) * 10) % 250 + 5)] for _ in range(400)]
    for _ in range(num_prompts):
        if rng.random() < 0.25:
            yield [*documents[int(len(documents) * rng.random() ** 2)], next(fresh)]
            continue
        if not chats or rng.random() < 0.2:
            chats.append([next(fresh) for _ in range(rng.randint(2, 20))])
        chat = chats[-1 - min(len(chats) - 1, int(rng.expovariate(0.05)))]
        chat += [next(fresh) for _ in range(rng.randint(1, 6))]
        yield list(chat)


def traced(file: Path) -> Iterator[Blocks]:
    """The prompts of the trace in *file*."""
    with file.open() as lines:
        for line in lines:
            yield json.loads(line)["hash_ids"]


class Replay:
    """A cache of *num_device* and *num_host* blocks over a disk of *num_disk*, which holds everything."""

    def __init__(self, num_device: int, num_host: int, num_disk: int) -> None:
        finished = Finished()
        memory = CpuMemory(np.zeros((num_device, BLOCK_BYTES), np.uint8), num_host)
        disk = DiskTier(MemoryStore(num_disk * charged_bytes(BLOCK_BYTES)), bytes(NAMESPACE_BYTES))
        lanes = {route: InlineLane(finished) for route in Route}
        groups, transfers = [FullAttention(BLOCK_SIZE)], TransferEngine(lanes, finished)
        self.cache = TieredCache(groups, [memory], transfers, lower_tiers(groups, [memory], transfers, disk))
        self.num_tokens = self.num_hit = self.num_left_out = 0

    def answer(self, prompt: Blocks) -> None:
        """Serve *prompt* as the scheduler does, polling until its promotion is done."""
        cache = self.cache
        if len(prompt) + 1 > cache.free_slots()[0]:
            self.num_left_out += 1  # it does not fit the device, so it could not be computed
            return
        chain = BlockChain(BLOCK_SIZE)
        chain.extend([block for block in prompt for _ in range(BLOCK_SIZE)])
        num_tokens = len(prompt) * BLOCK_SIZE + 1
        hit = cache.lookup(chain, num_tokens)
        while not cache.make_room(hit):
            cache.poll()
        promotion = cache.promote(hit)
        while not promotion.done:
            cache.poll()
        tables, done = promotion.tables, promotion.num_tokens
        self.num_tokens += num_tokens
        self.num_hit += done
        while done < num_tokens:
            end = min(num_tokens, done + CHUNK_BLOCKS * BLOCK_SIZE)
            cache.poll()
            slots = cache.allocate([-(-end // BLOCK_SIZE) - len(tables[0])])
            assert slots is not None, "the prompt does not fit the device"
            tables[0].extend(slots[0])
            cache.commit(tables, chain, done, end // BLOCK_SIZE * BLOCK_SIZE)
            cache.spill()
            done = end
        cache.release(tables)
        cache.poll()
        cache.spill()


def replayed(name: str, prompts: Sequence[Blocks]) -> list[Row]:
    """Replay *prompts*; gives the rows of this trace."""
    num_blocks = len({block for prompt in prompts for block in prompt})
    num_device, num_host = int(DEVICE_SHARE * num_blocks), int(HOST_SHARE * num_blocks)
    replay = Replay(num_device, num_host, 2 * num_blocks)
    for prompt in prompts:
        replay.answer(prompt)
    replay.cache.check()
    tiers = replay.cache.statistics().tiers
    dropped = {tier: tiers[tier].dropped_spills for tier in (Tier.DEVICE, Tier.HOST)}
    return [
        Row(f"{name}: answered", len(prompts) - replay.num_left_out, "prompts"),
        Row(f"{name}: longer than the device, left out", replay.num_left_out, "prompts"),
        Row(f"{name}: blocks on the device", num_device, "blocks"),
        Row(f"{name}: blocks in host memory", num_host, "blocks"),
        Row(f"{name}: tokens that hit", 100 * replay.num_hit / replay.num_tokens, "%"),
        *(
            Row(f"{name}: last copies dropped by {tier}", count, "blocks", "0", count == 0)
            for tier, count in dropped.items()
        ),
    ]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--trace", type=Path, help="a file of prompts in Mooncake's format")
    parser.add_argument("--prompts", type=int, help="of the made-up ones (6000)")
    options = parser.parse_args()
    rows = replayed("made up", list(made_up(options.prompts or options.effort.of(6000, quick=300))))
    if options.trace:
        rows += replayed(options.trace.stem, list(traced(options.trace)))
    publish("last_copies", rows, options.json)


if __name__ == "__main__":
    main()
