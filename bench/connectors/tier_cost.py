"""What does kvtier's tier below vLLM's own offloading cost where nothing is ever reused?"""

import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from foreign.running import Vllm, make_model

from bench.connectors.connector_bed import started_vllm
from bench.connectors.connector_cost import MAX_TOKENS, SERVED, TINY, median_ratio, speeds_of
from bench.connectors.tier_bed import KV_BYTES, started
from bench.report import Effort, Row
from bench.rounds import at_least


def tier_cost_rows(effort: Effort, python: str, folder: Path) -> list[Row]:
    """Throughput without a connector, with kvtier's tier and with vLLM's `fs`, in turns; medians of pairs."""

    def started_all(stack: ExitStack, model: Path, start: str) -> Mapping[str, Vllm]:
        (place := folder / start).mkdir()
        return {
            "without": stack.enter_context(
                started_vllm(python, model, None, max_model_len=MAX_TOKENS, kv_cache_memory_bytes=KV_BYTES)
            ),
            "kvtier": stack.enter_context(started(python, model, "kvtier", place, max_model_len=MAX_TOKENS)),
            "fs": stack.enter_context(started(python, model, "fs", place, max_model_len=MAX_TOKENS)),
        }

    rows = []
    for load, what in ((SERVED, ""), (TINY, ", a model of 4 layers")):
        speeds = speeds_of(load.sized(effort), make_model(python, folder, load.kind), started_all)
        for name in ("kvtier", "fs"):
            row, ratio = (
                f"nothing reused{what}, {name}: throughput of that without a connector",
                median_ratio(speeds, name),
            )
            rows.append(at_least(row, ratio, 0.98) if (load, name) == (SERVED, "kvtier") else Row(row, ratio, ""))
        rows.append(Row(f"nothing reused{what}: throughput without", statistics.median(speeds["without"]), "tokens/s"))
    return rows
