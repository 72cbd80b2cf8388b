"""Comparison of a model's logits under kvtier's attention and under its own attention, at load."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise

import torch
from transformers import DynamicCache, PreTrainedModel

from kvtier.engine.model.digest import config_digest
from kvtier.engine.model.errors import UnsupportedModel, is_short_of_memory
from kvtier.engine.model.miniature import LIMIT, VOCAB, NoMiniature, miniatures
from kvtier.engine.model.paged_layout import layout_of
from kvtier.engine.model.paged_model import Chunk, PagedModel
from kvtier.engine.model.step_cache import CACHE_ARGUMENT

# Tolerance for the model itself, as a fraction of the largest logit.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
# Tolerance for a miniature, as a fraction of the largest logit. Rounding in float32 causes errors of 1e-6, and one key
# too many or too few causes errors of 1e-2.
EXACT = 1e-4
# Tolerance between a miniature's logits for a prompt in two chunks and in one pass, both computed by the model itself.
# Rounding causes errors of 1e-5, and a model that ignores its state at the beginning of a chunk errors of 1e-1.
RESUMED = 1e-3
_CODE_ERRORS = (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError)  # of a model's own code
BLOCK_SIZE = 16
# For each of two requests, the number of tokens that each step computes. A request has 330 tokens, more than
# LIMIT * LIMIT, so that a sparse attention that reads LIMIT blocks of LIMIT tokens would leave some tokens out.
STEPS = ((70, 33, 1, 100, 1, 125), (1, 60, 140, 1, 127, 1))

NUM_BLOCKS = 64  # blocks of the cache; the blocks of the two requests are scattered over it
STATES_EACH = 2  # slots that the states of a request use in turn

# Model classes whose miniatures were checked in this process, with the digests of their configurations.
_checked: set[tuple[type[PreTrainedModel], str]] = set()


def check_model(paged: PagedModel) -> None:
    """Check that the model gives the same logits with paged attention as with its own attention.

    The prompt has up to 48 tokens. With paged attention it is computed as two chunks and then the last token alone.

    Raises:
        UnsupportedModel: If the logits differ by more than rounding errors.
    """
    model, block_size = paged.model, paged.block_size
    num_tokens = min(2 * block_size, 48)
    token_ids = [(7 * i + 3) % paged.vocab_size for i in range(num_tokens)]
    tables = check_tables(paged, list(range(-(-num_tokens // block_size)))[::-1], range(STATES_EACH))
    bounds = sorted({0, num_tokens // 2, num_tokens - 1, num_tokens})
    with _named(model):
        for start, end in pairwise(bounds):
            logits = paged.run([Chunk(token_ids[start:end], start, tables)])
    tolerance = TOLERANCE.get(model.dtype, 0.1)
    compare(model, logits, _own(paged, token_ids, bounds[1:], tolerance)[-1:], tolerance)


def check_miniature(paged: PagedModel) -> None:
    """Check paged attention on long prompts, with a small copy of the model (a miniature) in float32.

    A miniature has the code of the model, few parameters and small limits (see `miniature`). The prompts are longer
    than each of its limits, such as the sliding window. The check runs once per process for each model class and
    configuration.

    Raises:
        UnsupportedModel: If the logits differ from those of the miniature's own attention, or if no miniature can be
            built.
    """
    model = paged.model
    key = (type(model), config_digest(model.config))
    if key in _checked:
        return
    kinds = _kinds(paged)
    refusal: UnsupportedModel | None = None
    try:
        for small in miniatures(model, paged.observed.kinds(model.config.get_text_config().num_hidden_layers)):
            try:
                capacity = layout_of(small, BLOCK_SIZE).capacity_for(NUM_BLOCKS, len(STEPS) * STATES_EACH)
                paged_small = PagedModel(small, BLOCK_SIZE, capacity)
            except UnsupportedModel as error:  # too much was cut; try the next miniature, which is larger
                refusal = error
                continue
            if _kinds(paged_small) == kinds:
                _check_small(model, paged_small)
                _checked.add(key)
                return
    except NoMiniature as error:
        if refusal is not None:
            raise refusal from None
        raise UnsupportedModel(
            f"{type(model).__name__}: cannot build a small copy to compare its attention on long prompts ({error})"
        ) from error


def _kinds(paged: PagedModel) -> set[object]:
    """Return what a miniature must have of each kind: attention, shared or index keys, recurrent states."""
    of_layers = {(type(layer.group), layer.source is None, layer.index > 0) for layer in paged.layers}
    return {*of_layers, *((tensor.key.is_conv, tensor.key.index) for tensor in paged.observed.states.tensors)}


def check_tables(paged: PagedModel, slots: list[int], state_slots: Sequence[int]) -> list[list[int]]:
    """Return a request's block tables for a check: blocks are in *slots*, and states in *state_slots* in turn."""
    states = [state_slots[i % len(state_slots)] for i in range(len(slots))]
    num_attention_groups = paged.layout.num_attention_groups
    return [slots if i < num_attention_groups else states for i in range(len(paged.groups))]


