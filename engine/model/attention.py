"""The attention function that transformers calls. It writes new keys and values into a slab and attends over them.

A slab is the device tensor that holds the KV blocks of one group of layers.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from kvtier.engine.model.cpu.row_attention import RowAttention, RowPlan
from kvtier.engine.model.errors import ChangedModel, UnsupportedModel
from kvtier.engine.model.index_keys import IndexStep
from kvtier.engine.model.latent_attention import LatentPaths, Matrices, attend_latent
from kvtier.engine.model.paged_choice import Shape, choose, plan_for
from kvtier.engine.model.paged_gather import Scoring, Scratch, attend_gathered, attend_parts
from kvtier.engine.model.paged_in_place import LaunchPlan, attend_in_place
from kvtier.engine.model.paged_segment import Segment, rows_of, segment
from kvtier.transfer.device_slab import DeviceSlab
from kvtier.transfer.layer_gate import LayerGate

__all__ = ["IMPLEMENTATION", "GroupStep", "Segment", "Step", "current_step", "paged_attention", "segment"]

IMPLEMENTATION = "kvtier"  # the name under which transformers finds `paged_attention`
# Tensors that a model may pass to its attention in addition to queries, keys and values. `paged_attention` uses s_aux;
# the model uses the other tensors outside of attention.
KNOWN_TENSORS = frozenset({"cache_position", "logits_to_keep", "position_ids", "s_aux"})


@dataclass(frozen=True, slots=True)
class Paths:
    """The segments of a step, grouped by the kernel or function that computes their attention.

    A segment is the part of a step that belongs to one request. On a CPU, segments of a single token are *rows*: they
    have a kernel of their own. For all other segments, and for single tokens that this kernel does not support,
    `paged_choice` decides whether KV blocks are *gathered* (copied) or read *in_place*.
    """

    gathered: tuple[Segment, ...]
    in_place: LaunchPlan | None
    rows: RowPlan | None


@dataclass(frozen=True, slots=True)
class GroupStep:
    """The inputs of one attention group in one forward pass. All layers of a group have the same attention."""

    slab: DeviceSlab
    write_slots: torch.Tensor  # [num_tokens] int64: the slot that each token of the batch is written into
    write_offsets: torch.Tensor  # [num_tokens] int64: the token's position within the block
    segments: tuple[Segment, ...]
    row_attention: RowAttention
    latent: LatentPaths | None = None  # if the layers of the group keep latent rows
    matrices: Mapping[int, Matrices] = field(default_factory=dict)  # by latent layer; empty if they cannot be absorbed
    scratch: Scratch = field(default_factory=Scratch)
    # By the arguments of `paths_of`. The first layer fills it, and the other layers reuse the entries.
    paths: dict[tuple[int, bool, bool], Paths] = field(default_factory=dict)
    index_width: int = 0  # of the index key at the end of a latent row; 0 without one

    def rows_in(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the latent rows of a layer without their index keys, and the index keys.

        Both are views of the slab, [num_slots, block_size, width].
        """
        kept = self.slab.parts[0][:, layer, :, 0]
        latents, keys = torch.split(kept, [kept.shape[2] - self.index_width, self.index_width], dim=2)
        return latents, keys

    def paths_of(self, num_heads: int, has_softcap: bool, has_sinks: bool) -> Paths:
        """Return the step's segments, grouped by the kernel or function that computes their attention.

        *num_heads* is the number of query heads of a layer. *has_softcap* and *has_sinks* say whether the layer
        caps scores and has attention sinks.
        """
        paths = self.paths.get((num_heads, has_softcap, has_sinks))
        if paths is None:
            paths = self._choose_paths(num_heads, has_softcap, has_sinks)
            self.paths[num_heads, has_softcap, has_sinks] = paths
        return paths

    def _choose_paths(self, num_heads: int, has_softcap: bool, has_sinks: bool) -> Paths:
        slab = self.slab.tensor
        _, num_layers, _, _, num_kv_heads, head_dim = slab.shape
        kind, device, dtype = self.segments[0].group, slab.device, slab.dtype
        shape = Shape(device, dtype, num_heads, num_kv_heads, head_dim, kind, has_softcap, has_sinks)
        rows, others = self.row_attention.split(self.segments, shape)
        choice = choose(shape, slab)
        in_place = [part for part in others if choice.in_place(part)]
        return Paths(
            tuple(part for part in others if not choice.in_place(part)),
            plan_for(shape, in_place) if in_place else None,
            self.row_attention.plan(rows, num_layers, num_heads, head_dim) if rows else None,
        )


