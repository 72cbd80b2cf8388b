"""Detection of what each of a model's layers keeps of a prompt, by running the model once on two tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from kvtier.engine.model.attention import IMPLEMENTATION, refuse_unknown_tensors
from kvtier.engine.model.errors import UnsupportedModel, oom_as_memory_error
from kvtier.engine.model.index_keys import INDEXED, chooses_keys
from kvtier.engine.model.long_rope import fixed_long_rope
from kvtier.engine.model.observed_states import ObservingCache
from kvtier.engine.model.paged_segment import reads
from kvtier.engine.model.state_layers import StateLayers
from kvtier.engine.model.step_cache import CACHE_ARGUMENT, StepCache
from kvtier.tiers.naming.groups import AttentionGroup, ChunkedLocal, FullAttention, SlidingWindow

# Values of `layer_idx` in a module that several layers share; the cache is told which layer it computes.
SHARED_MODULE = (-1, None)
OBSERVED = f"{IMPLEMENTATION}-observed"  # name of the attention function while a model is observed
# The same for a model on the meta device, without masks. To create masks, transformers reads the values of positions,
# and tensors on that device have no values.
OBSERVED_PLAN = f"{IMPLEMENTATION}-observed-plan"
# The rotary embedding that makes keys depend on the prompt's length: blocks with the same name could differ.
LENGTH_DEPENDENT_ROPE = "dynamic"
# Kinds of layers in a configuration's `layer_types`: layers that keep nothing of a prompt, and layers with full
# attention. A hybrid layer also keeps a recurrent state.
KEEPS_NOTHING = ("mlp", "moe")
FULL_KINDS = ("full_attention", "hybrid", INDEXED)
STEPS_AROUND = (-2, -1, 0, 1, 2)  # offsets from the edges of a window or chunk at which masks are compared
FAR = 1_000_003  # a position beyond every limit of known models
_ERRORS = (ValueError, TypeError, KeyError, RuntimeError, AttributeError, IndexError)

# transformers' mask function: (batch, head, query, key) -> whether the query reads the key.
MaskFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Layer:
    """An attention layer's kind of attention and what it keeps of a token, as found by running the model."""

    group: AttentionGroup
    parts: tuple[tuple[int, int], ...]  # (heads, width) of keys and of values, or of one latent row
    source: int | None = None  # earlier layer whose keys and values this one reads; None if it keeps its own
    rank: int = 0  # number of latents at the beginning of a latent row, before the rotated key; 0 for keys and values
    index: int = 0  # width of the index key at the end of a latent row; 0 if the layer has no indexer

    @property
    def kind(self) -> tuple[AttentionGroup, tuple[tuple[int, int], ...], bool]:
        """The layer's attention group, its parts, and whether it keeps them itself."""
        return self.group, self.parts, self.source is None

    @property
    def ranks(self) -> tuple[int, int]:
        """The widths of the latents and of the rotated key in a latent row."""
        return self.rank, self.parts[0][1] - self.rank - self.index


@dataclass(frozen=True, slots=True)
class ObservedLayers:
    """The attention layers of a model by index, and the states that its layers keep in addition."""

    attention: dict[int, Layer]
    states: StateLayers

    def kinds(self, num_layers: int) -> list[object]:
        """Return for each of the model's *num_layers* layers what tells it apart from layers of other kinds."""
        states: dict[int, list[tuple[bool, int]]] = {}
        for tensor in self.states.tensors:
            states.setdefault(tensor.key.layer_id, []).append((tensor.key.is_conv, tensor.key.index))
        return [
            (None if (layer := self.attention.get(i)) is None else layer.kind, tuple(states.get(i, ())))
            for i in range(num_layers)
        ]


def numbers_of(parts: Sequence[tuple[int, int]]) -> int:
    """Return how many numbers a layer keeps of a token, given its parts (heads, width)."""
    return sum(heads * width for heads, width in parts)


def observe_layers(model: PreTrainedModel, block_size: int) -> ObservedLayers:
    """Run the model on two tokens, and return what its layers keep.

    The model may be on the meta device. Its own attention function is restored afterwards.

    Raises:
        UnsupportedModel: If the model needs something that a paged cache cannot provide.
    """
    before = model.config._attn_implementation
    try:
        _refuse_configuration(model)
        observation = _Observation(model, block_size)
        with fixed_long_rope(model):
            states = _run(model, observation, before)
        observation.check_complete(states)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{type(model).__name__} cannot keep its KV cache in kvtier: {error}") from error
    finally:
        model.set_attn_implementation(before)
    return ObservedLayers(dict(sorted(observation.layers.items())), states)


