"""Recurrent and convolution states: which layers of a model keep some, and the device memory that holds them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from transformers.cache_utils import Cache

from kvtier.engine.model.errors import ChangedModel

# The alignments are part of the layout of a block: raise LAYOUT_VERSION when you change them.
ALIGNMENT_BYTES = 64  # of each tensor in a slot: a multiple of every dtype's size
SLOT_ALIGNMENT_BYTES = 4096  # of a slot: a memory page, so that direct I/O can read and write it


@dataclass(frozen=True, slots=True)
class StateKey:
    """The place of a state in a model. A layer may keep several states of one kind, which *index* tells apart."""

    layer_id: int
    is_conv: bool  # the last inputs of a convolution; else a recurrent state
    index: int


@dataclass(frozen=True, slots=True)
class StateTensor:
    """The shape, without the batch, and dtype of a state."""

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the state of one request."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateLayers:
    """The states that a model keeps of a request, and the modules that keep them (its *mixers*)."""

    tensors: tuple[StateTensor, ...] = ()
    mixers: tuple[torch.nn.Module, ...] = ()

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Indices of the layers that keep states."""
        return tuple(sorted({tensor.key.layer_id for tensor in self.tensors}))

    @property
    def described(self) -> tuple[tuple[int, str, int, tuple[int, ...], str], ...]:
        """The states as `StateGeometry` has them, for a namespace."""
        return tuple(
            (
                tensor.key.layer_id,
                "convolution" if tensor.key.is_conv else "recurrent",
                tensor.key.index,
                tensor.shape,
                str(tensor.dtype),
            )
            for tensor in self.tensors
        )

    @property
    def layer_bytes(self) -> int:
        """Size of the states of one request in the layer that keeps the most; 0 for a model without states."""
        sizes = Counter[int]()
        for tensor in self.tensors:
            sizes[tensor.key.layer_id] += tensor.num_bytes
        return max(sizes.values(), default=0)

    @property
    def slot_bytes(self) -> int:
        """Size of a slot, which holds all states of one request; 0 for a model without states."""
        return _aligned(
            sum(_aligned(tensor.num_bytes, ALIGNMENT_BYTES) for tensor in self.tensors), SLOT_ALIGNMENT_BYTES
        )


class StateSlab:
    """The device memory for states. A slot holds all states of one request after some token of its prompt.

    Recurrent states usually are float32 and convolution states have the model's dtype, so a slot is bytes. Whoever
    leases a slot owns its bytes; the slab does not track leases.
    """

    num_layers = 1  # a slot is copied as a whole, not layer by layer

    def __init__(self, num_slots: int, layers: StateLayers, device: torch.device) -> None:
        """Allocate *num_slots* slots for the states of *layers*."""
        self.block_bytes = layers.slot_bytes
        # Zeroed so that all pages are touched: the first use of untouched memory is slow (DESIGN.md section 10).
        self.blocks = torch.zeros((num_slots, self.block_bytes), dtype=torch.uint8, device=device)
        self._views: dict[StateKey, torch.Tensor] = {}
        start = 0
        for tensor in layers.tensors:
            piece = self.blocks[:, start : start + tensor.num_bytes].view(tensor.dtype)
            self._views[tensor.key] = piece.view(num_slots, *tensor.shape)
            start += _aligned(tensor.num_bytes, ALIGNMENT_BYTES)

    def of(self, key: StateKey) -> torch.Tensor:
        """Return the memory of one state in all slots, [num_slots, *shape]."""
        return self._views[key]

    def copy(self, source: int, target: int) -> None:
        """Copy all states of one slot to another slot."""
        self.blocks[target].copy_(self.blocks[source])


