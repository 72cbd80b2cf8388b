"""What does a hit through the sidecar cost beside one in this process, and has one engine another one's blocks?"""

import statistics
from pathlib import Path
from typing import Any

from bench.attached.engine_process import EngineProcess
from bench.attached.sidecar_process import sidecar_process
from bench.report import Effort, Row
from bench.rounds import at_most, never

BLOCK_SIZE = 16
DEVICE_BYTES = 5 << 10  # for a token: one document and a little
HOST = "1GiB"


def reuse_rows(effort: Effort, folder: Path) -> list[Row]:
    """Two engines that answer alternately, one with its host memory in its own process; then two on one sidecar."""
    num_documents, num_tokens = effort.of((4, 8000), quick=(4, 1000))
    with sidecar_process(folder, host=HOST, disk=None) as sidecar:
        common = {
            "device": {"capacity": num_tokens * DEVICE_BYTES, "block_size": BLOCK_SIZE},
            "scheduler": {"load": "always"},
        }
        engines = {
            "in its process": EngineProcess({**common, "host": {"capacity": HOST}}),
            "sidecar": EngineProcess({**common, "sidecar": sidecar.url}),
        }
        try:
            rows = _hit_rows(engines, num_documents, num_tokens)
            other = EngineProcess({**common, "sidecar": sidecar.url})
            engines["other"] = other
            engines["sidecar"].settle()
            answers = [other.ask(seed, num_tokens) for seed in range(num_documents)]
        finally:
            for engine in engines.values():
                engine.kill()
    found = min((each["host"] + each["disk"]) / each["num_tokens"] for each in answers)
    wrong = sum(not each["is_right"] for each in answers)
    return [
        *rows,
        Row(
            "two engines: tokens of a cold question that the other had stored, least",
            100 * found,
            "%",
            ">= 95",
            found >= 0.95,
        ),
        never("two engines: wrong answers", wrong),
    ]


def _hit_rows(engines: dict[str, EngineProcess], num_documents: int, num_tokens: int) -> list[Row]:
    cold: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    again: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for seen, fact in ((cold, 0), (again, 1), (again, 2), (again, 3)):
        for seed in range(num_documents):
            for name in list(engines) if seed % 2 else list(engines)[::-1]:
                seen[name].append(engines[name].ask(seed, num_tokens, fact))
                engines[name].settle()
    hosts = {
        name: [each for each in answers if each["host"] >= 0.9 * each["num_tokens"]] for name, answers in again.items()
    }
    here, there = (statistics.median(each["ttft_s"] for each in hosts[name]) for name in engines)
    answers = [each for seen in (cold, again) for own in seen.values() for each in own]
    wrong = sum(not each["is_right"] for each in answers)
    ratio = there / here
    return [
        at_most(f"host hit, {num_tokens // 1000}k tokens: TTFT of the same in one process", ratio, "", 1.1),
        Row("  in one process", 1e3 * here, "ms"),
        Row("  through the sidecar", 1e3 * there, "ms"),
        Row("  hits of whole documents", len(hosts["sidecar"]), f"of {len(again['sidecar'])}"),
        Row("  cold", 1e3 * statistics.median(each["ttft_s"] for each in cold["sidecar"]), "ms"),
        never("  wrong answers", wrong, f"of {len(answers)}"),
    ]
