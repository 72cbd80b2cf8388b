"""What does kvtier's tier below vLLM's own offloading cost where nothing is ever reused?"""

import statistics
from pathlib import Path

from foreign.running import Vllm, make_model

from bench.doors.connector_bed import Prompts
from bench.doors.connector_cost import PROMPT_TOKENS, ROUNDS, tokens_per_s
from bench.doors.tier_bed import KV_BYTES, started
from bench.report import Row
from bench.rounds import at_least


def tier_cost_rows(python: str, folder: Path) -> list[Row]:
    """Throughput without a connector, with kvtier's tier and with vLLM's `fs`, in turns; medians of pairs."""
    model, prompts = make_model(python, folder), Prompts(PROMPT_TOKENS)
    with (
        Vllm(python, model, {}, disable_hybrid_kv_cache_manager=False, kv_cache_memory_bytes=KV_BYTES) as plain,
        started(python, model, "kvtier", folder) as kvtier,
        started(python, model, "fs", folder) as fs,
    ):
        engines = {"without": plain, "kvtier": kvtier, "fs": fs}
        for engine in engines.values():
            tokens_per_s(engine, prompts)
        speeds: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(ROUNDS):
            for name in sorted(engines, reverse=bool(number % 2)):
                speeds[name].append(tokens_per_s(engines[name], prompts))
                engines[name].settle()
        stored = kvtier.counts("kvtier_tier_")["stored_blocks"]
    ratios = {
        name: statistics.median(ours / plain for ours, plain in zip(speeds[name], speeds["without"], strict=True))
        for name in ("kvtier", "fs")
    }
    return [
        at_least("nothing reused, kvtier: throughput of that without a connector", ratios["kvtier"], 0.98),
        Row("nothing reused, fs: throughput of that without a connector", ratios["fs"], ""),
        Row("nothing reused: throughput without", statistics.median(speeds["without"]), "tokens/s"),
        Row("nothing reused, kvtier: blocks stored", stored, "blocks"),
    ]
