"""`RowLayout`: the layout of a row, the bytes of a block that are stored on disk."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin

from kvtier.engine.model.errors import UnsupportedModel
from kvtier.engine.model.state_layers import StateKey, StateLayers, StateSlab
from kvtier.tiers.naming.groups import RecurrentState
from kvtier.tiers.naming.namespace import GroupGeometry, StateGeometry

EMPTY_ROW_BYTES = 8  # size of a row without keys and values


class KeysAndValues(NamedTuple):
    """The keys and values of one layer, for some tokens of one sequence.

    A layer that chooses the keys that it reads has index keys too.
    """

    keys: torch.Tensor  # [num_heads, num_tokens, key_dim]
    values: torch.Tensor  # [num_heads, num_tokens, value_dim]
    index_keys: torch.Tensor | None = None  # [1, num_tokens, index_dim]

    @property
    def parts(self) -> list[torch.Tensor]:
        """The tensors that the layer has, in order."""
        return [part for part in self if part is not None]

    def cut(self, start: int, end: int) -> "KeysAndValues":
        """Return views of the tokens *start* to before *end*."""
        return KeysAndValues(*(part[:, start:end] for part in self.parts))


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of a layer's keys and values for a token.

    *window* is the size of the layer's sliding window, or 0 if the layer has full attention. *index_dim* is the width
    of the layer's index key, or 0 if it has none.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int
    index_dim: int = 0

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Number of heads and width of keys, values and, if the layer has them, index keys."""
        index = ((1, self.index_dim),) if self.index_dim else ()
        return ((self.num_heads, self.key_dim), (self.num_heads, self.value_dim), *index)

    @classmethod
    def of(cls, layer: CacheLayerMixin, kept: KeysAndValues) -> "LayerShape":
        """Return the shape of *layer*, given the keys and values of some of its tokens.

        Raises:
            UnsupportedModel: If keys, values and index keys have several dtypes.
        """
        num_heads, _, key_dim = kept.keys.shape
        if len(dtypes := {part.dtype for part in kept.parts}) > 1:
            raise UnsupportedModel(
                f"a {type(layer).__name__} keeps tensors of several dtypes ({', '.join(sorted(map(str, dtypes)))}); "
                "load the model with a single dtype"
            )
        window = getattr(layer, "sliding_window", 0)
        index_dim = 0 if kept.index_keys is None else kept.index_keys.shape[-1]
        return cls(num_heads, key_dim, kept.values.shape[-1], kept.keys.dtype, window, index_dim)


class RowLayout:
    """The layout of a row, which holds one block: for each layer in order, its keys, its values and its index keys.

    Each of these is [num_heads, block_size, dim]. *states* are the recurrent and convolution states of the model, if
    it has any. They are stored apart, in a row of `states.slot_bytes` (see `StateSlab`).

    Without keys and values, a row is a few zeros. It records that a prompt had the block, so that a state is kept where
    a later prompt has the same prefix.
    """

    def __init__(self, shapes: Sequence[LayerShape | None], block_size: int, states: StateLayers) -> None:
        """Compute the layout. *shapes* has None for a layer without keys and values of its own."""
        self.states = states
        self.shapes = list(shapes)
        self.block_size = block_size
        self._spans: list[tuple[int, torch.dtype, tuple[int, int, int]]] = []
        end = 0
        for shape in filter(None, shapes):
            for num_heads, dim in shape.parts:
                block = (num_heads, block_size, dim)
                end += -end % shape.dtype.itemsize
                self._spans.append((end, shape.dtype, block))
                end += prod(block) * shape.dtype.itemsize
        end += -end % max((shape.dtype.itemsize for shape in filter(None, shapes)), default=1)
        self.row_bytes = end or EMPTY_ROW_BYTES

    @property
    def geometry(self) -> tuple[GroupGeometry | StateGeometry, ...]:
        """The layers grouped by shape, and the states, in the form that `Namespace` requires."""
        shapes = dict.fromkeys(filter(None, self.shapes))
        groups: list[GroupGeometry | StateGeometry] = [
            GroupGeometry(
                f"window {shape.window}, {shape.dtype}",
                tuple(layer_id for layer_id, other in enumerate(self.shapes) if other == shape),
                shape.parts,
            )
            for shape in shapes
        ]
        if self.states.tensors:
            groups.append(StateGeometry(repr(RecurrentState(self.block_size)), self.states.described))
        return tuple(groups)

    def empty(self, num_tokens: int, device: torch.device) -> list[KeysAndValues]:
        """Return uninitialized tensors for *num_tokens* tokens of each layer with keys and values of its own."""
        return [
            KeysAndValues(
                *(torch.empty(heads, num_tokens, dim, dtype=shape.dtype, device=device) for heads, dim in shape.parts)
            )
            for shape in filter(None, self.shapes)
        ]

    def states_in(self, slab: StateSlab) -> list[tuple[StateKey, torch.Tensor]]:
        """Return the states in *slab*, which has one slot, each as [1, *shape]."""
        return [(tensor.key, slab.of(tensor.key)) for tensor in self.states.tensors]

    def write(self, rows: torch.Tensor, layers: Sequence[KeysAndValues]) -> None:
        """Copy whole blocks into *rows*, a CPU tensor of bytes [num_rows, row_bytes].

        *layers* has the blocks' keys and values, on any device. Layers without keys and values of their own are left
        out.
        """
        if not self._spans:
            rows.zero_()
        for view, tensor in self._views(rows, layers):
            view.copy_(self._by_block(tensor))

    def read(self, rows: torch.Tensor, layers: Sequence[KeysAndValues]) -> None:
        """Copy blocks from *rows*, a CPU tensor of bytes with one row for each block, into the tensors of *layers*.

        *layers* has an entry for each layer with keys and values of its own, on any device.
        """
        for view, tensor in self._views(rows, layers):
            self._by_block(tensor).copy_(view)

    def _by_block(self, tensor: torch.Tensor) -> torch.Tensor:
        """View a tensor [num_heads, num_tokens, dim] as [num_blocks, num_heads, block_size, dim]."""
        num_heads, num_tokens, dim = tensor.shape
        return tensor.view(num_heads, num_tokens // self.block_size, self.block_size, dim).transpose(0, 1)

    def _views(
        self, rows: torch.Tensor, layers: Sequence[KeysAndValues]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        tensors = (tensor for layer in layers for tensor in layer.parts)
        for (start, dtype, block), tensor in zip(self._spans, tensors, strict=True):
            span = rows[:, start : start + prod(block) * dtype.itemsize]
            yield span.view(dtype).view(len(rows), *block), tensor
