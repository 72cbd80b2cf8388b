"""Decoders that number tokens by the length of their cache get each token's position in its own prompt."""

import random

import pytest
import torch
from tiny_families import VOCAB, tiny_model

from kvtier.engine.model.runner import Chunk, ModelRunner

SLOW = ["blenderbot", "blenderbot-small", "mbart", "pegasus", "plbart"]


@pytest.mark.parametrize("family", ["bart", "marian", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_two_prompts_in_a_step_have_positions_of_their_own(family: str) -> None:
    model = tiny_model(family)
    prompts = [random.Random(seed).choices(range(3, VOCAB), k=40) for seed in (1, 2)]
    with torch.inference_mode():
        plain = [model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]

    runner = ModelRunner(model, block_size=16, capacity=1 << 20)
    runner.run([Chunk(prompts[0][:30], 0, [[0, 1, 2]]), Chunk(prompts[1][:17], 0, [[3, 4, 5]])])
    logits = runner.run([Chunk(prompts[0][30:], 30, [[0, 1, 2]]), Chunk(prompts[1][17:], 17, [[3, 4, 5]])])

    for row, expected in zip(logits, plain, strict=True):
        assert float((row - expected[39]).abs().max() / expected.abs().max()) <= 1e-5
