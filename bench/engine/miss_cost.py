"""What do the tiers cost when nothing is ever reused? Compares TTFT with host and disk on to TTFT without them."""

import random
import statistics
import tempfile

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from bench.report import Row, arguments, publish
from bench.rounds import at_most
from kvtier import LLM, SamplingParams
from kvtier.transfer.transfer_engine import Route

VOCAB = 1000
ONE_TOKEN = SamplingParams(max_tokens=1)


def build_model() -> LlamaForCausalLM:
    """A Llama with random weights, 64 M parameters: 16 KiB of KV a token in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def main() -> None:
    """Give each engine two new prompts in a row, round by round and in random order, and time the second one.

    So the second one bears the copies that the first one left; before the other engine's turn all copies end.
    """
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, help="pairs of prompts (15)")
    options = parser.parse_args()
    num_rounds, prompt_tokens = options.rounds or options.effort.of(15, quick=2), options.effort.of(2048, quick=128)
    model = build_model()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")))
    prompt_bytes = prompt_tokens * 16 << 10
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        device = {"capacity": 2 * prompt_bytes, "block_size": 32}
        disk = {"path": folder, "capacity": 8 * prompt_bytes}
        engines = {
            "on": LLM(model, {"device": device, "host": {"capacity": 3 * prompt_bytes}, "disk": disk}, tokenizer),
            "off": LLM(model, {"device": device, "host": {"capacity": 0}}, tokenizer),
        }
        times: dict[str, list[float]] = {"on": [], "off": []}
        for i in range(num_rounds + 3):  # the first ones fill every tier, so that each block evicts another
            for name in rng.sample(["on", "off"], 2):
                for counts in (False, True):
                    prompt = [rng.randrange(VOCAB) for _ in range(prompt_tokens)]
                    done = engines[name].generate([prompt], ONE_TOKEN)[0]
                    assert done.tokens.recomputed == prompt_tokens, "a prompt was reused"
                    if counts and i >= 3:
                        times[name].append(done.ttft_s)
                while engines[name].core.cache.num_in_flight:
                    engines[name].core.cache.wait(0.1)
        routes = engines["on"].statistics().cache.routes
        for llm in engines.values():
            llm.close()
    ratios = [on / off for on, off in zip(times["on"], times["off"], strict=True)]
    ratio = statistics.median(ratios)
    spread = statistics.quantiles(ratios, n=4)
    rows = [
        at_most("TTFT, tiers on / off, median of pairs", ratio, "", 1.02),
        Row("  first quartile", spread[0], ""),
        Row("  third quartile", spread[2], ""),
        Row(f"TTFT of {prompt_tokens} tokens, tiers off", 1000 * statistics.median(times["off"]), "ms"),
        Row(f"TTFT of {prompt_tokens} tokens, tiers on", 1000 * statistics.median(times["on"]), "ms"),
        Row("spilled to host meanwhile", routes[Route.DEVICE_TO_HOST].num_bytes / 1e6, "MB"),
        Row("written to disk meanwhile", routes[Route.HOST_TO_DISK].num_bytes / 1e6, "MB"),
    ]
    publish("miss_cost", rows, options.json)


if __name__ == "__main__":
    main()
