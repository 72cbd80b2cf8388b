"""A model whose forward has no `logits_to_keep` returns the logits of all tokens; kvtier takes those it needs."""

import random

import torch
from tiny_families import VOCAB, tiny_model

from kvtier.engine.model.runner import Chunk, ModelRunner


def test_chunks_get_the_logits_of_their_last_tokens_from_a_model_that_returns_all() -> None:
    model = tiny_model("whisper")
    prompts = [random.Random(seed).choices(range(VOCAB), k=40) for seed in (1, 2)]
    with torch.inference_mode():
        plain = [model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]

    runner = ModelRunner(model, block_size=16, capacity=1 << 20)
    first, second = ([[3 * i, 3 * i + 1, 3 * i + 2] for _ in runner.groups] for i in range(2))
    runner.run([Chunk(prompts[0][:30], 0, first), Chunk(prompts[1][:16], 0, second)])
    logits = runner.run([Chunk(prompts[0][30:], 30, first), Chunk(prompts[1][16:], 16, second, num_logits=2)])

    expected = torch.stack([plain[0][39], plain[1][38], plain[1][39]])
    assert logits.shape == expected.shape
    assert float((logits - expected).abs().max() / expected.abs().max()) <= 1e-5
