"""The check, made when a cache is opened, that the keys and values of a model's prefixes can be stored and reused."""

import random
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvtier.connectors.transformers_cache.prompt_cache import PromptCache, compute
from kvtier.connectors.transformers_cache.row_layout import LayerShape, RowLayout
from kvtier.engine.model.check import EXACT, RESUMED, TOLERANCE
from kvtier.engine.model.errors import UnsupportedModel
from kvtier.engine.model.miniature import LIMIT, VOCAB, NoMiniature, miniatures
from kvtier.engine.model.state_layers import StateSlab

SMALL_BLOCK = 16
NUM_TOKENS = 20 * LIMIT + 10  # length of a miniature's prompt, far beyond the usual limit in a miniature
PARTS = ("keys", "values", "index keys")
SPLITS = (SMALL_BLOCK, 5 * SMALL_BLOCK, 18 * SMALL_BLOCK)


def checked_layout(model: PreTrainedModel, block_size: int) -> RowLayout:
    """Check that prefixes of the model can be reused in other prompts, and return the layout of the model's blocks.

    The check builds a miniature: a small model of the same class, with small limits, such as the number of positions.
    The miniature computes prefixes of several lengths, both alone and as part of a long prompt, and the results are
    compared. This detects all rotary embeddings that depend on a prompt's length.

    Raises:
        UnsupportedModel: If a prefix that was computed in another prompt cannot be reused. The message has the reason.
    """
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{type(model).__name__} has an encoder; KVTierCache supports decoder-only models")
    if model.training:
        raise UnsupportedModel(f"{type(model).__name__} is in training mode; call its eval() first")
    _check_miniature(model)
    num_tokens = min(2 * block_size + 2, _max_tokens(model))
    token_ids = [3 + i % 13 for i in range(num_tokens)]
    cache, logits = _computed(model, token_ids)
    layout = RowLayout(_shapes(cache), block_size, cache.state_layers)
    if num_tokens > block_size:
        prefix = _computed(model, token_ids[:block_size])[0] if layout.states.tensors else None
        resumed = _resumed(model, layout, cache, prefix, token_ids, block_size)
        _compare(model, "logits after a prefix", resumed, logits[block_size:], TOLERANCE.get(model.dtype, 0.1))
    return layout


def _check_miniature(model: PreTrainedModel) -> None:
    kinds = [type(layer).__name__ for layer in PromptCache(model.config).layers]
    try:
        small = next(miniatures(model, kinds))
    except NoMiniature as error:
        raise UnsupportedModel(
            f"KVTierCache cannot check whether prefixes of {type(model).__name__} can be reused, because a small model "
            f"of this class cannot be built ({error}); use another model"
        ) from error
    rng = random.Random(7)
    token_ids = [rng.randrange(VOCAB // 2) for _ in range(min(NUM_TOKENS, _max_tokens(small)))]
    splits = [split for split in SPLITS if split < len(token_ids)]
    # Compute the prefixes before the long prompt, because some rotary embeddings change with the longest prompt so far.
    prefixes = [_computed(small, token_ids[:split])[0] for split in splits]
    cache, logits = _computed(small, token_ids)
    layout = RowLayout(_shapes(cache), SMALL_BLOCK, cache.state_layers)
    # With states, keys and logits depend on how a prompt is divided into passes, by rounding errors of 1e-5.
    tolerance = RESUMED if layout.states.tensors else EXACT
    for split, prefix in zip(splits, prefixes, strict=True):
        for mine, of_long in zip(prefix.kept(0, split), cache.kept(0, split), strict=True):
            for what, part, expected in zip(PARTS, mine.parts, of_long.parts, strict=False):
                _compare(model, f"{what} of a prefix", part, expected, tolerance)
        resumed = _resumed(small, layout, cache, prefix, token_ids, split)
        _compare(model, "logits after a prefix", resumed, logits[split:], tolerance)


def _computed(model: PreTrainedModel, token_ids: list[int]) -> tuple[PromptCache, torch.Tensor]:
    """Compute the tokens. Return the model's cache and the logits, [num_tokens, vocab]."""
    cache = PromptCache(model.config)
    return cache, _logits(model, cache, token_ids)


def _resumed(
    model: PreTrainedModel,
    layout: RowLayout,
    computed: PromptCache,
    states_of: PromptCache | None,
    token_ids: list[int],
    split: int,
) -> torch.Tensor:
    """Return the logits of the tokens from *split* on, computed after a restored prefix.

    The keys and values of the prefix are taken from *computed*, converted to the format on disk, and converted back.
    Its states are those of *states_of*, which has computed just the prefix. It is None if the model has no states.
    """
    num_blocks = split // layout.block_size
    rows = torch.empty(num_blocks, layout.row_bytes, dtype=torch.uint8)
    layout.write(rows, computed.kept(0, split))
    prefix = layout.empty(split, model.device)
    layout.read(rows, prefix)
    cache = PromptCache(model.config)
    slab = StateSlab(1, layout.states, model.device)
    if states_of is not None:
        states_of.copy_states(slab)
    cache.begin_with(split, prefix, layout.states_in(slab))
    return _logits(model, cache, token_ids[split:])


def _logits(model: PreTrainedModel, cache: PromptCache, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = compute(model, cache, torch.tensor([token_ids], device=model.device))
    return logits[0].float()


def _shapes(cache: PromptCache) -> Sequence[LayerShape | None]:
    if any(getattr(layer, "indexer_position_ids", None) is not None for layer in cache.layers):
        raise UnsupportedModel(
            "the model keeps the positions of all tokens beside its index keys, and KVTierCache does not; "
            "use a model that keeps index keys alone"
        )
    kept = iter(cache.kept(0, 1))
    return [LayerShape.of(layer, next(kept)) if isinstance(layer, DynamicLayer) else None for layer in cache.layers]


def _compare(model: PreTrainedModel, what: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    error = float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
    if not error <= tolerance:
        raise UnsupportedModel(
            f"{type(model).__name__}: {what} differ by {error:.1e} when the prompt continues, so a prefix can be "
            "reused only in the prompt that it was computed in"
        )


def _max_tokens(model: PreTrainedModel) -> int:
    """Return the maximum number of tokens in a prompt with which *model* is checked."""
    # A maximum of LIMIT is that of a miniature, and prompts exceed it on purpose. A higher maximum is not exceeded: a
    # miniature keeps it only if its position embeddings are learned, and these fail beyond it.
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return NUM_TOKENS if limit is None or limit <= LIMIT else limit
