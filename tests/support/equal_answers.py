"""Prompts, configurations and greedy answers that must be the same from every tier."""

import itertools
import random
from pathlib import Path
from typing import Any

from small_models import VOCAB

from kvtier import LLM, SamplingParams
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS, BlockChain
from kvtier.tiers.naming.tier import Tier

BLOCK_SIZE = 16


NUM_TOKENS = 300


NUM_NEW = 12


READ_TIMEOUT_S = 60.0  # of what takes milliseconds: an answer that recomputed for being late is another test's


GREEDY = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)


FILLER = 0  # the first token of fillers, and of no prompt that a test asks about


_FILLER_SEEDS = itertools.count(10**6)


def prompt_of(seed: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    rng = random.Random(seed)
    prompt = [rng.randrange(VOCAB) for _ in range(num_tokens)]
    assert prompt[0] != FILLER, f"seed {seed} makes a filler"
    return prompt


def filler(num_tokens: int = NUM_TOKENS) -> list[int]:
    """Return a new prompt that shares no prefix, not even one token to copy, with a prompt that a test asks about."""
    rng = random.Random(next(_FILLER_SEEDS))
    return [FILLER, *(rng.randrange(VOCAB) for _ in range(num_tokens - 1))]


def configuration(
    folder: Path, prompts_on_device: float, prompts_in_host: float, bytes_per_token: int = 1024
) -> dict[str, Any]:
    prompt = NUM_TOKENS * bytes_per_token
    return {
        "device": {"capacity": int(prompts_on_device * prompt), "block_size": BLOCK_SIZE},
        "host": {"capacity": int(prompts_in_host * prompt)},
        "disk": {"path": str(folder / "store"), "capacity": "64MiB", "read_timeout_s": READ_TIMEOUT_S},
        "scheduler": {"prefill_chunk": 64, "token_budget": 128, "load": "always"},
    }


def push_down(
    llm: LLM, prompt: list[int], tier: Tier, num_tokens: int = NUM_TOKENS, sampling: SamplingParams = GREEDY
) -> None:
    """Answer other prompts, of *num_tokens* each, until nothing of *prompt* is left in *tier*.

    Then every block has its copies: a request that had to wait for room would have what it needs read from disk
    meanwhile, and find it in host memory.
    """
    for _ in range(60):
        warm = [there for there in llm.core.cache.lookups.where(chain_of(llm, prompt)) if there is not None]
        if all(there.depth > tier.depth for there in warm):
            assert llm.core.cache.drain.flush(READ_TIMEOUT_S) == 0, "blocks without a copy on disk"
            return
        llm.generate(filler(num_tokens), sampling)
    raise AssertionError(f"the prompt never left the {tier} tier")


def chain_of(llm: LLM, prompt: list[int]) -> BlockChain:
    """The names of the prompt's full blocks."""
    request = llm.core.add(prompt, SamplingParams(max_tokens=1), extra=NO_EXTRA_KEYS, arrived_at=0.0)
    llm.core.abort(request)
    return request.chain
