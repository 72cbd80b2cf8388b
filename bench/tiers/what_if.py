"""Are the hit ratios true that kvtier estimates for tiers of other sizes, and what does estimating them cost?

Against an exact replay of the same prompts in an LRU cache of each size, and against the real tiers of each size, of
which each one is changed in turn. The prompts are chats that the benchmark makes up, and with --trace FILE (JSON lines:
timestamp in ms, hash_ids of blocks of 512 tokens) those of the file. Time is simulated.
"""

import hashlib
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exact_lru import ExactLru, chats, lru_hit_ratio
from simulated_engine import BLOCK_SIZE, Arriving, Machine, SimulatedEngine

from bench.report import Row, arguments, publish
from kvtier.tiers.lower.statistics import TierStatistics, TokenBalance
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.tier import Tier
from kvtier.tiers.reuse.what_if import SIZES, WhatIf

BLOCK_BYTES = 1 << 20
MAX_ERROR = 0.02
EXACT_BLOCKS = (1000, 4000, 16_000)
TIERS = {Tier.DEVICE: 2000, Tier.HOST: 6000, Tier.DISK: 20_000}
STRETCH = 5.0  # of a trace's times: the simulated device computes five times slower than what served it


def main() -> None:
    """Measure, and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--trace", type=Path, help="a file of prompts in Mooncake's format")
    options = parser.parse_args()
    rows = exact_rows("chats", chats(options.effort.of(12_000, quick=1500), seed=1))
    if options.trace is not None:
        lines = [json.loads(line) for line in options.trace.open()]
        rows += exact_rows(options.trace.stem, [[_name(block) for block in line["hash_ids"]] for line in lines])
        rows += real_rows(options.trace.stem, [_arriving(line, number) for number, line in enumerate(lines)])
    publish("what_if", rows, options.json)


def exact_rows(workload: str, prompts: Sequence[Sequence[BlockName]]) -> list[Row]:
    """The worst error at any size of one cache, and what estimating took."""
    rows, seconds = [], math.inf
    for num_blocks in EXACT_BLOCKS:
        what_if, balances = WhatIf(lambda: 0.0), _answered(prompts, num_blocks)
        began_at = time.perf_counter()
        for names, tokens in zip(prompts, balances, strict=True):
            what_if.on_prompt(names, BLOCK_SIZE, BLOCK_BYTES, tokens)
        capacity = num_blocks * BLOCK_BYTES
        found = what_if.hit_ratios({Tier.HOST: TierStatistics(num_blocks, capacity, capacity)})[Tier.HOST]
        seconds = min(seconds, time.perf_counter() - began_at)
        exact = {size: lru_hit_ratio(prompts, round(size * num_blocks)) for size in SIZES}
        worst = max(abs(found[size] - exact[size]) for size in SIZES)
        between = f"{exact[SIZES[0]]:.3f} to {exact[SIZES[-1]]:.3f}"
        rows.append(
            Row(
                f"{workload}, {num_blocks:,} blocks: worst error at half, twice, four times (exact: {between})",
                worst,
                "",
                f"<= {MAX_ERROR}",
                worst <= MAX_ERROR,
                varies=True,
            )
        )
    num_names = sum(map(len, prompts))
    rows.append(Row(f"{workload}: estimating, for 1,000 blocks asked for", 1e9 * seconds / num_names, "us"))
    return rows


def real_rows(workload: str, prompts: Sequence[Arriving]) -> list[Row]:
    """How far the estimate is from what the tiers find that have the size."""
    here = _real(prompts, TIERS)
    estimated = here.what_if.hit_ratios(here.cache.statistics().tiers)
    rows = []
    for resized, num_blocks in TIERS.items():
        for size in SIZES:
            there = here if size == 1.0 else _real(prompts, {**TIERS, resized: round(num_blocks * size)})
            tokens = there.tokens
            found = sum(getattr(tokens, each) for each in Tier if each.depth <= resized.depth) / tokens.num_tokens
            title = f"{workload}, real tiers, {resized} x {size:g} ({found:.3f}): error"
            error = abs(estimated[resized][size] - found)
            rows.append(Row(title, error, "", f"<= {MAX_ERROR}", error <= MAX_ERROR))
    return rows


def _answered(prompts: Sequence[Sequence[BlockName]], num_blocks: int) -> list[TokenBalance]:
    cache = ExactLru(num_blocks)
    balances = []
    for names in prompts:
        num_found = cache.ask(names)
        balances.append(TokenBalance(host=num_found * BLOCK_SIZE, recomputed=(len(names) - num_found) * BLOCK_SIZE))
    return balances


def _real(prompts: Sequence[Arriving], num_blocks: dict[Tier, int]) -> SimulatedEngine:
    machine = Machine(
        device_blocks=num_blocks[Tier.DEVICE], host_blocks=num_blocks[Tier.HOST], disk_blocks=num_blocks[Tier.DISK]
    )
    engine = SimulatedEngine(machine, "always")
    engine.answer(prompts)
    return engine


def _name(block: int) -> BlockName:
    return BlockName(hashlib.sha256(block.to_bytes(8, "little")).digest())


def _arriving(line: dict[str, Any], number: int) -> Arriving:
    text = [block for block in line["hash_ids"] for _ in range(BLOCK_SIZE)]
    return Arriving(float(line["timestamp"]) * STRETCH / 1000, text + [10**6 + number] * (BLOCK_SIZE // 2))


if __name__ == "__main__":
    main()
