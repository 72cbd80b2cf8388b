"""Are logits, tokens and KV bytes the same whether a prefix was computed or came from device, host or disk?"""

import random
import tempfile

import torch
from small_models import MODELS, MORE_MODELS, VOCAB, build, byte_tokenizer, plain_greedy

from bench.report import Row, arguments, publish
from kvtier import LLM, SamplingParams
from kvtier.engine.model.runner import Chunk, ModelRunner

BLOCK_SIZE = 16
PROMPT_TOKENS = 300
BYTES_PER_TOKEN = 1024
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def worst_logit(name: str) -> float:
    """Largest difference from plain logits, computed in chunks over shuffled blocks, with transformers' own weights."""
    model = build(name, spread=0.02)
    runner = ModelRunner(model, BLOCK_SIZE, 4 << 20)
    rng = random.Random(3)
    prompt = [rng.randrange(VOCAB) for _ in range(PROMPT_TOKENS)]
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        plain = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float()
    model.set_attn_implementation("kvtier")
    tables = [rng.sample(range(runner.num_slots), 20) for _ in runner.groups]
    start, worst = 0, 0.0
    for num_tokens in (70, 33, 1, 100, 1, 95):
        logits = runner.run([Chunk(prompt[start : start + num_tokens], start, tables)])[0]
        start += num_tokens
        worst = max(worst, float((logits - plain[start - 1]).abs().max()))
    return worst


def equal_answers(name: str, num_prompts: int) -> tuple[int, int, int]:
    """How many greedy answers equal plain transformers', how many there were, and tokens loaded from host or disk."""
    model = build(name)
    rng = random.Random(4)
    prompts = [[rng.randrange(VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(num_prompts)]
    expected = [plain_greedy(model, prompt, GREEDY.max_tokens) for prompt in prompts]
    prompt_bytes = PROMPT_TOKENS * BYTES_PER_TOKEN
    equal = total = loaded = 0
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "device": {"capacity": 2 * prompt_bytes, "block_size": BLOCK_SIZE},
            "host": {"capacity": 3 * prompt_bytes},
            "disk": {"path": folder, "capacity": "64MiB"},
            "scheduler": {"load": "always"},  # such small models compute as fast as they load
        }
        for _process in range(2):
            with LLM(model, config, byte_tokenizer()) as llm:
                single = [llm.generate([prompt], GREEDY)[0] for _ in range(2) for prompt in prompts]
                batch = llm.generate(prompts, GREEDY)
            for i, done in enumerate([*single, *batch]):
                equal += done.token_ids == expected[i % num_prompts]
                loaded += done.tokens.host + done.tokens.disk
                total += 1
    return equal, total, loaded


def main() -> None:
    """Compare all models that the tests use."""
    options = arguments(__doc__ or "").parse_args()
    rows = []
    for name in [*MODELS, *MORE_MODELS]:
        error = worst_logit(name)
        rows.append(Row(f"{name}: largest logit difference", error, "", "<= 1e-5", error <= 1e-5))
    for name in MODELS:
        equal, total, loaded = equal_answers(name, options.effort.of(6, quick=4))
        rows.append(Row(f"{name}: greedy answers token-identical", 100 * equal / total, "%", "100 %", equal == total))
        rows.append(Row(f"  prompt tokens from host or disk, of {total} prompts", loaded, "tokens"))
    publish("exactness", rows, options.json)


if __name__ == "__main__":
    main()
