"""What does the connector cost where nothing is ever reused?"""

import statistics
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from foreign.running import Vllm, make_model

from bench.connectors.connector_bed import Prompts, started_sidecar, started_vllm
from bench.connectors.tier_bed import KV_BYTES
from bench.report import Effort, Row
from bench.rounds import at_least


@dataclass(frozen=True, slots=True)
class Load:
    """Batches of prompts that have nothing in common, for one model."""

    kind: str  # of vllm_model.py
    prompt_tokens: int
    num_prompts: int  # at once
    num_tokens: int  # that are generated of each
    num_starts: int  # of the engines: two of one kind differ by some 2 % as long as they live
    num_rounds: int  # with each

    def speed(self, engine: Vllm, prompts: Prompts) -> float:
        """Prompt and generated tokens of one batch of new prompts, each second."""
        answer = engine.generate([prompts.next() for _ in range(self.num_prompts)], self.num_tokens)
        return float(self.num_prompts * (self.prompt_tokens + self.num_tokens) / answer["took_s"])

    def sized(self, effort: Effort) -> "Load":
        """Return the load itself for a measurement, or a small one of the same prompts for a quick run."""
        return effort.of(self, quick=replace(self, num_prompts=1, num_tokens=2, num_starts=1, num_rounds=1))


SERVED = Load("smol", 514, 4, 16, num_starts=3, num_rounds=3)  # the shape of the smallest model that people serve
TINY = Load("llama", 1026, 8, 32, num_starts=3, num_rounds=6)  # steps of 15 ms, in which little is computed

MAX_TOKENS = 4096  # of a request: the larger model's have to fit into `KV_BYTES`

Started = Callable[[ExitStack, Path, str], Mapping[str, Vllm]]
"""Engines by name, one of them `without`, for the model in that folder; the stack ends them; the text: which start."""


def cost_rows(effort: Effort, python: str, folder: Path) -> list[Row]:
    """Throughput with and without the connector, in turns on one machine; the median of pairs."""

    def started(stack: ExitStack, model: Path, start: str) -> Mapping[str, Vllm]:
        (place := folder / start).mkdir()
        sidecar, socket = started_sidecar(place)
        stack.enter_context(sidecar)
        return {
            "without": stack.enter_context(
                started_vllm(python, model, None, max_model_len=MAX_TOKENS, kv_cache_memory_bytes=KV_BYTES)
            ),
            "connector": stack.enter_context(
                started_vllm(python, model, socket, max_model_len=MAX_TOKENS, kv_cache_memory_bytes=KV_BYTES)
            ),
        }

    rows = []
    for load, what in ((SERVED, ""), (TINY, ", a model of 4 layers")):
        speeds = speeds_of(load.sized(effort), make_model(python, folder, load.kind), started)
        name = f"nothing reused{what}: throughput of that without a connector"
        ratio = median_ratio(speeds, "connector")
        rows.append(at_least(name, ratio, 0.98) if load is SERVED else Row(name, ratio, ""))
        rows.append(Row(f"nothing reused{what}: throughput without", statistics.median(speeds["without"]), "tokens/s"))
    return rows


def speeds_of(load: Load, model: Path, started: Started) -> Mapping[str, list[float]]:
    """Tokens a second of each engine, in turns, with engines started anew several times. What has nothing stored would
    cost nothing: RuntimeError if one of ours has not stored."""
    speeds: dict[str, list[float]] = {}
    prompts = Prompts(load.prompt_tokens)
    for start in range(load.num_starts):
        with ExitStack() as stack:
            engines = started(stack, model, f"{load.kind}-{start}")
            for engine in engines.values():
                load.speed(engine, prompts)
            for number in range(load.num_rounds):
                for name in sorted(engines, reverse=bool((start + number) % 2)):
                    speeds.setdefault(name, []).append(load.speed(engines[name], prompts))
                    engines[name].settle()
            _check_stored(engines)
    return speeds


def median_ratio(speeds: Mapping[str, list[float]], name: str) -> float:
    """The median of pairs."""
    return statistics.median(ours / plain for ours, plain in zip(speeds[name], speeds["without"], strict=True))


def _check_stored(engines: Mapping[str, Vllm]) -> None:
    for name, prefix in (("connector", "kvtier_vllm_"), ("kvtier", "kvtier_tier_")):
        if name in engines and not engines[name].counts(prefix).get("stored_blocks"):
            raise RuntimeError(f"{name}: nothing was stored")
