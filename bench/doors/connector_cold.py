"""What does the connector add to the first token of a prompt that nothing is found of?"""

import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from foreign.running import Vllm, make_model

from bench.doors.connector_bed import Prompts, started_sidecar, started_vllm
from bench.report import Effort, Row

PROMPT_TOKENS = 3074
KV_BYTES = 24 << 20  # less than two prompts


def cold_rows(effort: Effort, python: str, folder: Path) -> list[Row]:
    """The same engine with and without the connector, in turns; medians of pairs. vLLM has its default threads."""
    model, prompts = make_model(python, folder), Prompts(PROMPT_TOKENS)
    sidecar, socket = started_sidecar(folder)
    asked: dict[str, list[dict[str, Any]]] = {"without": [], "connector": []}
    with ExitStack() as stack:
        stack.enter_context(sidecar)
        engines = {name: stack.enter_context(_started(python, model, socket, name)) for name in asked}
        for number in range(effort.of(12, quick=2) + 1):
            prompt = prompts.next()
            for name in sorted(engines, reverse=bool(number % 2)):
                answer = engines[name].generate([prompt], 1)
                if number:  # the first one takes longer
                    asked[name].append(answer)
        counts = engines["connector"].counts()
    if not counts.get("stored_blocks"):
        raise RuntimeError("nothing was stored")

    pairs = list(zip(asked["connector"], asked["without"], strict=True))
    ttft = statistics.median(ours["ttft_s"][0] / plain["ttft_s"][0] for ours, plain in pairs)
    cpu = statistics.median(ours["cpu_s"] / plain["cpu_s"] for ours, plain in pairs)
    hooks_ms = [1e3 * ours["slowest_hooks_s"] for ours, _ in pairs]
    return [
        Row(f"cold, {PROMPT_TOKENS} tokens: TTFT without", 1e3 * _median(asked["without"], "ttft_s"), "ms"),
        Row(f"cold, {PROMPT_TOKENS} tokens: TTFT of that without a connector", ttft, ""),
        Row(f"cold, {PROMPT_TOKENS} tokens: CPU seconds of that without a connector", cpu, ""),
        Row(
            f"cold, {PROMPT_TOKENS} tokens: hooks in the slowest step of a prompt, median",
            statistics.median(hooks_ms),
            "ms",
        ),
        Row(f"cold, {PROMPT_TOKENS} tokens: hooks in the slowest step of all prompts", max(hooks_ms), "ms"),
        Row(f"cold, {PROMPT_TOKENS} tokens: blocks that were not stored", _num_unstored(counts), "blocks"),
    ]


def _num_unstored(counts: dict[str, int]) -> int:
    return sum(number for name, number in counts.items() if name.startswith("unstored_blocks"))


def _started(python: str, model: Path, socket: str, name: str) -> Vllm:
    path = socket if name == "connector" else None
    return started_vllm(python, model, path, max_model_len=4096, kv_cache_memory_bytes=KV_BYTES)


def _median(answers: list[dict[str, Any]], key: str) -> float:
    return statistics.median(answer[key][0] for answer in answers)
