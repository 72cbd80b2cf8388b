"""What does the connector cost where nothing is ever reused?"""

import statistics
from pathlib import Path

from foreign.running import Vllm, make_model

from bench.doors.connector_bed import Prompts, started_sidecar, started_vllm
from bench.report import Row
from bench.rounds import at_least

PROMPT_TOKENS = 1026
NUM_PROMPTS = 8  # at once
NUM_TOKENS = 32
ROUNDS = 9


def cost_rows(python: str, folder: Path) -> list[Row]:
    """Throughput with and without the connector, in turns on one machine; the median of pairs."""
    model, prompts = make_model(python, folder), Prompts(PROMPT_TOKENS)
    sidecar, socket = started_sidecar(folder)
    with (
        sidecar,
        started_vllm(python, model, None) as plain,
        started_vllm(python, model, socket) as connected,
    ):
        for engine in (plain, connected):
            tokens_per_s(engine, prompts)
        pairs = []
        for number in range(ROUNDS):
            order = (plain, connected) if number % 2 else (connected, plain)
            speeds = {engine: tokens_per_s(engine, prompts) for engine in order}
            pairs.append((speeds[connected], speeds[plain]))
        stored = connected.counts()["stored_blocks"]
    ratio = statistics.median(connected / plain for connected, plain in pairs)
    return [
        at_least("nothing reused: throughput of that without a connector", ratio, 0.98),
        Row("nothing reused: throughput without", statistics.median(plain for _, plain in pairs), "tokens/s"),
        Row("nothing reused: blocks stored", stored, "blocks"),
    ]


def tokens_per_s(engine: Vllm, prompts: Prompts) -> float:
    """Prompt and generated tokens of one batch of new prompts, each second."""
    answer = engine.generate([prompts.next() for _ in range(NUM_PROMPTS)], NUM_TOKENS)
    return float(NUM_PROMPTS * (PROMPT_TOKENS + NUM_TOKENS) / answer["took_s"])
