"""Engines to be killed: imports once, then forks a busy engine for each folder named on standard input."""

import os
import random
import sys
from pathlib import Path

from small_models import VOCAB, build, byte_tokenizer

from kvtier import LLM, SamplingParams

TOKENS_PER_PROMPT = 200
BYTES_PER_TOKEN = 1024  # of the small llama in float32


def run(folder: Path) -> None:
    """Answer new prompts for ever, with pools so small that every step spills to host memory and disk."""
    config = {
        "device": {"capacity": 2 * TOKENS_PER_PROMPT * BYTES_PER_TOKEN, "block_size": 16},
        "host": {"capacity": 2 * TOKENS_PER_PROMPT * BYTES_PER_TOKEN},
        "disk": {"path": str(folder), "capacity": "16MiB"},
        "scheduler": {"prefill_chunk": 64, "load": "always"},
    }
    rng = random.Random()
    with LLM(build("llama"), config, byte_tokenizer()) as llm:
        print("ready", flush=True)
        known = [[seed % VOCAB] * TOKENS_PER_PROMPT for seed in range(8)]
        while True:
            new = [rng.randrange(VOCAB) for _ in range(TOKENS_PER_PROMPT)]
            llm.generate([new, rng.choice(known)], SamplingParams(max_tokens=2))
            llm.check()
            if llm.statistics().cache.routes["host_to_disk"].num_transfers:
                print("spilling", flush=True)


if __name__ == "__main__":
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(Path(line.strip()))
        print(child, flush=True)
        os.waitpid(child, 0)
        print("gone", flush=True)
