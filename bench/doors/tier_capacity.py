"""How much of the disk is taken while twenty times its capacity runs through it, below vLLM's own offloading?"""

from pathlib import Path

from foreign.offloading import fs_tier, kvtier_tier, offloading_vllm
from foreign.running import make_model

from bench.doors.connector_bed import Prompts
from bench.doors.tier_bed import taken_bytes
from bench.report import Row
from bench.rounds import at_least, at_most

CAPACITY_BYTES = 32 << 20
CHURN = 20  # times the capacity
PROMPT_TOKENS = 1026
PROMPTS_AT_ONCE = 4
WRITTEN = "tiering_write_bytes 1:"


def tier_capacity_rows(python: str, folder: Path) -> list[Row]:
    """What is taken at most, looked at after each few prompts: of kvtier's tier, and of vLLM's `fs` beside it."""
    model, rows = make_model(python, folder), []
    for name, kind in (("kvtier", "KVTier"), ("fs", "fs")):
        store, prompts, most, written = folder / f"churned-{name}", Prompts(PROMPT_TOKENS), 0, 0.0
        tier = kvtier_tier(store, str(CAPACITY_BYTES)) if name == "kvtier" else fs_tier(store)
        with offloading_vllm(python, model, [tier]) as engine:
            while written < CHURN * CAPACITY_BYTES:
                engine.generate([prompts.next() for _ in range(PROMPTS_AT_ONCE)], 1)
                engine.settle()
                most = max(most, taken_bytes(store))
                written = engine.offloading().get(f"{WRITTEN}{kind}", 0.0)
        of_capacity = f"churn, {name}: taken at most, of the capacity"
        rows += [
            at_least(f"churn, {name}: written, of the capacity", written / CAPACITY_BYTES, CHURN),
            at_most(of_capacity, most / CAPACITY_BYTES, "", 1)
            if name == "kvtier"
            else Row(of_capacity, most / CAPACITY_BYTES, ""),
        ]
    return rows