class SlotStates(Cache):
    """A cache over the slots of some requests of a batch, which a mixer is given for their rows.

    The methods have the meaning that they have in transformers' `LinearAttentionLayer`, except that
    `has_previous_state` does not change during a pass. A mixer may also write into the tensors that `get_conv_state`
    and `get_recurrent_state` return.
    """

    def __init__(self, slab: StateSlab, slots: Sequence[int], has_earlier: bool) -> None:
        """Create a cache for one request, or for several that compute one token each.

        *has_earlier* says whether the slots hold the states after earlier tokens of the requests.
        """
        super().__init__(layers=[])
        self._slab = slab
        self._slots = slots
        self._rows = None if len(slots) == 1 else torch.tensor(slots, device=slab.blocks.device)
        self._has_earlier = has_earlier
        self._states: dict[StateKey, torch.Tensor] = {}
        self._updated: set[StateKey] = set()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a layer's last inputs to its convolution, [batch, channels, width]; None before the first token."""
        return self._earlier(StateKey(layer_idx, True, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a layer's recurrent state, [batch, …]; None before the first token."""
        return self._earlier(StateKey(layer_idx, False, state_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Keep the last of a layer's inputs to its convolution, [batch, channels, num_tokens].

        Returns:
            The stored inputs followed by *conv_states*. Without earlier tokens: *conv_states*, with zeros in front if
            they have fewer tokens than are stored.
        """
        key = StateKey(layer_idx, True, state_idx)
        before, state = self._earlier(key), self._state(key)
        width = state.shape[-1]
        inputs = padded(conv_states, width) if before is None else torch.cat([before, conv_states], dim=-1)
        state.copy_(inputs[..., inputs.shape[-1] - width :])
        self._updated.add(key)
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Keep a layer's recurrent state, [batch, …], and return it."""
        key = StateKey(layer_idx, False, state_idx)
        state = self._state(key)
        state.copy_(recurrent_states)
        self._updated.add(key)
        return state

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether the requests have computed earlier tokens."""
        return self._has_earlier

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: no inputs are kept in order to remove tokens later."""
        return False

    def write_back(self) -> None:
        """Write the states of several requests back into their slots. Call this after each mixer."""
        if self._rows is not None:
            for key, state in self._states.items():
                self._slab.of(key)[self._rows] = state
        self._states.clear()

    def _earlier(self, key: StateKey) -> torch.Tensor | None:
        return self._state(key) if self._has_earlier or key in self._updated else None

    def _state(self, key: StateKey) -> torch.Tensor:
        """Return a state of the requests: the memory of the slot itself, or a copy of several slots."""
        if key not in self._states:
            kept = self._slab.of(key)
            first = self._slots[0]
            self._states[key] = kept[first : first + 1] if self._rows is None else kept[self._rows]
        return self._states[key]


@dataclass(frozen=True, slots=True)
class StatePart:
    """Rows of a batch that a mixer computes in one call: the tokens of one request, or one token of several requests.

    *rows* are consecutive for one request. For several requests, *rows* has one row of each.
    """

    rows: slice | torch.Tensor
    states: SlotStates
    num_requests: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part's rows of *tensor*, [1, num_rows, …], as [num_requests, tokens of each, …]."""
        piece = tensor[:, self.rows]
        return piece if self.num_requests == 1 else piece.transpose(0, 1)

    def put(self, piece: torch.Tensor, tensor: torch.Tensor) -> None:
        """Write *piece*, which has the shape that `of` returns, into the part's rows of *tensor*."""
        tensor[:, self.rows] = piece if self.num_requests == 1 else piece.transpose(0, 1)


@dataclass(slots=True)
class StateStep:
    """The states of all requests in one forward pass."""

    parts: Sequence[StatePart]
    num_rows: int
    mixers_seen: set[int] = field(default_factory=set)  # ids of the mixers that were called


# The pass that this thread computes. Other threads may call the model meanwhile, and must not use its slots.
_current_step: ContextVar[StateStep] = ContextVar("kvtier_state_step")


class SplitMixer:
    """A replacement for the `forward` of a mixer, which computes each request of a batch from its own states.

    The module itself computes each part. Its arguments and results of shape [1, num_rows, …] are divided by rows, and
    its cache is replaced by the part's. The code that detects changes of the model allows this class.
    """

    def __init__(self, mixer: torch.nn.Module) -> None:
        self._forward = mixer.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the mixer computes for all rows of the batch.

        Raises:
            ChangedModel: If another thread uses the model while an engine computes with it.
        """
        step = _current_step.get(None)
        if step is None:
            raise ChangedModel(
                "an engine of kvtier computes with the model in another thread; close the engine to use the model "
                "without it"
            )
        step.mixers_seen.add(id(self))
        whole: Any = None
        for part in step.parts:
            found = self._compute(part, args, kwargs, step.num_rows)
            part.states.write_back()
            if len(step.parts) == part.num_requests == 1:
                return found
            whole = _joined(whole, found, part, step.num_rows)
        return whole

    def _compute(self, part: StatePart, args: Sequence[Any], kwargs: Mapping[str, Any], num_rows: int) -> Any:
        def of_part(value: Any) -> Any:
            if isinstance(value, Cache):
                return part.states
            is_by_rows = isinstance(value, torch.Tensor) and value.shape[:2] == (1, num_rows)
            return part.of(value) if is_by_rows else value

        return self._forward(*map(of_part, args), **{name: of_part(value) for name, value in kwargs.items()})


class SplitMixers:
    """The mixers of a model, which can be made to compute packed batches from slots."""

    def __init__(self, layers: StateLayers) -> None:
        self._mixers = [(mixer, SplitMixer(mixer)) for mixer in layers.mixers]

    @contextmanager
    def on(self, step: StateStep) -> Iterator[None]:
        """While in the context, let the mixers read and write the slots of *step*."""
        before = [vars(mixer).get("forward") for mixer, _ in self._mixers]
        token = _current_step.set(step)
        for mixer, split in self._mixers:
            vars(mixer)["forward"] = split
        try:
            yield
        finally:
            _current_step.reset(token)
            for (mixer, _), forward in zip(self._mixers, before, strict=True):
                if forward is None:
                    vars(mixer).pop("forward", None)
                else:
                    vars(mixer)["forward"] = forward

    def __len__(self) -> int:
        """Return the number of mixers."""
        return len(self._mixers)


def padded(inputs: torch.Tensor, width: int) -> torch.Tensor:
    """Return a convolution's first inputs, [batch, channels, num_tokens], with zeros in front up to *width* inputs."""
    missing = width - inputs.shape[-1]
    return torch.nn.functional.pad(inputs, (missing, 0)) if missing > 0 else inputs


def _joined(whole: Any, found: Any, part: StatePart, num_rows: int) -> Any:
    """Write a part's results *found*, tensors or a tuple of them, into those of the whole batch, and return these.

    *whole* is None for the first part.
    """
    if isinstance(found, tuple):
        wholes = (None,) * len(found) if whole is None else whole
        return tuple(_joined(each, of_part, part, num_rows) for each, of_part in zip(wholes, found, strict=True))
    if not isinstance(found, torch.Tensor):
        return found
    if whole is None:
        whole = found.new_empty(1, num_rows, *found.shape[2:])
    part.put(found, whole)
    return whole


def _aligned(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit
