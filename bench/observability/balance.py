"""Do device, host, disk and recomputed tokens add up to the prompt, of each request and of all, whatever goes wrong?

Whole engines over small models live in a world of mishaps: copies that fail, hang and come in any order, damaged blocks
in host memory and on disk, a disk that is full or gone, requests that are aborted, preempted, split, late, that skip
the cache or have a salt or an adapter. Then engines come and go at a sidecar's endpoint for LMCache's client, over a
segment too small for what they store. The record that each request leaves is compared with its prompt.
"""

import logging
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import fuzzed_engine
import pytest
import torch
from endpoint_play import play
from fuzzed_engine import FuzzedEngine
from lmcache_bed import lmcache_bed
from lora_adapters import ADAPTERS, save_adapter
from small_models import COMMON
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from bench.report import Effort, Row
from bench.rounds import never
from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.store.memory_store import MemoryStore
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.tier import Reason

SLOW_COPY_S = 0.001
ENGINE_STEPS = 1000  # things that happen to one engine
ENDPOINT_STEPS = 500
ENDPOINT_RECORD_BYTES = 4608  # on disk
SMALL = {**COMMON, "num_hidden_layers": 2, "initializer_range": 0.2}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SMALL, sliding_window=20, layer_types=["sliding_attention", "full_attention"])
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=20)),
}
# What the requests must have met, for the sums to show anything.
MET = ("aborted", "preempted", "split", "corrupt", "cost", "deadline", "failed", "scored", "skipped")
MET_AT_ENDPOINT = ("capacity", "corrupt")
REASONS = tuple(reason.value for reason in Reason)  # of which each has a row, met or not


@dataclass
class Sums:
    """What has been compared so far."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    tokens: TokenBalance = field(default_factory=TokenBalance)
    num_unequal: int = 0  # requests whose tokens are not their prompt
    num_unexplained: int = 0  # computed tokens without a reason, and reasons without a token
    met: Counter[str] = field(default_factory=Counter)

    def add(self, record: RequestRecord, num_prompt_tokens: int) -> None:
        """Compare a request's record with its prompt."""
        tokens = record.tokens
        whole = tokens.device + tokens.host + tokens.disk + tokens.recomputed
        self.num_requests += 1
        self.num_prompt_tokens += num_prompt_tokens
        self.tokens = self.tokens.plus(tokens)
        parts = [tokens.device, tokens.host, tokens.disk, tokens.recomputed, *tokens.reasons.values()]
        self.num_unequal += whole != num_prompt_tokens or min(parts) < 0
        self.num_unexplained += abs(tokens.recomputed - sum(tokens.reasons.values()))
        self.met.update(reason.value for reason, number in tokens.reasons.items() if number)
        if record.num_preempted:
            self.met["preempted"] += 1


def balance_rows(effort: Effort, folder: Path) -> list[Row]:
    """The sums of engines' requests, and of lookups at a sidecar's endpoint."""
    logging.getLogger("kvtier").setLevel(logging.ERROR)  # mishaps are what this is about
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of models so small that threads only wait for each other
    engines = _of_engines(folder, effort.of(2000, quick=40))
    torch.set_num_threads(num_threads)
    return [
        *_rows("engine", engines, MET),
        *_rows("LMCache's endpoint", _of_endpoint(folder, effort.of(1000, quick=40)), MET_AT_ENDPOINT),
    ]


def _rows(where: str, sums: Sums, must_meet: tuple[str, ...]) -> list[Row]:
    whole = sums.tokens.num_tokens
    num_met = sum(sums.met[what] > 0 for what in must_meet)
    rows = [
        Row(f"{where}: requests", sums.num_requests, ""),
        never(f"{where}: requests whose tokens are not their prompt", sums.num_unequal),
        Row(f"{where}: prompt tokens in all", sums.num_prompt_tokens, "tokens"),
        Row(f"{where}: device + host + disk + recomputed", whole, "tokens", "=", whole == sums.num_prompt_tokens),
        never(f"{where}: tokens without a reason", sums.num_unexplained, "tokens"),
    ]
    rows += [
        Row(f"{where}: {tier} tokens", getattr(sums.tokens, tier), "tokens") for tier in ("device", "host", "disk")
    ]
    rows += [
        Row(f"{where}: requests that met {what}", sums.met[what], "")
        for what in sorted({*REASONS, *sums.met, *must_meet})
    ]
    return [
        *rows,
        Row(f"{where}: mishaps met", num_met, "", f"{len(must_meet)}", num_met == len(must_meet), varies=True),
    ]


def _of_engines(folder: Path, num_requests: int) -> Sums:
    sums = Sums()
    models = {name: _built(name) for name in MODELS}
    adapters = {name: save_adapter(_built(name), folder / name, **ADAPTERS["all"]) for name in MODELS}
    for seed in range(num_requests):
        name = list(MODELS)[seed % len(MODELS)]
        own = {"all": adapters[name]} if seed % 5 == 0 else {}
        for record, num_prompt_tokens in _lived(models[name], seed, own, sums.met):
            sums.add(record, num_prompt_tokens)
        if sums.num_requests >= num_requests:
            return sums
    raise AssertionError("engines that serve no request")


def _built(name: str) -> PreTrainedModel:
    """The model of that name, with the same weights every time."""
    torch.manual_seed(7)
    return MODELS[name]().eval()


def _lived(
    model: PreTrainedModel, seed: int, adapters: dict[str, Path], met: Counter[str]
) -> Iterator[tuple[RequestRecord, int]]:
    """The records of one engine's life, each with the length of its prompt."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if seed % 2:  # about as slow as computing: hits are split
            patch.setattr(fuzzed_engine, "COPY_S", SLOW_COPY_S)
        engine = FuzzedEngine(model, seed, Path(folder) / "store", patch, adapters)
        try:
            engine.run(ENGINE_STEPS)
            prompts = {
                asked.request.timeline.caller.request_id: asked.request.prompt_token_ids
                for asked, _ in engine.answers()
            }
            records = engine.core.records.newest()
            assert len(records) == len(prompts), "a request without a record, or more than are kept"
            met["split"] += engine.core.planner.statistics().num_plans.get("split", 0)
        finally:
            engine.close()
    for record in records:
        yield record, len(prompts.pop(record.request_id))
    assert not prompts, "a request without a record of its own"


def _of_endpoint(folder: Path, num_lookups: int) -> Sums:
    sums = Sums()
    for seed in range(num_lookups):
        store = MemoryStore(40 * ENDPOINT_RECORD_BYTES) if seed % 2 else None
        with lmcache_bed(folder, num_extents=2, store=store) as bed:
            looked_up: dict[str, int] = {}
            for engine in play(bed, seed, ENDPOINT_STEPS, looked_up):
                engine.scheduler.close()
                engine.worker.close()
            bed.settle()
            records = bed.layouts.records.newest()
            counted = bed.endpoint.counts().tokens
        before = sums.tokens
        for record in records:
            sums.add(record, looked_up[record.request_id])
        assert sums.tokens == before.plus(counted), "the endpoint has counted other tokens than its records have"
        if sums.num_requests >= num_lookups:
            return sums
    raise AssertionError("endpoints at which nobody looks anything up")
