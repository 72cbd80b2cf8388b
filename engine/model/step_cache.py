"""StepCache: the cache that a model is given for one pass, in place of transformers' own."""

import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache

from kvtier.engine.model.errors import UnsupportedModel

# The argument of a model's forward that takes a cache: "cache", or "past_key_values" before transformers 5.24.
CACHE_ARGUMENT = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"

# (keys or latents, values or rotated keys, index of the layer) -> what the layer goes on with
Receive = Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
# (index keys, index of the layer) -> the index keys that the layer's indexer chooses from
ReceiveIndex = Callable[[torch.Tensor, int], torch.Tensor]


class StepCache(Cache):
    """The cache that a model is given for one pass over chunks of several requests.

    The cache stores nothing. It gives *receive* the keys and values of each layer, or the two parts of its latent rows,
    and returns the result; it gives *receive_index* the index keys of a layer that chooses its keys. `get_seq_length`
    lets a layer compute each token's position in its own prompt.

    Methods for states other than these, which `SlotStates` has, raise `UnsupportedModel`.
    """

    def __init__(self, positions: torch.Tensor, receive: Receive, receive_index: ReceiveIndex) -> None:
        """Create a cache for one batch. *positions*, [num_tokens] int64, has each token's position in its prompt."""
        super().__init__(layers=[])
        self._positions = positions
        self._receive = receive
        self._receive_index = receive_index

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values to attend to, or the latent rows to expand, given those of the batch's tokens."""
        return self._receive(key_states, value_states, layer_idx)

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """Return an offset for each token of the batch, [num_tokens] int64; 0 if *layer_idx* is None.

        The offset is the token's position in its prompt minus its index in the batch. A layer that scales queries by
        position (Llama 4) adds the index to the offset, and so gets the position. A model calls the method without
        *layer_idx* only to compute positions. kvtier passes the positions to the model, so this result is not used; for
        models that take no positions, see `CountedCache`.
        """
        if layer_idx is None:
            return 0
        return self._positions - torch.arange(len(self._positions), device=self._positions.device)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Raise `UnsupportedModel`: only a mixer, which gets a cache of its own, may use states."""
        _refuse_state(layer_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Raise `UnsupportedModel`, as `get_conv_state` does."""
        _refuse_state(layer_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Raise `UnsupportedModel`, as `get_conv_state` does."""
        _refuse_state(layer_idx)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Raise `UnsupportedModel`, as `get_conv_state` does."""
        _refuse_state(layer_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Raise `UnsupportedModel`, as `get_conv_state` does."""
        _refuse_state(layer_idx)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Return the index keys to choose from, given those of the tokens that the layer's indexer is called for."""
        return self._receive_index(indexer_key_states, layer_idx)


class CountedCache(StepCache):
    """A `StepCache` for a model that takes no positions, but numbers tokens by the length of its cache (BART)."""

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """Return an offset for each token of the batch, [num_tokens] int64, as `StepCache` does for a layer."""
        return super().get_seq_length(0 if layer_idx is None else layer_idx)


def counts_tokens(model: PreTrainedModel) -> bool:
    """Return whether the model needs a `CountedCache`, and an attention mask in place of one of the cache's length."""
    return "position_ids" not in inspect.signature(model.forward).parameters


def _refuse_state(layer_idx: int | None) -> NoReturn:
    layer = "it" if layer_idx is None else f"layer {layer_idx}"
    raise UnsupportedModel(f"{layer} uses its recurrent or convolution state in more than one module")
