"""LoraRows: in one forward pass each row gets what its own adapter adds, and rows without one nothing."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvtier.engine.model.adapter_folder import UnusableLora
from kvtier.engine.model.lora_adapter import LoraAdapter, LoraDelta

ROWS_DIFFER = 0.3  # in norm. Rounding in bfloat16 makes a few hundredths of it, another token's row more than one


# Beside the call, as the step of attention is: two engines may have one model, each in its thread.
_current: ContextVar[tuple["LoraRows | None", Sequence["LoraSpan"]]] = ContextVar("kvtier_lora", default=(None, ()))


@dataclass(frozen=True, slots=True)
class LoraSpan:
    """Consecutive rows of a pass with one adapter."""

    rows: slice  # of the tokens
    chunks: slice  # of the chunks: the output layer sees only the last token of each
    deltas: Mapping[str, LoraDelta]


class LoraRows:
    """Adds LoRA deltas beside a model's own layers, by hooks on them; owned by the model's runner.

    The hooks are there from the first pass that has such rows to the next that has none. So a model whose adapters
    nobody uses runs as if there were none (a hook that only looks costs 1 us a layer), and between passes nothing is
    switched: other adapters are other spans. peft's own layers take one adapter for each sequence of a padded batch,
    where a step here is one sequence of all requests' tokens. A pass for each of four adapters takes 3.7 times as long
    as a step without any, this 1.22 times (decoding, bench/engine/lora.py).
    """

    def __init__(self, model: PreTrainedModel, adapters: Sequence[LoraAdapter]) -> None:
        names = {name for adapter in adapters for name in adapter.deltas}
        self._layers = {name: module for name, module in model.named_modules() if name in names}
        self._output_layer = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # untyped in transformers
        self._hooks: list[RemovableHandle] = []

    @contextmanager
    def on(self, spans: Sequence[LoraSpan]) -> Iterator[None]:
        """The pass meanwhile has these rows with adapters."""
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
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @contextmanager
    def inputs(self) -> Iterator[dict[str, torch.Tensor]]:
        """What the layers get in the passes meanwhile, [rows, in_features] by name."""
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
        """`UnusableLora` if a layer's rows are not the pass's tokens in their order.

        The layers' inputs in a pass of two chunks of *num_tokens*, and of the second of them alone.
        """
        for name, rows in both.items():
            num_rows = 1 if self._layers[name] is self._output_layer else num_tokens
            alone = second.get(name)
            if len(rows) == 2 * num_rows and alone is not None and len(alone) == num_rows:
                error = (rows[num_rows:].float() - alone.float()).norm() / alone.float().norm()
                if error <= ROWS_DIFFER:
                    continue
            raise UnusableLora(
                f"lora: {name} gets its tokens in another order or number (an expert?), which would mix up requests; "
                "use adapters without it"
            )

    def _add(self, name: str, layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        """The hook of the layer of that name: add to its output, in place."""
        owner, spans = _current.get()
        if owner is not self:  # a pass of another engine's, on the same model
            return
        by_chunk = layer is self._output_layer
        rows_in = inputs[0].reshape(-1, inputs[0].shape[-1])
        rows_out = output.view(-1, output.shape[-1])  # not a copy: it is written to
        for span in spans:
            delta = span.deltas.get(name)
            if delta is not None:
                rows = span.chunks if by_chunk else span.rows
                low = torch.nn.functional.linear(rows_in[rows], delta.down)
                rows_out[rows].addmm_(low, delta.up.T, alpha=delta.scale)
