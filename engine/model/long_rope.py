"""LongRoPE with one set of frequencies for all prompts, so that a token's keys do not depend on its prompt's length.

LongRoPE has short frequencies for prompts up to the length that the model was first trained on, and long ones for
longer prompts. transformers chooses the set by the length of each prompt. Then the cached keys of a short prompt would
be wrong in a longer prompt. Like vLLM, kvtier uses one set per model: the long one if the model accepts longer prompts
than it was first trained on. The chosen frequencies are part of the digest that identifies the model's blocks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvtier.engine.model.errors import UnsupportedModel

LONG_ROPE = "longrope"
_ERRORS = (AttributeError, IndexError, KeyError, TypeError, ValueError)  # of embeddings of another form


class FixedRope:
    """A rotary embedding whose LongRoPE frequencies are fixed until `undo`. Holds no reference to the model."""

    def __init__(self, module: torch.nn.Module, layer_type: str | None) -> None:
        """Fix the frequencies of *module*; only those of *layer_type* unless that is None."""
        self._module: Any = module
        self._layer_type = layer_type
        config: Any = self._module.config
        parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
        self._original = parameters["original_max_position_embeddings"]
        is_long = config.max_position_embeddings > self._original
        self._options = {} if layer_type is None else {"layer_type": layer_type}
        self._frequencies = getattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq")
        self._before = self._frequencies.clone()
        chosen, _ = ROPE_INIT_FUNCTIONS[LONG_ROPE](
            config, self._frequencies.device, seq_len=self._original + is_long, **self._options
        )
        self._set(chosen, f"{LONG_ROPE}-{'long' if is_long else 'short'}")

    def undo(self) -> None:
        """Restore the original frequencies, so that transformers again chooses them by the length of the prompt."""
        self._set(self._before, LONG_ROPE)

    def check(self) -> None:
        """Raise `UnsupportedModel` if the embedding of a position changes with the largest position in the batch."""
        device = self._frequencies.device
        if device.type == "meta":  # its tensors have no values
            return
        numbers = torch.zeros(1, device=device)
        short, long = (torch.tensor([[0, 1, last]], device=device) for last in (2, self._original + 1))
        of_short, of_long = (self._module(numbers, positions, **self._options) for positions in (short, long))
        if any(not torch.equal(a[:, :2], b[:, :2]) for a, b in zip(of_short, of_long, strict=True)):
            raise UnsupportedModel(f"its rotary embedding ({LONG_ROPE}) changes with the length of the prompt")

    @torch.inference_mode()  # a pass in this mode, with transformers before 5.24, leaves frequencies of this mode
    def _set(self, frequencies: torch.Tensor, kind: str) -> None:
        """Set the frequencies and the module's rope type. transformers changes them only if the type is "longrope"."""
        self._frequencies.copy_(frequencies)
        self._module.rope_type = (
            kind if self._layer_type is None else {**self._module.rope_type, self._layer_type: kind}
        )


def fix_long_rope(model: PreTrainedModel) -> list[FixedRope]:
    """Fix the frequencies of all LongRoPE embeddings of the model that are not fixed yet, and return them.

    The model may be on the meta device.

    Raises:
        UnsupportedModel: If an embedding still depends on the length of the prompt. Nothing is fixed then.
    """
    fixed: list[FixedRope] = []
    try:
        for module in model.modules():
            kinds = getattr(module, "rope_type", None)
            for layer_type, kind in kinds.items() if isinstance(kinds, Mapping) else [(None, kinds)]:
                if kind == LONG_ROPE:
                    fixed.append(FixedRope(module, layer_type))
                    fixed[-1].check()
    except BaseException as error:
        _undo(fixed)
        if isinstance(error, UnsupportedModel) or not isinstance(error, _ERRORS):
            raise
        raise UnsupportedModel(
            f"{type(model).__name__}: its rotary embedding ({LONG_ROPE}) cannot be fixed for all prompts "
            f"({type(error).__name__})"
        ) from error
    return fixed


@contextmanager
def fixed_long_rope(model: PreTrainedModel) -> Iterator[None]:
    """While in the context, fix the frequencies of the model's LongRoPE, as `fix_long_rope` does."""
    fixed = fix_long_rope(model)
    try:
        yield
    finally:
        _undo(fixed)


def _undo(fixed: list[FixedRope]) -> None:
    for rope in fixed:
        rope.undo()
