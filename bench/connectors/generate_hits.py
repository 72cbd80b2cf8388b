"""How soon is the first token of transformers' `generate` with KVTierCache, and what does a prompt cost that is new?"""

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from bench.report import Effort, Row
from bench.rounds import at_most
from kvtier.cli.demo.document import make_document
from kvtier.cli.demo.model import build_demo_model
from kvtier.connectors.transformers import KVTierCache


def generate_rows(effort: Effort, _python: str, folder: Path) -> list[Row]:
    """The demo's model on long documents: without a cache, with one that has nothing of them, and with one that was
    opened anew and has all; medians, of ratios by document."""
    prompt_tokens, num_rounds = effort.of((8194, 5), quick=(1026, 1))
    model, tokenizer = build_demo_model()
    prompts = [_prompt(tokenizer, seed, prompt_tokens) for seed in range(num_rounds + 1)]
    _plain(model, prompts.pop())  # what comes first takes longer
    plain = [_plain(model, prompt) for prompt in prompts]
    with KVTierCache.open(folder / "store", model, capacity="1GiB") as cache:
        cold = [_cached(cache, model, prompt) for prompt in prompts]
    with KVTierCache.open(folder / "store", model, capacity="1GiB") as cache:
        hits = [_cached(cache, model, prompt) for prompt in prompts]
    ttft = statistics.median(hit[0] / one[0] for hit, one in zip(hits, plain, strict=True))
    whole = statistics.median(one[1] / none[0] for one, none in zip(cold, plain, strict=True))
    is_equal = all(len({one[2], two[2], three[2]}) == 1 for one, two, three in zip(plain, cold, hits, strict=True))
    return [
        Row(f"generate, {prompt_tokens} tokens without a cache: TTFT", 1e3 * _median(plain, 0), "ms"),
        Row("generate, on disk: TTFT", 1e3 * _median(hits, 0), "ms"),
        at_most("generate, on disk: TTFT of that without", ttft, "", 0.1),
        at_most("generate, tokens computed on a hit, at most", max(hit[3] for hit in hits), "tokens", 2, varies=False),
        Row("generate, nothing on disk: until all is stored, of TTFT without", whole, ""),
        Row("generate: outputs equal", is_equal, "", "1", is_equal),
    ]


def _plain(model: Any, prompt: torch.Tensor) -> tuple[float, float, int, int]:
    began_at = time.perf_counter()
    token_id = int(model.generate(prompt, max_new_tokens=1, do_sample=False)[0, -1])
    took_s = time.perf_counter() - began_at
    return took_s, took_s, token_id, prompt.shape[1]


def _cached(cache: KVTierCache, model: Any, prompt: torch.Tensor) -> tuple[float, float, int, int]:
    """Seconds until the first token, and until all is stored; the token; and how many of the prompt were computed."""
    began_at = time.perf_counter()
    with cache.prompt(prompt) as past:
        token_id = int(model.generate(prompt, past_key_values=past, max_new_tokens=1, do_sample=False)[0, -1])
        ttft_s = time.perf_counter() - began_at
    return ttft_s, time.perf_counter() - began_at, token_id, prompt.shape[1] - past.num_loaded_tokens


def _prompt(tokenizer: Any, seed: int, num_tokens: int) -> torch.Tensor:
    document = make_document(seed, 2 * num_tokens)
    token_ids: torch.Tensor = tokenizer(document.text, return_tensors="pt")["input_ids"]
    return token_ids[:, :num_tokens]


def _median(seen: list[tuple[float, float, int, int]], column: int) -> float:
    return statistics.median(one[column] for one in seen)
