"""Measures what a connector costs where nothing is cached: a prompt's first token, a decoding neighbour's tokens."""

import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreign.running import Vllm, make_model

from bench.connectors.connector_bed import Prompts
from bench.connectors.vllm_engines import Started, VllmEngines
from bench.report import Effort, Row
from bench.rounds import at_most, ratio_of

PROMPT_TOKENS = 3074
DECODING_TOKENS = 130  # of the neighbour's prompt
KV_BYTES = 48 << 20  # less than three prompts, and the neighbour's
WITHOUT, OURS = "without", "connector"
OPTIONS: dict[str, Any] = {"max_model_len": 4096, "kv_cache_memory_bytes": KV_BYTES}


@dataclass(frozen=True, slots=True)
class Asked:
    """The answers of one engine, in the order of the rounds."""

    alone: list[dict[str, Any]] = field(default_factory=list)  # see `Engine.generate` of vllm_engine.py
    beside: list[dict[str, Any]] = field(default_factory=list)  # see `Engine.beside`

    def ttft_s(self) -> list[float]:
        """Seconds until the first token of each prompt that was alone."""
        return [answer["ttft_s"][0] for answer in self.alone]

    def all_beside(self, key: str) -> list[float]:
        """All seconds of that name of the prompts that had a neighbour."""
        return [seconds for answer in self.beside for seconds in answer[key]]


_VLLM = VllmEngines(OPTIONS)
ENGINES: Mapping[str, Started] = {
    WITHOUT: _VLLM.alone,
    OURS: _VLLM.ours,
    "vLLM's offloading": _VLLM.native,
    "LMCache": _VLLM.lmcache,
}


def cold_rows(effort: Effort, python: str, folder: Path) -> list[Row]:
    """The same engine without a connector, with ours and with others, in turns; medians of pairs. vLLM has its default
    threads. Each prompt is asked alone, and one more while a neighbour decodes."""
    model = make_model(python, folder)
    prompts, decoding = Prompts(PROMPT_TOKENS), Prompts(DECODING_TOKENS, seed=2)
    asked = {name: Asked() for name in ENGINES}
    with ExitStack() as stack:
        engines: dict[str, Vllm] = {}
        for number, (name, started) in enumerate(ENGINES.items()):
            (own := folder / f"engine-{number}").mkdir()
            engines[name] = stack.enter_context(started(python, model, own))
        for number in range(effort.of(8, quick=2) + 1):
            alone, neighbour, beside = prompts.next(), decoding.next(), prompts.next()
            for name in sorted(engines, reverse=bool(number % 2)):
                first = engines[name].generate([alone], 1)
                second = engines[name].beside(neighbour, [beside])
                engines[name].settle()
                if number:  # the first ones take longer
                    asked[name].alone.append(first)
                    asked[name].beside.append(second)
        counts = engines[OURS].counts()
    if not counts.get("stored_blocks"):
        raise RuntimeError("nothing was stored")

    return [
        Row(_name("TTFT without"), 1e3 * statistics.median(asked[WITHOUT].ttft_s()), "ms"),
        Row(_name("TTFT beside a neighbour, without"), 1e3 * _median(asked[WITHOUT], "ttft_s"), "ms"),
        Row(_name("p99 between the neighbour's tokens, without"), 1e3 * _p99(asked[WITHOUT], "gaps_s"), "ms"),
        *(row for name in ENGINES if name != WITHOUT for row in _compared(name, asked[name], asked[WITHOUT])),
        Row(_name("blocks that were not stored"), _num_unstored(counts), "blocks"),
    ]


def _compared(name: str, ours: Asked, plain: Asked) -> list[Row]:
    """An engine's rows beside those of the one without a connector."""
    ttft = ratio_of(ours.ttft_s(), plain.ttft_s())
    cpu = ratio_of([each["cpu_s"] for each in ours.alone], [each["cpu_s"] for each in plain.alone])
    slowest_ms = [1e3 * each["slowest_hooks_s"] for each in ours.alone]
    ratios = {"TTFT": ttft, "CPU seconds": cpu}
    return [
        *(
            at_most(_name(f"{what} of that without, {name}"), ratio, "", 1.1)
            if name == OURS
            else Row(_name(f"{what} of that without, {name}"), ratio, "")
            for what, ratio in ratios.items()
        ),
        Row(
            _name(f"TTFT of that without, beside a neighbour, {name}"),
            ratio_of(ours.all_beside("ttft_s"), plain.all_beside("ttft_s")),
            "",
        ),
        Row(
            _name(f"time of the neighbour's tokens of that without, {name}"),
            ratio_of([sum(each["gaps_s"]) for each in ours.beside], [sum(each["gaps_s"]) for each in plain.beside]),
            "",
        ),
        Row(_name(f"p99 between the neighbour's tokens, {name}"), 1e3 * _p99(ours, "gaps_s"), "ms"),
        Row(_name(f"hooks in the slowest step of a prompt, median, {name}"), statistics.median(slowest_ms), "ms"),
        Row(_name(f"hooks in the slowest step of all prompts, {name}"), max(slowest_ms), "ms"),
        Row(_name(f"hooks of a step beside a neighbour, median, {name}"), 1e3 * _median(ours, "hooks_s"), "ms"),
        Row(_name(f"hooks of a step beside a neighbour, p99, {name}"), 1e3 * _p99(ours, "hooks_s"), "ms"),
    ]


def _name(what: str) -> str:
    return f"cold, {PROMPT_TOKENS} tokens: {what}"


def _median(asked: Asked, key: str) -> float:
    return statistics.median(asked.all_beside(key))


def _p99(asked: Asked, key: str) -> float:
    return statistics.quantiles(asked.all_beside(key), n=100, method="inclusive")[98]


def _num_unstored(counts: dict[str, int]) -> int:
    return sum(number for name, number in counts.items() if name.startswith("unstored_blocks"))
