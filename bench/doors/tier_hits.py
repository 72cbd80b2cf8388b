"""How soon is a long prompt computed whose blocks are on disk, below vLLM's own offloading: kvtier's tier beside vLLM's
`fs`?"""

import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from foreign.running import Vllm, make_model

from bench.doors.connector_bed import Prompts
from bench.doors.tier_bed import TIERS, forget_pages, started
from bench.report import Row
from bench.rounds import at_least, at_most

PROMPT_TOKENS = 8194
NUM_PROMPTS = 5
ROUNDS = 3

Asked = dict[str, list[Any]]


def tier_rows(python: str, folder: Path) -> list[Row]:
    """Prompts cold, then from disk in turns, then after a restart; no file is in the page cache. Medians of pairs."""
    model, prompts = make_model(python, folder), Prompts(PROMPT_TOKENS)
    asked = [prompts.next() for _ in range(NUM_PROMPTS)]
    with ExitStack() as stack:
        engines = {name: stack.enter_context(started(python, model, name, folder)) for name in TIERS}
        for engine in engines.values():
            engine.generate([prompts.next()])  # what comes first takes longer
        cold = _ask(engines, asked, folder)
        _ask(engines, asked, folder)  # as does what is read first
        before = {name: engine.offloading() for name, engine in engines.items()}
        disk: Asked = {name: [] for name in engines}
        for _ in range(ROUNDS):
            for name, answers in _ask(engines, asked, folder).items():
                disk[name] += answers
        speeds = {name: _promoted_gb_per_s(name, engine, before[name]) for name, engine in engines.items()}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(started(python, model, name, folder)) for name in TIERS}
        for engine in engines.values():
            engine.generate([prompts.next()])
        restarted = _ask(engines, asked, folder)
    return [
        *_disk_rows(cold, disk, speeds),
        *_restart_rows(cold, restarted),
    ]


def _ask(engines: dict[str, Vllm], asked: list[list[int]], folder: Path) -> Asked:
    """Each prompt at each engine, in turns, once nothing of them is in memory."""
    answers: Asked = {name: [] for name in engines}
    for name, engine in engines.items():
        engine.forget()
        forget_pages(folder / name)
    for number, prompt in enumerate(asked):
        for name in sorted(engines, reverse=bool(number % 2)):
            answers[name].append(engines[name].generate([prompt]))
            engines[name].settle()
    return answers


def _disk_rows(cold: Asked, disk: Asked, speeds: dict[str, float]) -> list[Row]:
    rows = [Row(f"disk, {name}: promoted", speed, "GB/s") for name, speed in speeds.items()]
    rows.append(at_least("disk: promoted, of fs", speeds["kvtier"] / speeds["fs"], 1.5))
    rows += [Row(f"disk, {name}: TTFT", 1e3 * statistics.median(_ttft(disk[name])), "ms") for name in disk]
    rows.append(at_most("disk: TTFT, of fs", _ratio(_ttft(disk["kvtier"]), _ttft(disk["fs"])), "", 0.8))
    steps = {name: statistics.median(each["steps_before"] for each in seen) for name, seen in disk.items()}
    rows += [Row(f"disk, {name}: steps until it is computed", number, "steps") for name, number in steps.items()]
    rows.append(Row("disk: fewer steps than fs", steps["kvtier"] < steps["fs"], "", "1", steps["kvtier"] < steps["fs"]))
    new = {name: statistics.median(each["steps_before"] for each in seen) for name, seen in cold.items()}
    return [*rows, *(Row(f"new, {name}: steps until it is computed", number, "steps") for name, number in new.items())]


def _restart_rows(cold: Asked, restarted: Asked) -> list[Row]:
    rows = []
    for name, seen in restarted.items():
        ratio = _ratio(_ttft(seen), _ttft(cold[name]))
        is_equal = all(s["tokens"] == c["tokens"] for s, c in zip(seen, cold[name], strict=True))
        of_cold = f"restart, {name}: TTFT, of cold"
        rows += [
            Row(f"restart, {name}: TTFT", 1e3 * statistics.median(_ttft(seen)), "ms"),
            at_most(of_cold, ratio, "", 0.1) if name == "kvtier" else Row(of_cold, ratio, ""),
            at_most(f"restart, {name}: tokens computed, at most", max(s["scheduled"] for s in seen), "tokens", 2),
            Row(f"restart, {name}: outputs equal", is_equal, "", "1", is_equal),
        ]
    return [Row(f"cold, {PROMPT_TOKENS} tokens: TTFT", 1e3 * statistics.median(_ttft(cold["kvtier"])), "ms"), *rows]


def _promoted_gb_per_s(name: str, engine: Vllm, before: dict[str, float]) -> float:
    """By vLLM's own counters, since *before*: of jobs, from their beginning to their end."""
    after = engine.offloading()
    num_bytes, took_s = (
        after[key] - before.get(key, 0)
        for key in (f"tiering_read_{what} 1:{'KVTier' if name == 'kvtier' else name}" for what in ("bytes", "time"))
    )
    return num_bytes / took_s / 1e9


def _ttft(seen: list[Any]) -> list[float]:
    return [each["ttft_s"][0] for each in seen]


def _ratio(ours: list[float], others: list[float]) -> float:
    return statistics.median(mine / theirs for mine, theirs in zip(ours, others, strict=True))
