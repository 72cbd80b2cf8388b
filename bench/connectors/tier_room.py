"""How soon are several long prompts on disk computed at once, if vLLM's host memory holds fewer of them?"""

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from foreign.offloading import offloading_vllm
from foreign.running import Vllm, make_model

from bench.connectors.connector_bed import Prompts
from bench.connectors.tier_bed import KV_BYTES, TIERS
from bench.report import Effort, Row
from bench.rounds import at_most

NUM_USERS = 4
HOST_PROMPTS = 1.5  # that vLLM's host memory holds
COUNTS, LOADED = "kvtier_tier_", "loaded_blocks"
BLOCK_TOKENS, BLOCK_BYTES = 128, 512 << 10  # of the small model


def tier_room_rows(effort: Effort, python: str, folder: Path) -> list[Row]:
    """Rows of kvtier's tier and of vLLM's `fs`, in turns: prompts asked together, new ones and then from disk."""
    num_blocks, num_rounds = effort.of((24, 3), quick=(8, 1))
    model, prompts = make_model(python, folder), Prompts(num_blocks * BLOCK_TOKENS + 2)
    host_bytes = int(HOST_PROMPTS * num_blocks) * BLOCK_BYTES
    asked = [prompts.next() for _ in range(NUM_USERS)]
    with ExitStack() as stack:
        engines: dict[str, Vllm] = {}
        for name, tier in TIERS.items():
            engine = offloading_vllm(python, model, [tier(folder / name)], host_bytes, kv_cache_memory_bytes=KV_BYTES)
            engines[name] = stack.enter_context(engine)
        cold = {name: _stored(engine, asked, prompts) for name, engine in engines.items()}
        warm: dict[str, list[Any]] = {name: [] for name in engines}
        num_loaded = -engines["kvtier"].counts(COUNTS).get(LOADED, 0)
        for number in range(num_rounds):
            for name in sorted(engines, reverse=bool(number % 2)):
                engines[name].forget()
                warm[name].append(engines[name].generate(asked, 1))
                engines[name].settle()
        num_loaded += engines["kvtier"].counts(COUNTS).get(LOADED, 0)
    what, rows = f"{NUM_USERS} prompts of {num_blocks * BLOCK_TOKENS:,} tokens at once", list[Row]()
    for name, answers in warm.items():
        is_ours, of_cold = name == "kvtier", statistics.median(map(_ttft, answers)) / _ttft(cold[name])
        num_computed = max(answer["scheduled"] for answer in answers)
        rows += [
            Row(f"{what}, {name}: mean TTFT, new", 1e3 * _ttft(cold[name]), "ms"),
            Row(f"{what}, {name}: mean TTFT, on disk", 1e3 * statistics.median(map(_ttft, answers)), "ms"),
            at_most(f"{what}, {name}: TTFT of new", of_cold, "", 0.2)
            if is_ours
            else Row(f"{what}, {name}: TTFT of new", of_cold, ""),
            at_most(f"{what}, {name}: tokens computed in the worst round", num_computed, "tokens", 2 * NUM_USERS)
            if is_ours
            else Row(f"{what}, {name}: tokens computed in the worst round", num_computed, "tokens"),
        ]
    per_block = num_loaded / (num_rounds * NUM_USERS * num_blocks)
    return [*rows, at_most(f"{what}, kvtier: times that each block is loaded", per_block, "", 1.0)]


def _stored(engine: Vllm, asked: Sequence[list[int]], prompts: Prompts) -> Any:
    """Compute the prompts in one batch. Return the engine's answer once all prompts are on disk."""
    engine.generate([prompts.next()], 1)  # what comes first takes longer
    engine.settle()
    answer = engine.generate(asked, 1)
    engine.settle()
    for prompt in asked:  # what host memory had no room for is stored now
        engine.forget()
        engine.generate([prompt], 1)
        engine.settle()
    return answer


def _ttft(answer: Any) -> float:
    return statistics.mean(answer["ttft_s"])
