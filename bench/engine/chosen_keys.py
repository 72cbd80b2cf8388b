"""How much faster does a request decode if a layer reads only the keys that it chooses (DSA)?

The model is one layer with the attention of DeepSeek V3.2 (128 heads, 512 latents, 64 index heads), random weights, in
float32. A request has 8,192 tokens, of which the layer chooses 2,048. The baseline chooses in the same
way, but all keys, and reads them all. The two ways take turns.
"""

import random
import statistics
import time
from typing import Any

import torch
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

from bench.report import Row, arguments, publish
from kvtier.engine.model.paged_layout import bytes_per_block
from kvtier.engine.model.paged_model import Chunk, PagedModel

BLOCK_SIZE = 16
CHUNK = 2048
NUM_CHOSEN = 2048


def one_layer() -> DeepseekV32ForCausalLM:
    """Return a model of one layer with DeepSeek V3.2's attention, and little beside."""
    config = DeepseekV32Config(
        hidden_size=512, intermediate_size=512, num_hidden_layers=1, first_k_dense_replace=1, vocab_size=256
    )
    torch.manual_seed(7)
    model: Any = DeepseekV32ForCausalLM(config)
    return model.eval()


def decode_seconds(num_tokens: int, num_chosen: int, num_rounds: int) -> tuple[list[float], list[float]]:
    """Return the seconds of decode steps that read *num_chosen* keys, and of those that read all keys."""
    model = one_layer()
    paged = PagedModel(model, BLOCK_SIZE, (num_tokens // BLOCK_SIZE + 2) * bytes_per_block(model, BLOCK_SIZE))
    indexer: Any = model.model.layers[0].self_attn.indexer
    prompt = random.Random(1).choices(range(256), k=num_tokens + 1)
    tables = [list(range(num_tokens // BLOCK_SIZE + 1))]
    indexer.index_topk = num_chosen
    for start in range(0, num_tokens, CHUNK):
        paged.run([Chunk(prompt[start : min(start + CHUNK, num_tokens)], start, tables)])
    seconds: dict[int, list[float]] = {num_chosen: [], num_tokens + 1: []}
    for _ in range(1 + num_rounds):
        for limit, seen in seconds.items():
            indexer.index_topk = limit
            seen.append(_seconds(paged, Chunk(prompt[-1:], num_tokens, tables)))
    paged.close()
    chosen, whole = seconds.values()
    return chosen[1:], whole[1:]


def _seconds(paged: PagedModel, chunk: Chunk) -> float:
    began_at = time.perf_counter()
    paged.run([chunk])
    return time.perf_counter() - began_at


def main() -> None:
    """Compare the times, and publish the rows."""
    options = arguments(__doc__ or "").parse_args()
    num_tokens = options.effort.of(8192, quick=1024)
    num_chosen = options.effort.of(NUM_CHOSEN, quick=256)
    chosen, whole = decode_seconds(num_tokens, num_chosen, options.effort.of(9, quick=3))
    faster = statistics.median(slow / fast for slow, fast in zip(whole, chosen, strict=True))
    after = f"decode after {num_tokens:,} tokens"
    rows = [
        Row(f"{after}: {num_chosen:,} chosen keys", 1e3 * statistics.median(chosen), "ms"),
        Row(f"{after}: all keys", 1e3 * statistics.median(whole), "ms"),
        Row(f"{after}: chosen keys are faster", faster, "times", varies=True),
    ]
    publish("chosen_keys", rows, options.json)


if __name__ == "__main__":
    main()
