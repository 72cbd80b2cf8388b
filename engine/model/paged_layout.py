"""PagedLayout: the division of a model's layers into groups, each with its own slab of KV blocks."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvtier.engine.model.layers import Layer, numbers_of
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.tiers.naming.namespace import GroupGeometry
from kvtier.transfer.device_slab import DeviceSlab


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """The division of a model's layers into groups, each with its own slab of KV blocks.

    A group holds the layers with the same kind of attention that keep the same of a token. A slab is the device
    tensor that stores the KV blocks of one group.
    """

    groups: tuple[AttentionGroup, ...]
    geometry: tuple[GroupGeometry, ...]  # of each group
    places: dict[int, tuple[int, int]]  # layer id -> (group id, index in that group's slab of what the layer reads)
    readers: frozenset[int]  # ids of the layers that read an earlier layer's keys and values and keep none of their own
    block_size: int
    dtype: torch.dtype
    index_widths: tuple[int, ...] = ()  # of each group: width of the index key at the end of a row; 0 without one

    def is_latent(self, group_id: int) -> bool:
        """Return whether the layers of the group keep latent rows in place of keys and values."""
        return len(self.geometry[group_id].parts) == 1

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes per block of each group: what all its layers keep of the block's tokens."""
        return tuple(
            len(group.layer_ids) * self.block_size * numbers_of(group.parts) * self.dtype.itemsize
            for group in self.geometry
        )

    def num_slots(self, capacity_bytes: int) -> int:
        """Return the number of slots per slab if all slabs together take at most *capacity_bytes*.

        A slot holds one block, and every slab has the same number of slots. Raises ValueError if that is less than two.
        """
        num_slots = capacity_bytes // sum(self.block_bytes)
        if num_slots < 2:
            raise ValueError(
                f"device capacity: {capacity_bytes} bytes hold {num_slots} blocks of {sum(self.block_bytes)} bytes, "
                "and at least 2 are needed; raise device.capacity or lower device.block_size"
            )
        return num_slots

    def slabs(self, capacity_bytes: int, device: torch.device) -> list[DeviceSlab]:
        """Allocate a slab for each group, in at most *capacity_bytes* of device memory for all slabs together.

        Raises:
            ValueError: If the capacity is too small, or the device has too little free memory.
        """
        num_slots = self.num_slots(capacity_bytes)
        try:
            return [
                DeviceSlab(num_slots, len(group.layer_ids), self.block_size, group.parts, self.dtype, device)
                for group in self.geometry
            ]
        except RuntimeError as error:  # torch's error on a CPU and on a GPU
            raise ValueError(
                f"device capacity: {capacity_bytes} bytes cannot be allocated on {device}; lower device.capacity"
            ) from error


def paged_layout(layers: Mapping[int, Layer], block_size: int, dtype: torch.dtype) -> PagedLayout:
    """Return the layout in which layers of equal attention and KV shape share a slab. *layers* maps ids to layers."""
    kinds = list(dict.fromkeys(layer for layer in layers.values() if layer.source is None))
    members = [[layer_id for layer_id, layer in layers.items() if layer == kind] for kind in kinds]
    geometry = tuple(
        GroupGeometry(repr(kind.group), tuple(ids), kind.parts) for kind, ids in zip(kinds, members, strict=True)
    )
    places = {layer_id: (group_id, index) for group_id, ids in enumerate(members) for index, layer_id in enumerate(ids)}
    sources = {layer_id: layer.source for layer_id, layer in layers.items() if layer.source is not None}
    places |= {layer_id: places[source] for layer_id, source in sources.items()}
    return PagedLayout(
        tuple(kind.group for kind in kinds),
        geometry,
        places,
        frozenset(sources),
        block_size,
        dtype,
        tuple(kind.index for kind in kinds),
    )
