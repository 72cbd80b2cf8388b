"""A side of `decoding`: decodes one token of every request a step, as often as a line of its input says.

Run as a file with the tree of the kvtier that is measured on PYTHONPATH, a side, a number of threads, and lengths.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

VOCAB, NUM_LAYERS, NUM_HEADS, HEAD_DIM = 32_000, 12, 12, 64
BLOCK_SIZE = 16
MAX_STEPS = 200  # of one process


def model() -> LlamaForCausalLM:
    """A Llama of 109 million random weights, in float32."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=NUM_HEADS * HEAD_DIM,
            intermediate_size=2048,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=NUM_HEADS,
            num_key_value_heads=NUM_HEADS,
            head_dim=HEAD_DIM,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        )
    ).eval()


def kvtier_steps(lengths: Sequence[int]) -> Callable[[], object]:
    """A step of kvtier's runner, over blocks all over the slab, whose keys and values are random."""
    from kvtier.engine.model.runner import Chunk, ModelRunner

    num_blocks = [-(-(length + MAX_STEPS) // BLOCK_SIZE) for length in lengths]
    block_bytes = 2 * NUM_LAYERS * BLOCK_SIZE * NUM_HEADS * HEAD_DIM * 4
    runner = ModelRunner(model(), BLOCK_SIZE, sum(num_blocks) * block_bytes)
    for slab in runner.slabs:
        slab.blocks.view(torch.float32).normal_()
    places = iter(random.Random(0).sample(range(runner.num_slots), sum(num_blocks)))
    tables = [[[next(places) for _ in range(count)]] for count in num_blocks]
    ends = list(lengths)

    def step() -> object:
        logits = runner.run([Chunk([end % VOCAB], end, table) for end, table in zip(ends, tables, strict=True)])
        ends[:] = [end + 1 for end in ends]
        return logits.argmax(dim=-1)

    return step


def transformers_steps(lengths: Sequence[int]) -> Callable[[], object]:
    """A step of transformers' model over one batch, padded on the left, whose keys and values are random."""
    plain, longest, count = model(), max(lengths), len(lengths)
    cache = StaticCache(config=plain.config, max_cache_len=longest + MAX_STEPS)
    for layer in range(NUM_LAYERS):
        keys, values = (torch.randn(count, NUM_HEADS, longest, HEAD_DIM) for _ in range(2))
        cache.update(keys, values, layer)
    mask = torch.tensor([[0] * (longest - length) + [1] * length for length in lengths])
    positions = torch.tensor(lengths)[:, None]

    def step() -> object:
        nonlocal mask, positions
        mask = torch.cat([mask, torch.ones(count, 1, dtype=mask.dtype)], dim=1)
        logits = plain(positions % VOCAB, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
        positions = positions + 1
        return logits[:, -1].argmax(dim=-1)

    return step


@torch.inference_mode()
def main() -> None:
    """Answer each line, a number of steps, with the mean seconds of processor time of one."""
    side, num_threads, lengths = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(num_threads)
    step = {"kvtier": kvtier_steps, "transformers": transformers_steps}[side](lengths)
    for line in sys.stdin:
        began_at = time.process_time()
        for _ in range(int(line)):
            step()
        print((time.process_time() - began_at) / int(line), flush=True)


if __name__ == "__main__":
    main()
