"""`PromptCache`: the keys, values and states of one prompt and its answer, kept until they are stored."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvtier.connectors.transformers_cache.row_layout import KeysAndValues
from kvtier.engine.model.errors import UnsupportedModel
from kvtier.engine.model.state_layers import StateKey, StateLayers, StateSlab, StateTensor, padded
from kvtier.engine.model.step_cache import CACHE_ARGUMENT

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
        pieces = zip(*(piece.parts for piece in self._pieces), strict=True)
        whole = KeysAndValues(*(torch.cat(tensors, dim=-2) for tensors in pieces))
        return whole.cut(start, whole.keys.shape[-2] if end is None else end)


class KeptSlidingLayerWithStates(  # type: ignore[misc, no-untyped-call, override]  # transformers' own bases differ
    LinearAttentionAndSlidingWindowAttentionLayer, KeptSlidingLayer
):
    """A layer that has both states and a sliding window, and keeps all keys and values as `KeptSlidingLayer` does."""

    def __init__(self, sliding_window: int, number_of_states: int) -> None:
        KeptSlidingLayer.__init__(self, sliding_window=sliding_window)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, see `KeptSlidingLayer`."""
        LinearAttentionLayer.crop(self, tokens_to_remove)
        KeptSlidingLayer.crop(self, tokens_to_remove)


