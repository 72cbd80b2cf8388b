"""How soon is the first token of a long prompt after a restart of all, when its blocks are on disk?"""

import statistics
from pathlib import Path

from foreign.running import make_model

from bench.connectors.connector_bed import Prompts, started_sidecar, started_vllm
from bench.report import Effort, Row
from bench.rounds import at_most


def hit_rows(effort: Effort, python: str, folder: Path) -> list[Row]:
    """The same prompts cold, after a reset of vLLM, and after a restart of vLLM and the sidecar; medians of pairs."""
    prompt_tokens, num_rounds = effort.of((8194, 5), quick=(1026, 1))
    model, prompts = make_model(python, folder), Prompts(prompt_tokens)
    asked = [prompts.next() for _ in range(num_rounds)]
    sidecar, socket = started_sidecar(folder)
    with sidecar:
        with started_vllm(python, model, socket, kv_cache_memory_bytes=256 << 20) as first:
            first.generate([prompts.next()])  # what comes first takes longer
            cold = [first.generate([prompt]) for prompt in asked]
            first.reset()
            host = [first.generate([prompt]) for prompt in asked]
        sidecar.stop()
        sidecar.start()
        with started_vllm(python, model, socket, kv_cache_memory_bytes=256 << 20) as second:
            second.generate([prompts.next()])
            disk = [second.generate([prompt]) for prompt in asked]
    rows = [Row(f"cold, {prompt_tokens} tokens: TTFT", 1e3 * _ttft(cold), "ms")]
    for name, seen in (("host", host), ("disk, after a restart of both", disk)):
        ratio = statistics.median(s["ttft_s"][0] / c["ttft_s"][0] for s, c in zip(seen, cold, strict=True))
        rows.append(Row(f"{name}: TTFT", 1e3 * _ttft(seen), "ms"))
        rows.append(at_most(f"{name}: TTFT of cold", ratio, "", 0.1))
        rows.append(
            at_most(
                f"{name}: tokens computed, at most", max(each["scheduled"] for each in seen), "tokens", 2, varies=False
            )
        )
        is_equal = all(s["tokens"] == c["tokens"] for s, c in zip(seen, cold, strict=True))
        rows.append(Row(f"{name}: outputs equal", is_equal, "", "1", is_equal))
    return rows


def _ttft(seen: list[dict[str, list[float]]]) -> float:
    return statistics.median(each["ttft_s"][0] for each in seen)