def _check_small(model: PreTrainedModel, small: PagedModel) -> None:
    """Check that *small*, a small copy of *model*, gives the same logits with paged attention as with its own.

    Two requests share the steps of paged attention. With its own attention, each request runs alone; a model with
    recurrent states computes it in the same chunks.
    """
    rng = random.Random(7)
    steps = [_within(counts, small.model) for counts in STEPS]
    prompts = [[rng.randrange(VOCAB // 2) for _ in range(sum(counts))] for counts in steps]
    own = [
        _own(small, prompt, list(accumulate(counts)), RESUMED) for prompt, counts in zip(prompts, steps, strict=True)
    ]
    num_blocks = [-(-len(prompt) // BLOCK_SIZE) for prompt in prompts]
    slots = rng.sample(range(NUM_BLOCKS), sum(num_blocks))
    tables = [
        check_tables(small, slots[: num_blocks[0]], range(STATES_EACH)),
        check_tables(small, slots[num_blocks[0] :], range(STATES_EACH, 2 * STATES_EACH)),
    ]
    starts = [0, 0]
    for i, counts in enumerate(zip(*steps, strict=True)):
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        chunks = [
            Chunk(prompt[start:end], start, table)
            for prompt, start, end, table in zip(prompts, starts, ends, tables, strict=True)
        ]
        with _named(model):
            logits = small.run(chunks)
        compare(model, logits, torch.stack([rows[i] for rows in own]), EXACT)
        starts = ends


def _within(counts: Sequence[int], model: PreTrainedModel) -> list[int]:
    """Return *counts*, the numbers of tokens in a request's steps, reduced to fit the model's position limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or LIMIT
    if limit <= LIMIT:  # no weight depends on this number, so it was cut, and the model takes any position
        return list(counts)
    left = limit - len(counts)
    within = []
    for count in counts:
        within.append(1 + min(count - 1, left))
        left -= within[-1] - 1
    return within


def _plain(paged: PagedModel, token_ids: list[int]) -> torch.Tensor:
    """Return the model's logits with its own attention, [len(token_ids), vocab]."""
    model = paged.model
    with paged.claim.own_attention(), torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([token_ids], device=model.device), use_cache=False).logits
    return logits[0].float()


def _own(paged: PagedModel, token_ids: list[int], ends: Sequence[int], tolerance: float) -> torch.Tensor:
    """Return the model's own logits of the last tokens before *ends*, [len(ends), vocab], for one request.

    A model with recurrent states computes chunks that end at *ends*, because its results depend on the chunks.

    Raises:
        UnsupportedModel: If such a model computes a prompt as two chunks, and a token of the second one has other
            logits than in one pass, by more than *tolerance*.
    """
    plain = _plain(paged, token_ids)
    if not paged.observed.states.tensors:
        return plain[[end - 1 for end in ends]]
    middle = len(token_ids) // 2
    second = _resumed(paged, token_ids, [middle, len(token_ids)])[1]
    # All of its tokens, because a state may have decayed before the last one. With 16 bits only the last one, because
    # rounding may send a token to another expert. Miniatures have float32.
    first = 0 if paged.model.dtype == torch.float32 else len(second) - 1
    if not (error := _error(second[first:], plain[middle + first :])) <= tolerance:
        raise UnsupportedModel(
            f"{type(paged.model).__name__}: transformers does not compute a prompt in several chunks correctly with it "
            f"(its logits differ by {error:.1e} of the largest logit), probably because it ignores its recurrent state "
            "at the beginning of a chunk"
        )
    return torch.stack([logits[-1] for logits in _resumed(paged, token_ids, ends)])


def _resumed(paged: PagedModel, token_ids: list[int], ends: Sequence[int]) -> list[torch.Tensor]:
    """Return the model's own logits of chunks that end at *ends* and resume from transformers' cache.

    The result has the logits of each chunk, [num_tokens, vocab].

    Raises:
        UnsupportedModel: If the model's own code fails with transformers' cache.
    """
    model, chunks = paged.model, []
    cache = DynamicCache(config=model.config)
    try:
        with paged.claim.own_attention(), torch.inference_mode():
            for start, end in pairwise([0, *ends]):
                logits: torch.Tensor = model(
                    input_ids=torch.tensor([token_ids[start:end]], device=model.device),
                    position_ids=torch.arange(start, end, device=model.device)[None],
                    use_cache=True,
                    **{CACHE_ARGUMENT: cache},
                ).logits
                chunks.append(logits[0].float())
    except _CODE_ERRORS as error:
        if is_short_of_memory(error):
            raise
        raise UnsupportedModel(
            f"{type(model).__name__}: its own code cannot continue a prompt with transformers' cache "
            f"({' '.join(str(error).split())}), so kvtier has nothing to compare its results with"
        ) from error
    return chunks


def _error(logits: torch.Tensor, others: torch.Tensor) -> float:
    return float((logits - others).abs().max() / others.abs().max())


def compare(model: PreTrainedModel, logits: torch.Tensor, plain: torch.Tensor, tolerance: float) -> None:
    """Raise `UnsupportedModel` if *logits* differ from *plain* by more than *tolerance*, a share of the largest."""
    if not (error := _error(logits, plain)) <= tolerance:
        raise UnsupportedModel(
            f"{type(model).__name__}: its logits under kvtier's attention differ from its own logits by {error:.1e} "
            "of the largest logit; its attention or its positions need something that kvtier does not support"
        )


@contextmanager
def _named(model: PreTrainedModel) -> Iterator[None]:
    """Add the model's name to `UnsupportedModel` errors raised in the context."""
    try:
        yield
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{type(model).__name__} cannot keep its KV cache in kvtier: {error}") from error
