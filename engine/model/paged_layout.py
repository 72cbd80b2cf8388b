"""PagedLayout: the division of a model's layers, and of the memory for what they keep, into attention groups."""

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from kvtier.engine.model.layers import ObservedLayers, numbers_of, observe_layers
from kvtier.engine.model.state_layers import StateLayers, StateSlab
from kvtier.tiers.naming.groups import AttentionGroup, RecurrentState
from kvtier.tiers.naming.namespace import GroupGeometry, StateGeometry
from kvtier.transfer.device_slab import DeviceSlab

# A state is kept at least this many tokens after the one before it, unless a prompt ends or two prompts part. Each
# state that is kept ends a chunk of the prefill.
MIN_STATE_INTERVAL = 512
# Length of a prompt in tokens that is assumed if states are kept at the ends of prompts only, or not much more often.
_PROMPT_TOKENS = 8_192
MIN_DEVICE_SLOTS = 2  # of each group: one state is read while the next one is computed


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """The division of a model's layers into groups, each with its own slab of slots.

    A group holds the attention layers with the same kind of attention that keep the same of a token. A slab is the
    device tensor that stores the KV blocks of one group. If any layer keeps a recurrent or convolution state, the last
    group is that of the states. One slot of its slab holds the states of all layers.
    """

    groups: tuple[AttentionGroup, ...]
    geometry: tuple[GroupGeometry | StateGeometry, ...]  # of each group
    places: dict[int, tuple[int, int]]  # layer id -> (group id, index in that group's slab of what the layer reads)
    readers: frozenset[int]  # ids of the layers that read an earlier layer's keys and values and keep none of their own
    states: StateLayers
    block_size: int
    dtype: torch.dtype
    index_widths: tuple[int, ...] = ()  # of each group: width of the index key at the end of a row; 0 without one
    # Tokens after which a prompt's state is kept; 0: only at ends of prompts. None: the default of `state_interval`.
    configured_interval: int | None = None

    @property
    def num_attention_groups(self) -> int:
        """Number of groups of attention layers. They come first."""
        return len(self.groups) - bool(self.states.tensors)

    def is_latent(self, group_id: int) -> bool:
        """Return whether the layers of an attention group keep latent rows in place of keys and values."""
        geometry = self.geometry[group_id]
        return isinstance(geometry, GroupGeometry) and len(geometry.parts) == 1

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes per slot of each group: what its layers keep of a block's tokens, or the states of one request."""
        return tuple(
            len(group.layer_ids) * self.block_size * numbers_of(group.parts) * self.dtype.itemsize
            if isinstance(group, GroupGeometry)
            else self.states.slot_bytes
            for group in self.geometry
        )

    @property
    def token_block_bytes(self) -> int:
        """Bytes of keys and values of a block's tokens in all attention layers, without states."""
        return sum(self.block_bytes[: self.num_attention_groups])

    @property
    def mean_block_bytes(self) -> int:
        """Mean bytes that a long prompt takes per block of its tokens: all their KV, and the states kept of them."""
        return round(self.token_block_bytes + self.states.slot_bytes * self.block_size / self._tokens_per_state)

    @property
    def _tokens_per_state(self) -> int:
        """Assumed number of tokens for each state that is kept; with any interval, states at ends of prompts are."""
        return min(self.state_interval or _PROMPT_TOKENS, _PROMPT_TOKENS)

    @property
    def state_interval(self) -> int | None:
        """Number of tokens after which a prompt's state is kept; None for a model without states.

        By default, it is the number of tokens whose keys and values take as much memory as a state, so that states take
        at most about half of a prompt's memory. It is a multiple of the block size.
        """
        if not self.states.tensors:
            return None
        if self.configured_interval is not None:
            return self.configured_interval
        equal = self.states.slot_bytes * self.block_size // self.token_block_bytes if self.token_block_bytes else 0
        return -(-max(equal, MIN_STATE_INTERVAL) // self.block_size) * self.block_size

    def num_slots(self, capacity_bytes: int, minimum: int = MIN_DEVICE_SLOTS) -> tuple[int, ...]:
        """Return the number of slots of each group if all slots together take at most *capacity_bytes*.

        All attention groups have the same number. There are two slots for states per `state_interval` tokens: one for
        the state that is kept, and one for ends of prompts and for requests that run. Without an interval, or with a
        longer one, there are two per 8,192 tokens. All states together take at most half of the capacity, except that
        there are always *minimum* slots. If the capacity is too small for *minimum* slots of each group, some numbers
        are smaller.
        """
        states_bytes, tokens_bytes = self.states.slot_bytes, self.token_block_bytes
        if not states_bytes:
            return (capacity_bytes // tokens_bytes,) * len(self.groups)
        if not tokens_bytes:
            return (capacity_bytes // states_bytes,)
        blocks_per_state = self._tokens_per_state / self.block_size / 2
        num_states = int(capacity_bytes / (blocks_per_state * tokens_bytes + states_bytes))
        num_states = max(minimum, min(num_states, capacity_bytes // 2 // states_bytes))
        num_blocks = max(0, capacity_bytes - num_states * states_bytes) // tokens_bytes
        return (*(num_blocks,) * self.num_attention_groups, num_states)

    def capacity_for(self, num_blocks: int, num_states: int = MIN_DEVICE_SLOTS) -> int:
        """Return a capacity in bytes for *num_blocks* blocks of tokens and, if the model has states, *num_states*."""
        if not self.states.tensors:
            return num_blocks * self.token_block_bytes
        wanted = (*(num_blocks,) * self.num_attention_groups, num_states)
        capacity = num_blocks * self.token_block_bytes + num_states * self.states.slot_bytes
        while any(got < want for got, want in zip(self.num_slots(capacity), wanted, strict=True)):
            capacity *= 2
        return capacity

    def device_slots(self, capacity_bytes: int) -> tuple[int, ...]:
        """Return `num_slots` for the device. Raise ValueError if a group would have less than `MIN_DEVICE_SLOTS`."""
        num_slots = self.num_slots(capacity_bytes)
        if min(num_slots) >= MIN_DEVICE_SLOTS:
            return num_slots
        if not self.states.tensors:
            raise ValueError(
                f"device capacity: {capacity_bytes} bytes hold {num_slots[0]} blocks of {self.token_block_bytes} "
                "bytes, and at least 2 are needed; raise device.capacity or lower device.block_size"
            )
        raise ValueError(
            f"device capacity: {capacity_bytes} bytes hold less than 2 recurrent states of {self.states.slot_bytes} "
            f"bytes and 2 blocks of {self.token_block_bytes} bytes; raise device.capacity to "
            f"{self.capacity_for(MIN_DEVICE_SLOTS)} or more"
        )

    def slabs(self, capacity_bytes: int, device: torch.device) -> list[DeviceSlab | StateSlab]:
        """Allocate a slab for each group, in at most *capacity_bytes* of device memory for all slabs together.

        Raises:
            ValueError: If the capacity is too small, or the device has too little free memory.
        """
        num_slots = self.device_slots(capacity_bytes)
        try:
            return [
                DeviceSlab(count, len(group.layer_ids), self.block_size, group.parts, self.dtype, device)
                if isinstance(group, GroupGeometry)
                else StateSlab(count, self.states, device)
                for group, count in zip(self.geometry, num_slots, strict=True)
            ]
        except RuntimeError as error:  # torch's error on a CPU and on a GPU
            raise ValueError(
                f"device capacity: {capacity_bytes} bytes cannot be allocated on {device}; lower device.capacity"
            ) from error


def layout_of(
    model: PreTrainedModel, block_size: int, dtype: torch.dtype | None = None, state_interval: int | None = None
) -> PagedLayout:
    """Return the layout of what *model*, which may be on the meta device, keeps if its weights have *dtype*.

    *dtype* is the model's own if it is None. *state_interval* is the `PagedLayout.configured_interval`.

    Raises:
        UnsupportedModel: If the model needs something that a paged cache cannot provide.
    """
    found, dtype = observe_layers(model, block_size), dtype or model.dtype
    tensors = (
        replace(tensor, dtype=dtype) if tensor.dtype == model.dtype else tensor for tensor in found.states.tensors
    )
    found = replace(found, states=replace(found.states, tensors=tuple(tensors)))
    return paged_layout(found, block_size, dtype, state_interval)


def bytes_per_block(model: PreTrainedModel, block_size: int) -> int:
    """Return the bytes of keys and values of *block_size* tokens in all attention layers of *model*."""
    return layout_of(model, block_size).token_block_bytes


def paged_layout(
    found: ObservedLayers, block_size: int, dtype: torch.dtype, state_interval: int | None = None
) -> PagedLayout:
    """Return the layout in which layers of equal attention and KV shape share a slab.

    *state_interval* is the `PagedLayout.configured_interval`.
    """
    layers = found.attention
    kinds = list(dict.fromkeys(layer for layer in layers.values() if layer.source is None))
    members = [[layer_id for layer_id, layer in layers.items() if layer == kind] for kind in kinds]
    geometry: list[GroupGeometry | StateGeometry] = [
        GroupGeometry(repr(kind.group), tuple(ids), kind.parts) for kind, ids in zip(kinds, members, strict=True)
    ]
    groups: list[AttentionGroup] = [kind.group for kind in kinds]
    if found.states.tensors:
        group = RecurrentState(block_size)
        groups.append(group)
        geometry.append(StateGeometry(repr(group), found.states.described))
    places = {layer_id: (group_id, index) for group_id, ids in enumerate(members) for index, layer_id in enumerate(ids)}
    sources = {layer_id: layer.source for layer_id, layer in layers.items() if layer.source is not None}
    places |= {layer_id: places[source] for layer_id, source in sources.items()}
    return PagedLayout(
        tuple(groups),
        tuple(geometry),
        places,
        frozenset(sources),
        found.states,
        block_size,
        dtype,
        tuple(kind.index for kind in kinds),
        state_interval,
    )
