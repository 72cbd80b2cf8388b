"""How small are latent rows beside keys and values, and how much faster is decoding that does not expand them?

The model is one layer with the attention of DeepSeek V3 (128 heads, 512 latents), random weights, in bfloat16 for the
bytes and float32 for the times. A request has 8,192 tokens. The two ways take turns. Eight requests of 1,024 tokens
show what it saves to multiply the tokens of several requests with a layer's matrices together.
"""

import random
import statistics
import time
from typing import Any
from unittest.mock import patch

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from bench.report import Row, arguments, publish
from kvtier.engine.model import latent_attention
from kvtier.engine.model.paged_layout import bytes_per_block
from kvtier.engine.model.paged_model import Chunk, PagedModel

BLOCK_SIZE = 16
CHUNK = 2048
MAX_BYTES = 1 / 60  # of expanded keys and values
MIN_FASTER = 3.0
NUM_TOGETHER, TOKENS_EACH = 8, 1024
ALL_ABSORBED, ALL_EXPANDED = 16, 0  # tokens of a request in a step, up to which they are absorbed


def one_layer(dtype: torch.dtype) -> DeepseekV3ForCausalLM:
    """Return a model of one layer with DeepSeek V3's attention, and little beside."""
    config = DeepseekV3Config(
        hidden_size=512, intermediate_size=512, num_hidden_layers=1, first_k_dense_replace=1, vocab_size=256
    )
    torch.manual_seed(7)
    model: Any = DeepseekV3ForCausalLM(config)
    return model.to(dtype).eval()


def bytes_of_expanded(model: DeepseekV3ForCausalLM) -> int:
    """Return the bytes of a token in one layer, if keys and values of all heads are kept."""
    config: Any = model.config
    width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return int(config.num_attention_heads * width * model.dtype.itemsize)


def decode_seconds(num_tokens: int, num_rounds: int) -> dict[int, list[float]]:
    """Return the seconds of decode steps after a prompt of *num_tokens*, by `ABSORBED_QUERIES`."""
    model = one_layer(torch.float32)
    paged = PagedModel(model, BLOCK_SIZE, (num_tokens // BLOCK_SIZE + 2) * bytes_per_block(model, BLOCK_SIZE))
    prompt = random.Random(1).choices(range(256), k=num_tokens + 1)
    tables = [list(range(num_tokens // BLOCK_SIZE + 1))]
    for start in range(0, num_tokens, CHUNK):
        paged.run([Chunk(prompt[start : min(start + CHUNK, num_tokens)], start, tables)])
    seconds: dict[int, list[float]] = {ALL_ABSORBED: [], ALL_EXPANDED: []}
    for _ in range(1 + num_rounds):
        for limit, seen in seconds.items():
            with patch.object(latent_attention, "ABSORBED_QUERIES", limit):
                began_at = time.perf_counter()
                paged.run([Chunk(prompt[-1:], num_tokens, tables)])
                seen.append(time.perf_counter() - began_at)
    paged.close()
    return {limit: seen[1:] for limit, seen in seconds.items()}


def together_seconds(tokens_each: int, num_rounds: int) -> dict[int, list[float]]:
    """Return the seconds of decode steps of several requests, by `DECODES`: one request at a time, or all together."""
    model = one_layer(torch.float32)
    num_blocks = tokens_each // BLOCK_SIZE + 1
    paged = PagedModel(model, BLOCK_SIZE, NUM_TOGETHER * num_blocks * bytes_per_block(model, BLOCK_SIZE))
    prompts = [random.Random(seed).choices(range(256), k=tokens_each + 1) for seed in range(NUM_TOGETHER)]
    tables = [[list(range(i * num_blocks, (i + 1) * num_blocks))] for i in range(NUM_TOGETHER)]
    for prompt, table in zip(prompts, tables, strict=True):
        paged.run([Chunk(prompt[:-1], 0, table)])
    steps = [Chunk(prompt[-1:], tokens_each, table) for prompt, table in zip(prompts, tables, strict=True)]
    seconds: dict[int, list[float]] = {1: [], NUM_TOGETHER: []}
    for _ in range(1 + num_rounds):
        for number, seen in seconds.items():
            with patch.object(latent_attention, "DECODES", number):
                began_at = time.perf_counter()
                paged.run(steps)
                seen.append(time.perf_counter() - began_at)
    paged.close()
    return {number: seen[1:] for number, seen in seconds.items()}


def main() -> None:
    """Compare bytes and times, and publish the rows."""
    options = arguments(__doc__ or "").parse_args()
    num_tokens = options.effort.of(8192, quick=2048)
    model = one_layer(torch.bfloat16)
    kept, expanded = bytes_per_block(model, BLOCK_SIZE) / BLOCK_SIZE, bytes_of_expanded(model)
    rows = [
        Row("a token in one layer: latent row", kept, "bytes"),
        Row("a token in one layer: expanded keys and values", expanded, "bytes"),
        Row("latent row / expanded", kept / expanded, "", f"<= {MAX_BYTES:.4f}", kept / expanded <= MAX_BYTES),
    ]
    seconds = decode_seconds(num_tokens, options.effort.of(5, quick=3))
    pairs = zip(seconds[ALL_EXPANDED], seconds[ALL_ABSORBED], strict=True)
    faster = statistics.median(slow / fast for slow, fast in pairs)
    for name, limit in (("absorbed", ALL_ABSORBED), ("expanded", ALL_EXPANDED)):
        rows.append(Row(f"decode after {num_tokens:,} tokens: {name}", 1e3 * statistics.median(seconds[limit]), "ms"))
    name = f"decode after {num_tokens:,} tokens: absorbed is faster"
    rows.append(Row(name, faster, "times", f">= {MIN_FASTER:g}", faster >= MIN_FASTER, varies=True))
    tokens_each = options.effort.of(TOKENS_EACH, quick=256)
    seconds = together_seconds(tokens_each, options.effort.of(9, quick=3))
    pairs = zip(seconds[1], seconds[NUM_TOGETHER], strict=True)
    faster = statistics.median(slow / fast for slow, fast in pairs)
    step = f"decode of {NUM_TOGETHER} requests of {tokens_each:,} tokens"
    rows += [
        Row(f"{step}: one at a time", 1e3 * statistics.median(seconds[1]), "ms"),
        Row(f"{step}: together", 1e3 * statistics.median(seconds[NUM_TOGETHER]), "ms"),
        Row(f"{step}: together is faster", faster, "times", varies=True),
    ]
    publish("latent", rows, options.json)


if __name__ == "__main__":
    main()
