"""Engines claim models whose configuration as a whole has another attention function than its text layers."""

import random

import torch
from tiny_families import VOCAB, tiny_model

from kvtier.engine.model.runner import Chunk, ModelRunner


def test_the_text_layers_of_a_model_whose_class_has_attention_code_of_its_own_are_claimed() -> None:
    model = tiny_model("got_ocr2")
    text = model.config.get_text_config()
    prompt = random.Random(1).choices(range(3, VOCAB), k=40)
    with torch.inference_mode():
        plain = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]

    runner = ModelRunner(model, block_size=16, capacity=1 << 20)
    runner.run([Chunk(prompt[:30], 0, [[2, 0, 1]])])
    logits = runner.run([Chunk(prompt[30:], 30, [[2, 0, 1]])])[0]
    claimed = text._attn_implementation
    runner.close()

    assert float((logits - plain[39]).abs().max() / plain.abs().max()) <= 1e-5
    assert (claimed, text._attn_implementation) == ("kvtier", "eager")
