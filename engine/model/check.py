"""Compares a model's logits with kvtier's attention to those with its own, once, when it is loaded."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from kvtier.engine.model.digest import config_digest
from kvtier.engine.model.layers import bytes_per_block
from kvtier.engine.model.miniature import LIMIT, VOCAB, NoMiniature, miniatures
from kvtier.engine.model.paged_model import Chunk, PagedModel
from kvtier.engine.model.unsupported_model import UnsupportedModel

# Share of the largest logit, for the model itself.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
EXACT = 1e-4  # share of a miniature's largest logit: float32 rounding is 1e-6 of it, a key more or less 1e-2
BLOCK_SIZE = 16
# Tokens of two requests in each step. Each comes to 330, more than LIMIT times LIMIT: a top-k of so many blocks of so
# many tokens leaves some out.
STEPS = ((70, 33, 1, 100, 1, 125), (1, 60, 140, 1, 127, 1))

NUM_BLOCKS = 64  # blocks of the cache, over which those of the two requests are scattered

# In this process: classes with the digests of their configurations.
_checked: set[tuple[type[PreTrainedModel], str]] = set()


def check_model(paged: PagedModel) -> None:
    """Compare the model, with its own weights, type and device, to its own attention: up to 48 tokens, in two chunks
    and the last token alone."""
    model, block_size = paged.model, paged.block_size
    num_tokens = min(2 * block_size, paged.num_slots * block_size, 48)
    token_ids = [(7 * i + 3) % paged.vocab_size for i in range(num_tokens)]
    tables = [list(range(-(-num_tokens // block_size)))[::-1] for _ in paged.groups]
    bounds = sorted({0, num_tokens // 2, num_tokens - 1, num_tokens})
    with _named(model):
        for start, end in pairwise(bounds):
            logits = paged.run([Chunk(token_ids[start:end], start, tables)])
    _compare(model, logits, _plain(paged, token_ids)[-1:], TOLERANCE.get(model.dtype, 0.1))


def check_miniature(paged: PagedModel) -> None:
    """Compare a miniature of the model with its own attention, in float32, past every limit of the configuration.

    Once in a process for each class and configuration. `UnsupportedModel` also if no miniature can be made: a model
    that was not compared is not served.
    """
    model = paged.model
    key = (type(model), config_digest(model.config))
    if key in _checked:
        return
    kinds = {type(layer.group) for layer in paged.layers}
    refusal: UnsupportedModel | None = None
    try:
        for small in miniatures(model, paged.layers):
            try:
                paged_small = PagedModel(small, BLOCK_SIZE, NUM_BLOCKS * bytes_per_block(small, BLOCK_SIZE))
            except UnsupportedModel as error:  # cut too much, or it has a limit that the model itself reaches far later
                refusal = error
                continue
            if {type(layer.group) for layer in paged_small.layers} == kinds:
                _check_small(model, paged_small)
                _checked.add(key)
                return
    except NoMiniature as error:
        if refusal is not None:
            raise refusal from None
        raise UnsupportedModel(
            f"{type(model).__name__}: no small copy can be made to compare its attention on long prompts ({error})"
        ) from error


def _check_small(model: PreTrainedModel, small: PagedModel) -> None:
    """Compare two requests, computed in the same steps, with each of them computed alone."""
    rng = random.Random(7)
    steps = [_within(counts, small.model) for counts in STEPS]
    prompts = [[rng.randrange(VOCAB // 2) for _ in range(sum(counts))] for counts in steps]
    plain = [_plain(small, prompt) for prompt in prompts]
    num_blocks = [-(-len(prompt) // BLOCK_SIZE) for prompt in prompts]
    slots = rng.sample(range(small.num_slots), sum(num_blocks))
    tables = [[slots[: num_blocks[0]]] * len(small.groups), [slots[num_blocks[0] :]] * len(small.groups)]
    starts = [0, 0]
    for counts in zip(*steps, strict=True):
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        chunks = [
            Chunk(prompt[start:end], start, table)
            for prompt, start, end, table in zip(prompts, starts, ends, tables, strict=True)
        ]
        with _named(model):
            logits = small.run(chunks)
        _compare(model, logits, torch.stack([of[end - 1] for of, end in zip(plain, ends, strict=True)]), EXACT)
        starts = ends


def _within(counts: Sequence[int], model: PreTrainedModel) -> list[int]:
    """The *counts* of tokens, cut to the positions that the model has: learned positions are not cut to `LIMIT`."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or LIMIT
    if limit <= LIMIT:
        return list(counts)
    left = limit - len(counts)
    within = []
    for count in counts:
        within.append(1 + min(count - 1, left))
        left -= within[-1] - 1
    return within


def _plain(paged: PagedModel, token_ids: list[int]) -> torch.Tensor:
    """The model's logits with its own attention, [len(token_ids), vocab]."""
    model = paged.model
    with paged.claim.own_attention(), torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([token_ids], device=model.device), use_cache=False).logits
    return logits[0].float()


def _compare(model: PreTrainedModel, logits: torch.Tensor, plain: torch.Tensor, tolerance: float) -> None:
    error = float((logits - plain).abs().max() / plain.abs().max())
    if not error <= tolerance:
        raise UnsupportedModel(
            f"{type(model).__name__}: its logits with a paged cache differ from its own by {error:.1e}; "
            "its attention needs something that kvtier does not pass on"
        )


@contextmanager
def _named(model: PreTrainedModel) -> Iterator[None]:
    """Name the model in refusals that are raised meanwhile."""
    try:
        yield
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{type(model).__name__} cannot keep its KV cache in kvtier: {error}") from error