class _Observation:
    """A replacement of a model's attention and mask functions, which records how each layer calls them.

    `make_mask` creates transformers' own mask and records its rule: a function that says for any two positions whether
    the query reads the key. `attend` finds the rule of the mask that a layer passes. The rule says which keys the
    layer reads in a prompt of any length, although the model runs on only two tokens. A layer with any other mask is
    refused.
    """

    def __init__(self, model: PreTrainedModel, block_size: int) -> None:
        self.layers: dict[int, Layer] = {}
        self._model = model
        self._config = model.config.get_text_config()
        self._block_size = block_size
        self._masks: dict[
            int, tuple[torch.Tensor, MaskFunction]
        ] = {}  # by the tensor's id; holding the tensor keeps its id unique
        self._keys: list[tuple[torch.Tensor, torch.Tensor, int]] = []  # keys and values of each layer that keeps them
        self._handed: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by layer, what it handed to its cache
        self._index_keys: dict[int, torch.Tensor] = {}  # by layer with an indexer, the index keys that it handed
        # Given to models that choose their keys, if transformers' own mask cannot be made.
        self.plan_mask = torch.ones((1, 1, 2, 2), dtype=torch.bool, device=model.device)
        self._received: int | None = None  # index of the layer that handed something to its cache last

    def make_mask(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Create transformers' mask and record its rule. This is the mask function registered with transformers."""
        mask: torch.Tensor = eager_mask(*args, **kwargs)
        self._masks[id(mask)] = (mask, kwargs["mask_function"])
        return mask

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        indices: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Record the layer's attention. Return zeros, so that the model goes on to its next layer.

        This is the attention function registered with transformers.
        """
        layer_id = getattr(module, "layer_idx", None)
        if layer_id in SHARED_MODULE and self._has_handed(key):
            layer_id = self._received
        if layer_id in SHARED_MODULE:
            raise UnsupportedModel("an attention layer has no index (layer_idx)")
        if layer_id in self.layers:
            raise UnsupportedModel(
                f"layer {layer_id} attends more than once in a pass, as layers that run in a loop or subtract two "
                "attentions do"
            )
        if key.dtype != self._model.dtype:
            raise UnsupportedModel(
                f"its keys have dtype {key.dtype} and its weights {self._model.dtype}; kvtier needs the same for both"
            )
        if kwargs.get("position_bias") is not None:
            raise UnsupportedModel(
                "it adds a bias for each distance between tokens (position_bias), which kvtier does not support"
            )
        _refuse_other_tokens(layer_id, module, query, key)
        refuse_unknown_tensors(kwargs)
        group = self._group(layer_id, kwargs.get("sliding_window"), indices is not None)
        if attention_mask is not None and attention_mask is not self.plan_mask:
            self._check_mask(layer_id, group, attention_mask)
        if indices is not None and not isinstance(group, FullAttention):
            raise UnsupportedModel(f"layer {layer_id} chooses the keys that it reads within a window or chunk")
        handed = self._handed.get(layer_id)
        if handed is not None and hasattr(module, "expand_kv") and handed[0] is not key:
            rank, rope, index = handed[0].shape[3], handed[1].shape[3], self._index_width(layer_id)
            self.layers[layer_id] = Layer(group, ((1, rank + rope + index),), rank=rank, index=index)
        elif indices is not None or layer_id in self._index_keys:
            raise UnsupportedModel(f"layer {layer_id} chooses the keys that it reads, and keeps no latent rows")
        else:
            parts = ((key.shape[1], key.shape[3]), (value.shape[1], value.shape[3]))
            self.layers[layer_id] = Layer(group, parts, self._source(group, key, value))
        if self.layers[layer_id].source is None:
            self._keys.append((key, value, layer_id))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    def receive(self, first: torch.Tensor, second: torch.Tensor, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Record what a layer hands to its cache, keys and values or the two parts of a latent row; return it."""
        self._handed[layer_id] = (first, second)
        self._received = layer_id
        return first, second

    def receive_index(self, keys: torch.Tensor, layer_id: int) -> torch.Tensor:
        """Record the index keys that a layer hands to its cache, [1, tokens, width]; return them."""
        self._index_keys[layer_id] = keys
        return keys

    def _has_handed(self, key: torch.Tensor) -> bool:
        """Return whether *key* is what a layer handed to its cache last."""
        return self._received is not None and self._handed[self._received][0] is key

    def _index_width(self, layer_id: int) -> int:
        keys = self._index_keys.get(layer_id)
        if keys is None:
            return 0
        if keys.dim() != 3 or keys.dtype != self._model.dtype:
            raise UnsupportedModel(
                f"the index keys of layer {layer_id} have {keys.dim()} dimensions and dtype {keys.dtype}; kvtier needs "
                f"3 dimensions and the dtype of the weights, {self._model.dtype}"
            )
        return int(keys.shape[2])

    def _source(self, group: AttentionGroup, key: torch.Tensor, value: torch.Tensor) -> int | None:
        """Return the index of an earlier layer of the same *group* that was passed the same tensors; None without one.

        A layer with another kind of attention keeps its own copy, because it may need blocks that the earlier layer's
        group has already evicted.
        """
        for earlier_key, earlier_value, layer_id in self._keys:
            if key is earlier_key and value is earlier_value and self.layers[layer_id].group == group:
                return layer_id
        return None

    def check_complete(self, states: StateLayers) -> None:
        """Raise `UnsupportedModel` unless each layer of the model was seen, or keeps nothing."""
        num_layers = self._config.num_hidden_layers
        kinds = getattr(self._config, "layer_types", None) or [None] * num_layers
        idle = {layer_id for layer_id, kind in enumerate(kinds) if kind in KEEPS_NOTHING}
        if (seen := {*self.layers, *states.layer_ids}) != set(range(num_layers)) - idle:
            raise UnsupportedModel(
                f"{len(seen)} of its {num_layers} layers call the attention function that is registered with "
                "transformers (AttentionInterface); kvtier cannot cache the state of the other layers"
            )

    def _check_mask(self, layer_id: int, group: AttentionGroup, mask: torch.Tensor) -> None:
        """Raise `UnsupportedModel` if the layer's mask does not fit its kind of attention.

        The masks are compared near the edges of windows or chunks, and at very large positions.
        """
        _, rule = self._masks.get(id(mask), (None, None))
        if rule is None:
            raise UnsupportedModel(
                f"layer {layer_id} creates an attention mask of its own, which kvtier cannot apply (sparse attention)"
            )
        edges = _edges(group)
        positions = sorted({max(0, edge + step) for edge in edges for step in STEPS_AROUND})
        queries = torch.tensor(positions, device=mask.device)[:, None]
        keys = torch.tensor(positions, device=mask.device)[None, :]
        none = torch.zeros((1, 1), dtype=torch.int64, device=mask.device)
        try:
            asked = rule(none, none, queries, keys)
        except IndexError:
            raise UnsupportedModel(
                f"layer {layer_id} needs a mask that depends on more than the tokens' positions"
            ) from None
        asked = torch.as_tensor(asked, device=mask.device).expand(len(positions), len(positions))
        wrong = torch.nonzero(asked != reads(group, queries, keys))
        if len(wrong):
            query, key = (positions[i] for i in wrong[0].tolist())
            does = "reads" if bool(asked[wrong[0][0], wrong[0][1]]) else "does not read"
            raise UnsupportedModel(
                f"layer {layer_id} is configured as {_word(group)}, but in its mask the token at {query} {does} the "
                f"token at {key}"
            )

    def _group(self, layer_id: int, window: int | None, has_indices: bool) -> AttentionGroup:
        """Return a layer's kind of attention, as the model's configuration names it.

        *has_indices* says whether the layer passes the indices of the keys that it reads.

        Raises:
            UnsupportedModel: If the kind is not supported or contradicts the *window* that the layer passes.
        """
        config, block_size = self._config, self._block_size
        layer_types = getattr(config, "layer_types", None)
        kind = layer_types[layer_id] if layer_types else "sliding_attention" if window else "full_attention"
        match kind:
            case _ if kind in FULL_KINDS and window is None and (has_indices or kind != INDEXED):
                return FullAttention(block_size)
            case "sliding_attention" | "hybrid_sliding" if window or getattr(config, "sliding_window", None):
                return SlidingWindow(block_size, int(window or config.sliding_window))
            case "chunked_attention":
                return ChunkedLocal(block_size, int(config.attention_chunk_size))
            case _ if "sparse" in kind or "compress" in kind or "index" in kind:
                raise UnsupportedModel(f"layer {layer_id} chooses the keys that it reads (sparse attention, {kind})")
            case _:
                raise UnsupportedModel(
                    f"layer {layer_id} is of kind {kind} with window {window}, which kvtier does not support"
                )


def _refuse_other_tokens(layer_id: int, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor) -> None:
    """Raise `UnsupportedModel` if a layer attends to tokens after the query, or to tokens of another sequence."""
    if not getattr(module, "is_causal", True):
        raise UnsupportedModel(f"layer {layer_id} is not marked as causal, so it may attend to later tokens")
    if key.shape[2] != query.shape[2]:
        raise UnsupportedModel(f"layer {layer_id} attends to tokens of another sequence")


# transformers finds the functions by names that all threads share. The context variable gives each thread its own
# observation.
_current: ContextVar[_Observation] = ContextVar("kvtier_observation")
AttentionInterface.register(OBSERVED, lambda *args, **kwargs: _current.get().attend(*args, **kwargs))
AttentionInterface.register(OBSERVED_PLAN, lambda *args, **kwargs: _current.get().attend(*args, **kwargs))
AttentionMaskInterface.register(OBSERVED, lambda *args, **kwargs: _current.get().make_mask(*args, **kwargs))


def _run(model: PreTrainedModel, observation: _Observation, own_attention: str) -> StateLayers:
    """Run the model on two tokens, with an attention function that records each layer's call in *observation*.

    *own_attention* is the name of the model's own attention function.

    Returns:
        The states that the model's layers keep.
    """
    token = _current.set(observation)
    try:
        model.set_attn_implementation(OBSERVED_PLAN if model.device.type == "meta" else OBSERVED)
        with oom_as_memory_error("looking at the model's attention"), torch.inference_mode():
            positions = torch.arange(2, device=model.device)
            needs_mask = model.device.type == "meta" and chooses_keys(model)
            cache = ObservingCache(positions, observation.receive, observation.receive_index)
            with cache.watching(model):
                model(
                    input_ids=positions[None],
                    position_ids=positions[None],
                    use_cache=False,
                    logits_to_keep=positions,
                    **{CACHE_ARGUMENT: cache},
                    **({"attention_mask": observation.plan_mask} if needs_mask else {}),
                )
            return cache.states
    except UnsupportedModel:
        raise
    except _ERRORS as error:  # errors of the model's own code, whose messages mean nothing to the user
        if not _runs_on_tokens(model, own_attention):
            raise UnsupportedModel("it does not run on token ids alone") from error
        raise UnsupportedModel(_why_failed(error)) from error
    finally:
        _current.reset(token)


def _runs_on_tokens(model: PreTrainedModel, own_attention: str) -> bool:
    """Return whether the model's code runs on two tokens with its own attention function.

    A model on the meta device counts as one whose code runs: its masks cannot be created there.
    """
    if model.device.type == "meta":
        return True
    model.set_attn_implementation(own_attention)
    try:
        with torch.inference_mode():
            model(input_ids=torch.arange(2, device=model.device)[None], use_cache=False)
    except _ERRORS:
        return False
    return True


def _refuse_configuration(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModel` for features that a run on two tokens does not show.

    These are loaded adapters and rotary embeddings that depend on the prompt's length.
    """
    config = model.config.get_text_config()
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedModel(
            "an adapter is already loaded into it; load the model alone, and configure the adapter in [lora]"
        )
    for rope_type in _rope_types(getattr(config, "rope_parameters", None) or {}):
        if rope_type == LENGTH_DEPENDENT_ROPE:
            raise UnsupportedModel(f"its rotary embedding ({rope_type}) changes with the length of the prompt")


def _rope_types(parameters: Mapping[str, Any]) -> Iterator[str]:
    """Yield the kinds of rotary embedding in a configuration, which may have one for each kind of layer."""
    if "rope_type" in parameters:
        yield str(parameters["rope_type"])
    for value in parameters.values():
        if isinstance(value, Mapping):
            yield from _rope_types(value)


def _edges(group: AttentionGroup) -> list[int]:
    """Return token positions at which to compare masks: edges of the group's window or chunks, and very large ones."""
    match group:
        case SlidingWindow(window_tokens=limit) | ChunkedLocal(chunk_tokens=limit):
            return [0, limit, 2 * limit, 3 * limit, FAR - limit, FAR]
        case _:
            return [0, 48, 4096, 131072, FAR]


def _word(group: AttentionGroup) -> str:
    match group:
        case SlidingWindow(window_tokens=window):
            return f"sliding window of {window}"
        case ChunkedLocal(chunk_tokens=chunk):
            return f"chunks of {chunk}"
        case _:
            return "full attention"


def _why_failed(error: BaseException) -> str:
    """Return the reason for an error of the model's own code, and the function and line where it was raised."""
    trace = error.__traceback__
    assert trace is not None, "error without a traceback"
    while trace.tb_next is not None:
        trace = trace.tb_next
    code = trace.tb_frame.f_code
    place = f"{code.co_qualname}, line {trace.tb_lineno}"
    has_cache = any(isinstance(value, StepCache) for value in trace.tb_frame.f_locals.values())
    if has_cache and isinstance(error, AttributeError | IndexError):
        return f"it needs a cache of its own kind, not only the methods of transformers' Cache ({place})"
    return f"its code fails with an attention function that is not transformers' own ({place})"