class PromptCache(DynamicCache):
    """The cache of one sequence that `KVTierCache.prompt` yields, for `generate(past_key_values=...)`.

    `num_loaded_tokens` is the number of tokens that were loaded from disk before the cache was yielded.
    `num_given_tokens` is the number of all tokens that the cache had then. It is larger if the model has states,
    because `KVTierCache.prompt` computes most of such a prompt itself. Use the cache only in the `with` block.

    If no layer keeps keys and values, nothing in the cache shows how many tokens it has. Then `advance_to` must be
    called after each pass. Such a cache also reports that its layers are not linear, although they are. If all layers
    were reported as linear, `generate` would not ask for the cache's length, and would compute the whole prompt.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        """Create an empty cache from the *config* of the model, or of its text part.

        Raises:
            UnsupportedModel: If a layer keeps anything other than keys, values, index keys and states.
        """
        super().__init__(config=config)
        self.num_loaded_tokens = 0
        self.num_given_tokens = 0
        self.on_update: Callable[[torch.Tensor, torch.Tensor, int], None] | None = None  # called before each update
        self.on_index: Callable[[torch.Tensor, int], None] | None = None  # called before each update of index keys
        self.on_state: Callable[[], None] | None = None  # called before each access to a state
        self.layers = [_keeping(layer) for layer in self.layers]
        self._num_counted: int | None = None if self.keeping_layers else 0  # tokens, if they must be counted

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """See `DynamicCache`."""
        return super().get_seq_length(layer_idx) if self._num_counted is None else self._num_counted

    def advance_to(self, num_tokens: int) -> None:
        """Record that the states are those after *num_tokens* tokens. Has no effect if a layer has keys and values."""
        if self._num_counted is not None:
            self._num_counted = num_tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, see `DynamicCache`.

        Raises:
            ValueError: If the cache has recurrent states, which transformers would leave as they are.
        """
        linear = [layer for layer in self.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
        if tokens_to_remove and any(any(layer.is_recurrent_states_initialized.values()) for layer in linear):
            raise ValueError("tokens cannot be taken back from recurrent states; use another cache for this sequence")
        super().crop(tokens_to_remove)

    @property
    def is_linear(self) -> list[bool]:
        """See `DynamicCache`. All False if no layer keeps keys and values, so that `generate` skips known tokens."""
        return super().is_linear if self._num_counted is None else [False] * len(self.layers)

    @property
    def is_compileable(self) -> bool:
        """See `DynamicCache`. Always False, because a compiled pass would bypass the checks of `KVTierCache`."""
        return False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DynamicCache`."""
        if self.on_update is not None:
            self.on_update(key_states, value_states, layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """See `DynamicCache`."""
        if self.on_index is not None:
            self.on_index(indexer_key_states, layer_idx)
        return super().update_indexer(indexer_key_states, layer_idx)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """See `DynamicCache`."""
        self._report_state()
        return super().get_conv_state(layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """See `DynamicCache`."""
        self._report_state()
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """See `DynamicCache`."""
        self._report_state()
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """See `DynamicCache`."""
        self._report_state()
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    @property
    def keeping_layers(self) -> list[DynamicLayer]:
        """Layers that have keys and values of their own, in order."""
        return [layer for layer in self.layers if isinstance(layer, DynamicLayer)]

    def kept(self, start: int, end: int) -> list[KeysAndValues]:
        """Return the keys and values of tokens *start* to before *end*, for each of `keeping_layers`.

        *start* must not be before the end of the loaded prefix, because sliding-window layers drop parts of the prefix.
        """
        return [_kept(layer, start, end) for layer in self.keeping_layers]

    @property
    def state_layers(self) -> StateLayers:
        """The states that the model keeps, known after the model's first pass."""
        return StateLayers(
            tuple(StateTensor(key, tuple(state.shape[1:]), state.dtype) for key, state in self._states())
        )

    def copy_states(self, slab: StateSlab) -> None:
        """Copy the states after the last pass into *slab*, which has one slot."""
        for key, state in self._states():
            slab.of(key).copy_(state)

    def begin_with(
        self, num_tokens: int, prefix: Sequence[KeysAndValues], states: Iterable[tuple[StateKey, torch.Tensor]] = ()
    ) -> None:
        """Add the keys and values of a loaded prefix to the empty cache, and the *states* after the prefix.

        The prefix has *num_tokens* tokens. The tensor of each state has the shape [1, *shape], see `StateTensor`. It is
        copied.
        """
        for key, state in states:
            layer: Any = self.layers[key.layer_id]
            if key.is_conv:
                layer.update_conv_state(state, key.index, conv_kernel_size=state.shape[-1])
            else:
                layer.update_recurrent_state(state, key.index)
        for keeping, loaded in zip(self.keeping_layers, prefix, strict=True):
            if isinstance(keeping, KeptSlidingLayer):
                keeping.begin_with(loaded)
            else:
                keeping.update(loaded.keys[None], loaded.values[None])
            if loaded.index_keys is not None:
                assert isinstance(keeping, DynamicIndexedLayer)
                keeping.update_indexer(loaded.index_keys)
        self.advance_to(num_tokens)
        self.num_loaded_tokens = self.num_given_tokens = self.get_seq_length()

    def _report_state(self) -> None:
        if self.on_state is not None:
            self.on_state()

    def _states(self) -> Iterator[tuple[StateKey, torch.Tensor]]:
        for layer_id, layer in enumerate(self.layers):
            if not isinstance(layer, LinearAttentionCacheLayerMixin):
                continue
            for index, inputs in layer.conv_states.items():
                if inputs is not None:  # more than the last ones while transformers may have to remove guessed tokens
                    width: int = layer.conv_kernel_size[index] or inputs.shape[-1]
                    yield StateKey(layer_id, True, index), padded(inputs[..., -width:], width)
            for index, state in layer.recurrent_states.items():
                if state is not None:
                    yield StateKey(layer_id, False, index), state


def compute(model: PreTrainedModel, cache: PromptCache, token_ids: torch.Tensor, num_logits: int = 0) -> torch.Tensor:
    """Compute tokens after those that *cache* has, and add them to it, as transformers' `generate` does.

    *token_ids*, [1, num_tokens], are on the model's device. The logits of the last *num_logits* tokens are returned, or
    those of all tokens if it is 0. Some models always return all.
    """
    parameters = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"logits_to_keep": num_logits} if "logits_to_keep" in parameters else {}
    start = cache.get_seq_length()
    end = start + token_ids.shape[1]
    if "position_ids" in parameters:  # without them, some models count the tokens of each pass from 0
        options["position_ids"] = torch.arange(start, end, device=token_ids.device)[None]
    logits: torch.Tensor = model(input_ids=token_ids, use_cache=True, **{CACHE_ARGUMENT: cache}, **options).logits
    cache.advance_to(end)
    return logits


def _keeping(layer: Layer) -> Layer:
    if type(layer) is DynamicSlidingWindowLayer:  # it drops keys and values that have left the window
        return KeptSlidingLayer(layer.sliding_window)
    if type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
        return KeptSlidingLayerWithStates(layer.sliding_window, layer.number_of_states)
    if type(layer) in (
        DynamicLayer,
        DynamicIndexedLayer,
        DummyLayer,
        LinearAttentionLayer,
        LinearAttentionAndFullAttentionLayer,
    ):
        return layer
    raise UnsupportedModel(
        f"a {type(layer).__name__} keeps more than keys, values, index keys and states, so a prompt cannot continue "
        "from a stored prefix; use a model with full attention, index keys, sliding windows, or recurrent or "
        "convolution states"
    )


def _kept(layer: DynamicLayer, start: int, end: int) -> KeysAndValues:
    if isinstance(layer, KeptSlidingLayer):
        return layer.kept(start, end)
    assert layer.keys is not None
    assert layer.values is not None
    index_keys = layer.indexer_keys if isinstance(layer, DynamicIndexedLayer) else None
    return KeysAndValues(layer.keys[0], layer.values[0], index_keys).cut(start, end)