@dataclass(frozen=True, slots=True)
class Step:
    """The inputs of one forward pass.

    `layers` maps the index of a layer in the model to two indices: its group, and its place within the group's slab.
    A layer that reads the keys and values of an earlier layer has the place of that layer, and is in `readers`.
    """

    groups: tuple[GroupStep, ...]
    layers: dict[int, tuple[int, int]]
    readers: frozenset[int] = frozenset()  # indices of the layers that keep no keys and values
    gates: tuple[LayerGate, ...] = ()  # for prefixes that are still being loaded, layer by layer
    give_up_at: float = 0.0  # monotonic time at which layers stop waiting for the gates
    index: IndexStep | None = None  # if layers choose the keys that they read
    layers_seen: set[int] = field(default_factory=set)  # indices of the layers that called `paged_attention`
    layers_received: list[int] = field(default_factory=list)  # indices of the layers that called `receive`

    def receive(self, first: torch.Tensor, second: torch.Tensor, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows of a latent layer into its slab, and return the rows that its module is to expand.

        *first* are latents, [1, 1, num_tokens, rank], and *second* rotated keys, [1, 1, num_tokens, rope]. Keys and
        values of other layers are returned as they are.
        """
        self.layers_received.append(layer_id)
        if layer_id not in self.layers:  # the attention function refuses it
            return first, second
        group_id, layer = self.layers[layer_id]
        group = self.groups[group_id]
        if group.latent is None:
            return first, second
        self.wait_for(group, layer)
        kept, _ = group.rows_in(layer)  # [num_slots, block_size, rank + rope]
        kept[group.write_slots, group.write_offsets] = torch.cat([first, second], dim=3)[0, 0]
        if not group.latent.reads_earlier:
            return first, second
        rows = torch.cat([rows_of(kept, part) for part, _ in group.latent.expanded])[None, None]
        return rows[..., : first.shape[3]], rows[..., first.shape[3] :]

    def receive_index(self, keys: torch.Tensor, layer_id: int) -> torch.Tensor:
        """Write the index keys of a layer, [1, tokens, width], into its slab; return those that its indexer needs."""
        if self.index is None or layer_id not in self.layers:
            raise UnsupportedModel(f"layer {layer_id} has index keys that it did not have when the model was loaded")
        group_id, layer = self.layers[layer_id]
        group = self.groups[group_id]
        self.wait_for(group, layer)
        return self.index.receive(keys, group.rows_in(layer)[1], group.write_slots, group.write_offsets)

    def wait_for(self, group: "GroupStep", layer: int) -> None:
        """Wait until the blocks of prefixes that are still being loaded have arrived, in one layer of the group."""
        for gate in self.gates:
            gate.wait(layer, group.slab.num_layers, self.give_up_at)


# transformers cannot pass an object of kvtier to the attention function, so a context variable carries the step.
current_step: ContextVar[Step] = ContextVar("kvtier_step")


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]; all requests' tokens one after the other
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,  # [num_heads], attention sinks
    indices: torch.Tensor | None = None,  # [1, num_tokens, num_chosen], positions of the keys that each token reads
    **kwargs: Any,  # ignored (dropout, sliding_window …), except that unknown tensors are refused
) -> tuple[torch.Tensor, None]:
    """Write a layer's new keys and values into its slab, and return its attention output.

    This function is registered with transformers, which calls it for each attention layer.

    Returns:
        The output, [1, num_tokens, num_heads, head_dim], and None in place of the attention weights.

    Raises:
        UnsupportedModel: If the model passes a mask or an unknown tensor, because kvtier would ignore it.
        ChangedModel: If the model is called outside of an engine's step.
    """
    step = current_step.get(None)
    given_mask = None if step is None or step.index is None else step.index.mask
    if attention_mask is not None and attention_mask is not given_mask:
        raise UnsupportedModel("it creates an attention mask of its own, which kvtier cannot apply (sparse attention)")
    refuse_unknown_tensors(kwargs)
    if step is None:
        raise ChangedModel(
            "the model uses kvtier's attention, which works only in an open LLM; close the LLM to use the model "
            "without it, or call set_attn_implementation('sdpa') if this is a copy of the LLM's model"
        )
    layer_id: int | None = getattr(module, "layer_idx", None)
    if layer_id is None or layer_id < 0:  # the module computes several layers; see `layers.SHARED_MODULE`
        layer_id = step.layers_received[-1]
    step.layers_seen.add(layer_id)
    group_id, layer = step.layers[layer_id]
    group = step.groups[group_id]
    _, num_heads, num_tokens, head_dim = query.shape
    scoring = Scoring(head_dim**-0.5 if scaling is None else scaling, softcap, s_aux)
    output = query.new_empty(num_tokens, num_heads, value.shape[3])
    if group.latent is not None:  # its rows were written when its module handed them to `Step.receive`
        if softcap is not None:
            raise UnsupportedModel("it has latent attention and caps its scores")
        kept, chosen = group.rows_in(layer)[0], None if indices is None else indices[0]
        attend_latent(query, key, value, kept, group.latent, group.matrices.get(layer_id), scoring, output, chosen)
        return output.unsqueeze(0), None
    if indices is not None:
        raise UnsupportedModel(f"layer {layer_id} chooses the keys that it reads, and keeps no latent rows")
    step.wait_for(group, layer)
    kept_of = [part[:, layer] for part in group.slab.parts]  # [num_slots, block_size, num_kv_heads, width]
    if layer_id not in step.readers:
        for kept, new in zip(kept_of, (key, value), strict=True):
            kept[group.write_slots, group.write_offsets] = new[0].transpose(0, 1)
    if not group.slab.is_pair:
        attend_parts(query, kept_of, group.segments, scoring, output)
        return output.unsqueeze(0), None
    slab = group.slab.tensor
    paths = group.paths_of(num_heads, softcap is not None, s_aux is not None)
    if paths.gathered:
        attend_gathered(query, slab, layer, paths.gathered, scoring, output, group.scratch)
    if paths.rows is not None:
        group.row_attention.attend(query, slab, layer, paths.rows, scoring, output)
    if paths.in_place is not None:
        attend_in_place(query, slab, layer, paths.in_place, group.segments[0].group, scoring, output)
    return output.unsqueeze(0), None


def refuse_unknown_tensors(kwargs: Mapping[str, Any]) -> None:
    """Raise `UnsupportedModel` if the *kwargs* of an attention function include a tensor unknown to kvtier."""
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and name not in KNOWN_TENSORS:
            raise UnsupportedModel(f"it passes the tensor {name} to its attention, which kvtier does not support")


AttentionInterface.register(IMPLEMENTATION, paged_attention)
