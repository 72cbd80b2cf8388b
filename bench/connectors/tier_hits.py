"""How soon is a long prompt computed whose blocks are on disk, below vLLM's own offloading: kvtier's tier beside vLLM's
`fs`?"""

import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from foreign.running import Vllm, make_model

from bench.connectors.connector_bed import Prompts
from bench.connectors.tier_bed import TIERS, forget_pages, started
from bench.report import Effort, Row
from bench.rounds import at_least, at_most

Asked = dict[str, list[Any]]


def tier_rows(effort: Effort, python: str, folder: Path) -> list[Row]:
    """Prompts cold, then from disk in turns, with files that are still in the page cache and with such that are not,
    which those after a restart are not either. Medians of pairs."""
    prompt_tokens, num_prompts, num_rounds = effort.of((8194, 5, 3), quick=(2050, 2, 1))
    model, prompts = make_model(python, folder), Prompts(prompt_tokens)
    asked = [prompts.next() for _ in range(num_prompts)]
    with ExitStack() as stack:
        engines = {name: stack.enter_context(started(python, model, name, folder)) for name in TIERS}
        for engine in engines.values():
            engine.generate([prompts.next()])  # what comes first takes longer
        cold = _ask(engines, asked, None)
        _ask(engines, asked, None)  # as does what is read first
        cached = _ask_often(engines, asked, None, num_rounds)
        disk = _ask_often(engines, asked, folder, num_rounds)
    with ExitStack() as stack:
        engines = {name: stack.enter_context(started(python, model, name, folder)) for name in TIERS}
        for engine in engines.values():
            engine.generate([prompts.next()])
        restarted = _ask(engines, asked, folder)
    return [
        *_disk_rows("disk", disk),
        *_disk_rows("page cache", cached),
        *_new_rows(cold),
        Row(f"cold, {prompt_tokens} tokens: TTFT", 1e3 * statistics.median(_ttft(cold["kvtier"])), "ms"),
        *_restart_rows(cold, restarted),
    ]


def _ask_often(engines: dict[str, Vllm], asked: list[list[int]], folder: Path | None, num_rounds: int) -> Asked:
    """All answers of several rounds. Without *folder* files stay in the page cache, where writing has left them."""
    seen: Asked = {name: [] for name in engines}
    for _ in range(num_rounds):
        for name, answers in _ask(engines, asked, folder).items():
            seen[name] += answers
    return seen


def _ask(engines: dict[str, Vllm], asked: list[list[int]], folder: Path | None) -> Asked:
    """Each prompt at each engine, in turns, once nothing of them is in the engines' memory."""
    answers: Asked = {name: [] for name in engines}
    for name, engine in engines.items():
        engine.forget()
        if folder is not None:
            forget_pages(folder / name)
    for number, prompt in enumerate(asked):
        for name in sorted(engines, reverse=bool(number % 2)):
            before = _read(name, engines[name])
            answers[name].append(engines[name].generate([prompt]))
            engines[name].settle()
            num_bytes, took_s = (now - then for now, then in zip(_read(name, engines[name]), before, strict=True))
            answers[name][-1]["promoted_gb_per_s"] = num_bytes / took_s / 1e9 if num_bytes else 0.0
    return answers


def _disk_rows(where: str, disk: Asked) -> list[Row]:
    speeds = {name: [each["promoted_gb_per_s"] for each in seen] for name, seen in disk.items()}
    rows = [Row(f"{where}, {name}: promoted", statistics.median(seen), "GB/s") for name, seen in speeds.items()]
    rows.append(at_least(f"{where}: promoted, of fs", _ratio(speeds["kvtier"], speeds["fs"]), 1.5))
    rows += [Row(f"{where}, {name}: TTFT", 1e3 * statistics.median(_ttft(disk[name])), "ms") for name in disk]
    rows.append(at_most(f"{where}: TTFT, of fs", _ratio(_ttft(disk["kvtier"]), _ttft(disk["fs"])), "", 0.8))
    steps = _steps(disk)
    rows += [Row(f"{where}, {name}: steps until it is computed", number, "steps") for name, number in steps.items()]
    is_fewer = steps["kvtier"] < steps["fs"]
    return [*rows, Row(f"{where}: fewer steps than fs", is_fewer, "", "1", is_fewer, varies=True)]


def _new_rows(cold: Asked) -> list[Row]:
    return [Row(f"new, {name}: steps until it is computed", n, "steps") for name, n in _steps(cold).items()]


def _restart_rows(cold: Asked, restarted: Asked) -> list[Row]:
    rows = []
    for name, seen in restarted.items():
        ratio = _ratio(_ttft(seen), _ttft(cold[name]))
        is_equal = all(s["tokens"] == c["tokens"] for s, c in zip(seen, cold[name], strict=True))
        of_cold = f"restart, {name}: TTFT, of cold"
        rows += [
            Row(f"restart, {name}: TTFT", 1e3 * statistics.median(_ttft(seen)), "ms"),
            at_most(of_cold, ratio, "", 0.1) if name == "kvtier" else Row(of_cold, ratio, ""),
            at_most(
                f"restart, {name}: tokens computed, at most",
                max(s["scheduled"] for s in seen),
                "tokens",
                2,
                varies=False,
            ),
            Row(f"restart, {name}: outputs equal", is_equal, "", "1", is_equal),
        ]
    return rows


def _read(name: str, engine: Vllm) -> tuple[float, float]:
    """Bytes from disk so far and the seconds of their jobs, from the beginning to the end of each, as vLLM counts."""
    counted, tier = engine.offloading(), "KVTier" if name == "kvtier" else name
    return counted.get(f"tiering_read_bytes 1:{tier}", 0.0), counted.get(f"tiering_read_time 1:{tier}", 0.0)


def _steps(seen: Asked) -> dict[str, float]:
    return {name: statistics.median(each["steps_before"] for each in answers) for name, answers in seen.items()}


def _ttft(seen: list[Any]) -> list[float]:
    return [each["ttft_s"][0] for each in seen]


def _ratio(ours: list[float], others: list[float]) -> float:
    return statistics.median(mine / theirs for mine, theirs in zip(ours, others, strict=True))
