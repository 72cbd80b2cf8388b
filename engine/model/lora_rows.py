"""LoraRows: hooks that apply LoRA adapters in a forward pass, in which each request may use another adapter."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvtier.engine.model.adapter_folder import UnusableLora
from kvtier.engine.model.lora_adapter import LoraAdapter, LoraDelta

# Rows that differ by more than this fraction of their norm belong to different tokens. Rounding in bfloat16 causes a
# difference of a few hundredths, and another token one of more than 1.
ROWS_DIFFER = 0.3


# The engine's `LoraRows` and the spans of the running pass. A context variable, because two engines in two threads may
# share one model.
_current: ContextVar[tuple["LoraRows | None", Sequence["LoraSpan"]]] = ContextVar("kvtier_lora", default=(None, ()))


@dataclass(frozen=True, slots=True)
class LoraSpan:
    """The consecutive rows (tokens) of a forward pass that use one adapter."""

    rows: slice  # of most layers, which have one row for each token
    logits: slice  # of the output layer, which has rows only for the tokens whose logits are wanted
    deltas: Mapping[str, LoraDelta]


class LoraRows:
    """Forward hooks that add the outputs of LoRA adapters to those of a model's layers. The model's runner owns them.

    The first pass that uses an adapter sets the hooks, and the next pass that uses none removes them. So adapters that
    no request uses cost nothing, whereas an idle hook costs 1 us per layer.

    peft's own layers cannot be used, because they take one adapter per sequence of a padded batch. Here one sequence
    holds the tokens of all requests. If requests with four adapters decode, one pass with these hooks takes 1.22 times
    as long as a step without adapters. A separate pass for each adapter takes 3.7 times as long (bench/engine/lora.py).
    """

    def __init__(self, model: PreTrainedModel, adapters: Sequence[LoraAdapter]) -> None:
        names = {name for adapter in adapters for name in adapter.deltas}
        self._layers = {name: module for name, module in model.named_modules() if name in names}
        self._output_layer = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # untyped in transformers
        self._hooks: list[RemovableHandle] = []

    @contextmanager
    def on(self, spans: Sequence[LoraSpan]) -> Iterator[None]:
        """Apply the adapters of *spans* to their rows in the forward pass that runs in the context."""
        if not spans:
            self.unhook()
        elif not self._hooks:
            for name, layer in self._layers.items():
                self._hooks.append(layer.register_forward_hook(partial(self._add, name)))
        token = _current.set((self, spans))
        try:
            yield
        finally:
            _current.reset(token)

    def unhook(self) -> None:
        """Remove the hooks from the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def inputs(self) -> Iterator[dict[str, torch.Tensor]]:
        """Record the adapted layers' inputs while the `with` block runs: tensors [rows, in_features] by layer name."""
        seen: dict[str, torch.Tensor] = {}

        def see(name: str, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            seen[name] = inputs[0].reshape(-1, inputs[0].shape[-1]).clone()

        hooks = [layer.register_forward_pre_hook(partial(see, name)) for name, layer in self._layers.items()]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    def check_order(
        self, both: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor], num_tokens: int
    ) -> None:
        """Raise `UnusableLora` if a layer, such as an expert, does not get all tokens of a pass in their order.

        *both* has the layers' inputs, recorded by `inputs`, in a pass of two chunks of *num_tokens* tokens each.
        *second* has the inputs in a pass of the second chunk alone. For each layer, the second half of the rows in
        *both* must be close to the rows in *second*.
        """
        for name, rows in both.items():
            num_rows = 1 if self._layers[name] is self._output_layer else num_tokens
            alone = second.get(name)
            if len(rows) == 2 * num_rows and alone is not None and len(alone) == num_rows:
                error = (rows[num_rows:].float() - alone.float()).norm() / alone.float().norm()
                if error <= ROWS_DIFFER:
                    continue
            raise UnusableLora(
                f"lora: the layer {name} gets its tokens in another order or number (is it an expert?), so its deltas "
                "would be added to wrong requests; use adapters without this layer"
            )

    def check_unused(self, of_expansion: Mapping[str, torch.Tensor]) -> None:
        """Raise `UnusableLora` if a layer with adapters expands latent rows, which are rows of earlier tokens too.

        *of_expansion* has the layers' inputs, recorded by `inputs`, while the model expanded rows.
        """
        if of_expansion:
            raise UnusableLora(
                f"lora: the layer {min(of_expansion)} expands latent rows of the cache, so its deltas would reach "
                "wrong tokens; use adapters without this layer"
            )

    def check_outside(self, modules: Iterable[torch.nn.Module]) -> None:
        """Raise `UnusableLora` if a layer with adapters is inside one of *modules*, which get only parts of a batch."""
        inside = {id(layer) for module in modules for layer in module.modules()}
        for name, layer in self._layers.items():
            if id(layer) in inside:
                raise UnusableLora(
                    f"lora: the layer {name} chooses the keys that are read and gets only parts of a batch, so its "
                    "deltas would reach wrong tokens; use adapters without this layer"
                )

    def _add(self, name: str, layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        """Apply the adapters to the output of the layer called *name*, in place. This is the layer's hook."""
        owner, spans = _current.get()
        if owner is not self:  # another engine's pass on the same model
            return
        is_output = layer is self._output_layer
        rows_in = inputs[0].reshape(-1, inputs[0].shape[-1])
        rows_out = output.view(-1, output.shape[-1])  # must be a view, because it is written to
        for span in spans:
            delta = span.deltas.get(name)
            if delta is not None:
                rows = span.logits if is_output else span.rows
                low = torch.nn.functional.linear(rows_in[rows], delta.down)
                rows_out[rows].addmm_(low, delta.up.T, alpha=delta.scale)
