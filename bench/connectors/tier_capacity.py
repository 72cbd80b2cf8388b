"""How much of the disk is taken while twenty times its capacity runs through it, below vLLM's own offloading?"""

from pathlib import Path

from foreign.offloading import fs_tier, kvtier_tier, offloading_vllm
from foreign.running import make_model

from bench.connectors.connector_bed import Prompts
from bench.connectors.tier_bed import taken_bytes
from bench.report import Effort, Row
from bench.rounds import at_least, at_most

CAPACITY_BYTES = 32 << 20
PROMPT_TOKENS = 1026
PROMPTS_AT_ONCE = 4
WRITTEN = "tiering_write_bytes 1:"


def tier_capacity_rows(effort: Effort, python: str, folder: Path) -> list[Row]:
    """What is taken at most, looked at after each few prompts: of kvtier's tier, and of vLLM's `fs` beside it."""
    churn = effort.of(20, quick=2)  # times the capacity
    model, rows = make_model(python, folder), []
    for name, kind in (("kvtier", "KVTier"), ("fs", "fs")):
        store, prompts, limit, written = folder / f"churned-{name}", Prompts(PROMPT_TOKENS), 0, 0.0
        tier = kvtier_tier(store, str(CAPACITY_BYTES)) if name == "kvtier" else fs_tier(store)
        with offloading_vllm(python, model, [tier]) as engine:
            while written < churn * CAPACITY_BYTES:
                engine.generate([prompts.next() for _ in range(PROMPTS_AT_ONCE)], 1)
                engine.settle()
                limit = max(limit, taken_bytes(store))
                written = engine.offloading().get(f"{WRITTEN}{kind}", 0.0)
        of_capacity = f"churn, {name}: taken at most, of the capacity"
        rows += [
            at_least(f"churn, {name}: written, of the capacity", written / CAPACITY_BYTES, churn, varies=False),
            at_most(of_capacity, limit / CAPACITY_BYTES, "", 1, varies=False)
            if name == "kvtier"
            else Row(of_capacity, limit / CAPACITY_BYTES, ""),
        ]
    return rows
