"""ObservingCache: records which states a model keeps, while it runs once on a few tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from kvtier.engine.model.errors import UnsupportedModel
from kvtier.engine.model.state_layers import StateKey, StateLayers, StateTensor, padded
from kvtier.engine.model.step_cache import Receive, ReceiveIndex, StepCache


class ObservingCache(StepCache):
    """The cache of an observed pass over one prompt, which records the states that are handed to it.

    A state's *mixer* is the innermost module that runs when the state is handed over.
    """

    def __init__(self, positions: torch.Tensor, receive: Receive, receive_index: ReceiveIndex) -> None:
        super().__init__(positions, receive, receive_index)
        self._running: list[torch.nn.Module] = []  # the modules that run now, the innermost last
        self._tensors: dict[StateKey, StateTensor] = {}
        self._mixers: dict[int, torch.nn.Module] = {}  # by id

    @property
    def states(self) -> StateLayers:
        """The states recorded so far.

        Raises:
            UnsupportedModel: If a module that keeps a state contains another one, because each of them would divide the
                batch into requests.
        """
        mixers = list(self._mixers.values())
        if any(inner is not outer and inner in outer.modules() for outer in mixers for inner in mixers):
            raise UnsupportedModel("a module that keeps a recurrent or convolution state contains another such module")
        return StateLayers(tuple(self._tensors.values()), tuple(self._mixers.values()))

    @contextmanager
    def watching(self, model: PreTrainedModel) -> Iterator[None]:
        """While in the context, follow which of the model's modules run."""
        hooks = []
        for module in model.modules():
            hooks.append(module.register_forward_pre_hook(self._enter))
            hooks.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: there are no earlier tokens."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: there are no earlier tokens."""

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Record a convolution's state, and return its inputs, [1, channels, num_tokens], after the zeros before them.

        The layer keeps its last *conv_kernel_size* inputs. Without this argument, the layer always passes its complete
        state.
        """
        width: int = kwargs.get("conv_kernel_size") or conv_states.shape[-1]
        self._record(StateKey(layer_idx, True, state_idx), (*conv_states.shape[1:-1], width), conv_states.dtype)
        return padded(conv_states, width)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Record a recurrent state, [1, …], and return it."""
        self._record(StateKey(layer_idx, False, state_idx), tuple(recurrent_states.shape[1:]), recurrent_states.dtype)
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return False: there are no earlier tokens."""
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: no inputs are kept in order to remove tokens later."""
        return False

    def _record(self, key: StateKey, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._tensors[key] = StateTensor(key, shape, dtype)
        mixer = self._running[-1]
        self._mixers[id(mixer)] = mixer

    def _enter(self, module: torch.nn.Module, args: object) -> None:
        self._running.append(module)

    def _leave(self, module: torch.nn.Module, args: object, output: object) -> None:
        self._running.pop()
