"""What does it cost, at a request's end, to remember its prompt for `kvtier explain`?

Prompts of real lengths end, one after the other, on one thread; each call of `Explainer.on_ended` is timed. Freeing the
oldest ones' names is left out: without an explainer they would be freed when their request ends.
"""

import gc
import random
import statistics
import time
from array import array
from pathlib import Path

from bench.report import Effort, Row
from kvtier.engine.observability.explain.explainer import Explainer
from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.engine.scheduling.trail import Trail
from kvtier.tiers.device.ghosts import Ghosts
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.block_hash import BlockChain, ExtraKeys, Lora
from kvtier.tiers.naming.tier import Reason

BLOCK_SIZE = 16
VOCABULARY = 128_000
LENGTHS = (500, 8192, 131_072)
NUM_WARM_UPS = 5
MAX_MS = 0.3  # of the longest
ADAPTER = ExtraKeys(lora=Lora("legal", "a digest"))


def remembering_rows(effort: Effort, folder: Path) -> list[Row]:
    """Milliseconds by length, and with an adapter."""
    num_rounds = effort.of(20, quick=2)
    rows = []
    for num_tokens in LENGTHS:
        taken = _milliseconds(num_tokens, ExtraKeys(), num_rounds)
        name, limit = f"remembering a prompt of {num_tokens:,} tokens", MAX_MS if num_tokens == LENGTHS[-1] else None
        kept = None if limit is None else statistics.median(taken) <= limit
        rows.append(
            Row(name, statistics.median(taken), "ms", "" if limit is None else f"<= {limit}", kept, varies=True)
        )
        rows.append(Row(f"{name}, the fastest of {num_rounds}", min(taken), "ms"))
    taken = _milliseconds(LENGTHS[-1], ADAPTER, num_rounds)
    return [*rows, Row(f"the same of {LENGTHS[-1]:,} tokens, with an adapter", statistics.median(taken), "ms")]


def _milliseconds(num_tokens: int, extra: ExtraKeys, num_rounds: int) -> list[float]:
    explainer = Explainer(BLOCK_SIZE, {"model": "none"}, time.monotonic)
    rng, ghosts, taken = random.Random(num_tokens), Ghosts(8), []
    gc.collect()
    for number in range(NUM_WARM_UPS + num_rounds):
        chain = BlockChain(BLOCK_SIZE, extra)
        chain.extend(array("I", rng.choices(range(VOCABULARY), k=num_tokens)))
        tokens = TokenBalance(recomputed=num_tokens, reasons={Reason.NEVER_SEEN: num_tokens})
        record = RequestRecord(f"request-{number}", None, "none", time.time(), tokens)
        trail = Trail(BLOCK_SIZE, list(chain.names), misses=((num_tokens, Reason.NEVER_SEEN),))
        began_at = time.perf_counter()
        explainer.on_ended(record, trail, chain, ghosts)
        taken.append((time.perf_counter() - began_at) * 1e3)
    return taken[NUM_WARM_UPS:]
