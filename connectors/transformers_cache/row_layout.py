"""`RowLayout`: the places of each layer's keys and values in a block's row."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin

from kvtier.tiers.naming.namespace import GroupGeometry


class KeysAndValues(NamedTuple):
    """The keys and values of one layer, for some tokens of one sequence."""

    keys: torch.Tensor  # [num_heads, num_tokens, key_dim]
    values: torch.Tensor  # [num_heads, num_tokens, value_dim]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of a layer's keys and values for a token.

    *window* is the number of tokens that the layer sees, 0 for all. Layers with equal windows have equal masks.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int

    @classmethod
    def of(cls, layer: CacheLayerMixin, kept: KeysAndValues) -> "LayerShape":
        """Return the shape of a layer that has kept some tokens."""
        num_heads, _, key_dim = kept.keys.shape
        window = getattr(layer, "sliding_window", 0)
        return cls(num_heads, key_dim, kept.values.shape[-1], kept.keys.dtype, window)


class RowLayout:
    """The layout of rows: a block's layers in order, keys before values, each [num_heads, block_size, dim]."""

    def __init__(self, shapes: Sequence[LayerShape | None], block_size: int) -> None:
        """Compute the layout from the *shapes* of all layers, in order. A layer that keeps nothing has None."""
        self.shapes = list(shapes)
        self.block_size = block_size
        self._spans: list[tuple[int, torch.dtype, tuple[int, int, int]]] = []
        end = 0
        for shape in filter(None, shapes):
            for dim in (shape.key_dim, shape.value_dim):
                block = (shape.num_heads, block_size, dim)
                end += -end % shape.dtype.itemsize
                self._spans.append((end, shape.dtype, block))
                end += prod(block) * shape.dtype.itemsize
        self.row_bytes = end + -end % max((shape.dtype.itemsize for shape in filter(None, shapes)), default=1)

    @property
    def geometry(self) -> tuple[GroupGeometry, ...]:
        """Layers grouped by shape, for the namespace."""
        shapes = dict.fromkeys(filter(None, self.shapes))
        return tuple(
            GroupGeometry(
                f"window {shape.window}, values of {shape.value_dim}, {shape.dtype}",
                tuple(layer_id for layer_id, other in enumerate(self.shapes) if other == shape),
                shape.num_heads,
                shape.key_dim,
            )
            for shape in shapes
        )

    def write(self, rows: torch.Tensor, layers: Sequence[KeysAndValues]) -> None:
        """Copy whole blocks into *rows*, a CPU tensor of bytes [num_rows, row_bytes].

        *layers* has the keys and values of each layer that keeps any, on any device.
        """
        for view, tensor in self._views(rows, layers):
            view.copy_(self._by_block(tensor))

    def read(self, rows: torch.Tensor, layers: Sequence[KeysAndValues]) -> None:
        """Copy *rows* into whole blocks; the arguments are like those of `write`."""
        for view, tensor in self._views(rows, layers):
            self._by_block(tensor).copy_(view)

    def _by_block(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return [num_heads, num_tokens, dim] as [num_blocks, num_heads, block_size, dim]."""
        num_heads, num_tokens, dim = tensor.shape
        return tensor.view(num_heads, num_tokens // self.block_size, self.block_size, dim).transpose(0, 1)

    def _views(
        self, rows: torch.Tensor, layers: Sequence[KeysAndValues]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        tensors = (tensor for layer in layers for tensor in layer)
        for (start, dtype, block), tensor in zip(self._spans, tensors, strict=True):
            span = rows[:, start : start + prod(block) * dtype.itemsize]
            yield span.view(dtype).view(len(rows), *block), tensor
