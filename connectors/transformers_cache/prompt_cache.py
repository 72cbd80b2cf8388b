"""`PromptCache`: the keys and values of one prompt and its answer, kept until they are stored."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from kvtier.connectors.transformers_cache.row_layout import KeysAndValues
from kvtier.engine.model.errors import UnsupportedModel

Layer = CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer


class KeptSlidingLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__
    """A sliding-window layer that keeps all keys and values from token `first_token` on, even outside the window."""

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window=sliding_window)
        self.first_token = 0
        self._pieces: list[KeysAndValues] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DynamicSlidingWindowLayer`."""
        self._pieces.append(KeysAndValues(key_states[0], value_states[0]))
        return super().update(key_states, value_states, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, see `DynamicSlidingWindowLayer`. *tokens_to_remove* is their number, negated."""
        super().crop(tokens_to_remove)
        if self._pieces:
            self._pieces = [self._joined(0, max(0, self.get_seq_length() - self.first_token))]

    def kept(self, start: int, end: int) -> KeysAndValues:
        """Return the keys and values of tokens *start* to before *end*. *start* must be `first_token` or later."""
        self._pieces = [self._joined(0, None)]
        return self._joined(start - self.first_token, end - self.first_token)

    def begin_with(self, prefix: KeysAndValues) -> None:
        """Add a loaded prefix. Only keys and values in the window are kept, because the prefix is already on disk."""
        self.update(prefix.keys[None], prefix.values[None])
        self.first_token = self.get_seq_length()
        self._pieces = []

    def _joined(self, start: int, end: int | None) -> KeysAndValues:
        keys, values = (torch.cat(tensors, dim=-2) for tensors in zip(*self._pieces, strict=True))
        return KeysAndValues(keys[:, start:end], values[:, start:end])


class PromptCache(DynamicCache):
    """The cache of one sequence that `KVTierCache.prompt` yields, for `generate(past_key_values=...)`.

    `num_loaded_tokens` is the number of tokens that were loaded from disk before the cache was yielded. Use the cache
    only in the `with` block.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        """Create an empty cache from the *config* of the model, or of its text part.

        Raises:
            UnsupportedModel: If a layer keeps anything other than keys and values.
        """
        super().__init__(config=config)
        self.num_loaded_tokens = 0
        self.on_update: Callable[[torch.Tensor, torch.Tensor, int], None] | None = None  # called before each update
        self.layers = [_keeping(layer) for layer in self.layers]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DynamicCache`."""
        if self.on_update is not None:
            self.on_update(key_states, value_states, layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def keeping_layers(self) -> list[DynamicLayer]:
        """Layers that have keys and values of their own, in order."""
        return [layer for layer in self.layers if isinstance(layer, DynamicLayer)]

    def kept(self, start: int, end: int) -> list[KeysAndValues]:
        """Return the keys and values of tokens *start* to before *end*, for each of `keeping_layers`.

        *start* must not be before the end of the loaded prefix, because sliding-window layers drop parts of the prefix.
        """
        return [_kept(layer, start, end) for layer in self.keeping_layers]

    def begin_with(self, prefix: Sequence[KeysAndValues]) -> None:
        """Add the keys and values of a loaded prefix to the empty cache."""
        for layer, loaded in zip(self.keeping_layers, prefix, strict=True):
            if isinstance(layer, KeptSlidingLayer):
                layer.begin_with(loaded)
            else:
                layer.update(loaded.keys[None], loaded.values[None])
        self.num_loaded_tokens = self.get_seq_length()


def _keeping(layer: Layer) -> Layer:
    if type(layer) is DynamicSlidingWindowLayer:  # it drops keys and values that have left the window
        return KeptSlidingLayer(layer.sliding_window)
    if type(layer) in (DynamicLayer, DummyLayer):
        return layer
    raise UnsupportedModel(
        f"a {type(layer).__name__} keeps more than the keys and values of tokens, so a prompt cannot continue from a "
        "stored prefix; use a model with full or sliding-window attention"
    )


def _kept(layer: DynamicLayer, start: int, end: int) -> KeysAndValues:
    if isinstance(layer, KeptSlidingLayer):
        return layer.kept(start, end)
    assert layer.keys is not None
    assert layer.values is not None
    return KeysAndValues(layer.keys[0, :, start:end], layer.values[0, :, start:end])
