"""PagedLayout: which slab each layer's keys and values are in, and how large its blocks are."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvtier.engine.model.layers import Layer
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.tiers.naming.namespace import GroupGeometry
from kvtier.transfer.device_slab import DeviceSlab


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """The layers with one kind of attention and one geometry make a group; each group has a slab of its own."""

    groups: tuple[AttentionGroup, ...]
    geometry: tuple[GroupGeometry, ...]  # of these groups
    places: dict[int, tuple[int, int]]  # layer id -> its group, and which layer of the group's slab it is
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of each group's blocks: keys and values of all its layers."""
        return tuple(
            2 * len(group.layer_ids) * self.block_size * group.num_kv_heads * group.head_dim * self.dtype.itemsize
            for group in self.geometry
        )

    def num_slots(self, capacity_bytes: int) -> int:
        """How many blocks of every group fit into so many bytes. ValueError if fewer than two do."""
        num_slots = capacity_bytes // sum(self.block_bytes)
        if num_slots < 2:
            raise ValueError(
                f"device capacity: {capacity_bytes} bytes hold {num_slots} blocks of {sum(self.block_bytes)}; "
                "raise device.capacity or lower device.block_size"
            )
        return num_slots

    def slabs(self, capacity_bytes: int, device: torch.device) -> list[DeviceSlab]:
        """A slab for each group, of `num_slots`. ValueError also if the device does not have so much memory."""
        num_slots = self.num_slots(capacity_bytes)
        try:
            return [
                DeviceSlab(
                    num_slots,
                    len(group.layer_ids),
                    self.block_size,
                    group.num_kv_heads,
                    group.head_dim,
                    self.dtype,
                    device,
                )
                for group in self.geometry
            ]
        except RuntimeError as error:  # torch's, of a CPU and of a GPU
            raise ValueError(
                f"device capacity: {capacity_bytes} bytes cannot be had on {device}; lower device.capacity"
            ) from error


def paged_layout(layers: Mapping[int, Layer], block_size: int, dtype: torch.dtype) -> PagedLayout:
    """The layout in which layers with equal attention and geometry share a slab, in the order of their ids."""
    kinds = list(dict.fromkeys(layers.values()))
    members = [[layer_id for layer_id, layer in layers.items() if layer == kind] for kind in kinds]
    geometry = tuple(
        GroupGeometry(repr(kind.group), tuple(ids), kind.num_kv_heads, kind.head_dim)
        for kind, ids in zip(kinds, members, strict=True)
    )
    places = {layer_id: (group_id, index) for group_id, ids in enumerate(members) for index, layer_id in enumerate(ids)}
    return PagedLayout(tuple(kind.group for kind in kinds), geometry, places, block_size, dtype)
