"""ModelRunner: a transformers model whose attention reads and writes kvtier's paged slabs."""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from kvtier.engine.attention import IMPLEMENTATION, GroupStep, Segment, Step, current_step, segment
from kvtier.engine.lora_adapter import LoraAdapter
from kvtier.engine.lora_rows import LoraRows, LoraSpan
from kvtier.engine.paged_gather import Scratch
from kvtier.engine.tensor_digest import tensor_digest
from kvtier.tiers.block_hash import Lora
from kvtier.tiers.groups import AttentionGroup, ChunkedLocal, FullAttention, SlidingWindow
from kvtier.tiers.namespace import GroupGeometry, Namespace
from kvtier.transfer.block_memory import BlockMemory, CpuMemory
from kvtier.transfer.device_slab import DeviceSlab
from kvtier.transfer.layer_gate import LayerGate
from kvtier.transfer.poisoned_memory import PoisonedMemory

log = logging.getLogger(__name__)

LOADING = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version"})  # say nothing about the KV
# With these the keys of a block depend on how long the prompt is; equal names would not mean equal bytes.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
# For the layers of a prefix, while nobody else computes: what is computed without counts for nothing, and is cheap to
# compute again when the prefix has come as usual.
ARRIVAL_WAIT_S = 3.0
OBSERVED = f"{IMPLEMENTATION}-observed"  # the attention function while a model is being looked at
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}  # of the largest logit, at load


class UnsupportedModel(ValueError):
    """The model's attention cannot go through kvtier; the message says why."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one request to compute in a step. Their blocks are in *tables*, leased by the request."""

    token_ids: Sequence[int]
    start: int  # position of the first of them
    tables: Sequence[Sequence[int]]  # [group][block] -> device slot
    gate: LayerGate | None = None  # if its prefix is still arriving
    lora: Lora | None = None  # the adapter that computes it, one of the runner's


@dataclass(frozen=True, slots=True)
class _Layer:
    """What one attention layer was seen doing when the model ran once."""

    group: AttentionGroup
    num_kv_heads: int
    head_dim: int


class ModelRunner:
    """Owns the model and the device slabs; computes steps. Called by the engine's thread only.

    The layers with one kind of attention and one geometry make a group; each group has a slab of *num_slots* blocks.
    Raises `UnsupportedModel` when the model does something that a paged cache would get wrong, `UnusableLora` for an
    adapter that cannot be kept to its own rows. Adapters leave the model, and so its namespace, as it is.
    """

    def __init__(
        self, model: PreTrainedModel, block_size: int, capacity_bytes: int, adapters: Sequence[LoraAdapter] = ()
    ) -> None:
        self.model = model.eval()  # type: ignore[no-untyped-call]  # untyped in transformers
        self.block_size = block_size
        self.adapters = MappingProxyType({adapter.key: adapter for adapter in adapters})
        self._lora_rows = LoraRows(model, adapters) if adapters else None
        self._own_attention = model.config._attn_implementation
        self.device = torch.device(model.device)
        layers = _inspect(model, block_size)
        kinds = list(dict.fromkeys(layers.values()))
        self.groups = tuple(kind.group for kind in kinds)
        members = [[layer_id for layer_id, layer in layers.items() if layer == kind] for kind in kinds]
        self.geometry = tuple(
            GroupGeometry(repr(kind.group), tuple(ids), kind.num_kv_heads, kind.head_dim)
            for kind, ids in zip(kinds, members, strict=True)
        )
        self._layers = {
            layer_id: (group_id, index) for group_id, ids in enumerate(members) for index, layer_id in enumerate(ids)
        }
        itemsize = model.dtype.itemsize
        self.block_bytes = tuple(
            2 * len(group.layer_ids) * block_size * group.num_kv_heads * group.head_dim * itemsize
            for group in self.geometry
        )
        self.num_slots = capacity_bytes // sum(self.block_bytes)
        if self.num_slots < 2:
            raise ValueError(
                f"device capacity: {capacity_bytes} bytes hold {self.num_slots} blocks of {sum(self.block_bytes)}; "
                "raise device.capacity or lower device.block_size"
            )
        self._slabs = [
            DeviceSlab(
                self.num_slots,
                len(group.layer_ids),
                block_size,
                group.num_kv_heads,
                group.head_dim,
                model.dtype,
                self.device,
            )
            for group in self.geometry
        ]
        self._scratch = Scratch()
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[index]  # a tensor
        self.max_tokens: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        try:
            self._verify()
            if self._lora_rows is not None:
                self._verify_rows(self._lora_rows)
        except BaseException:
            self.close()
            raise

    def namespace(self, hash_algorithm: str, hash_seed: str) -> Namespace:
        """The identity of the KV this model makes; reads every weight once."""
        config = self.model.config
        return Namespace(
            model=str(getattr(config, "model_type", type(self.model).__name__)),
            config_digest=config_digest(config),
            weights_digest=weights_digest(self.model),
            dtype=str(self.model.dtype),
            geometry=self.geometry,
            block_size=self.block_size,
            hash_algorithm=hash_algorithm,
            hash_seed=hash_seed,
        )

    def memories(self, host_capacity_bytes: int) -> list[BlockMemory]:
        """The device slabs, each paired with its share of *host_capacity_bytes*: as many blocks for every group."""
        num_host_slots = host_capacity_bytes // sum(self.block_bytes)
        if host_capacity_bytes and not num_host_slots:
            raise ValueError(
                f"host capacity: {host_capacity_bytes} bytes hold no block of {sum(self.block_bytes)}; "
                "raise host.capacity, or set it to 0 for no host tier"
            )
        memories: list[BlockMemory] = []
        with ExitStack() as undo:  # if one cannot be made, those before it give back what they have
            for slab in self._slabs:
                if self.device.type == "cuda":
                    from kvtier.transfer.cuda_memory import CudaMemory

                    memories.append(CudaMemory(slab.blocks, num_host_slots, slab.num_layers))
                else:
                    memories.append(CpuMemory(slab.blocks.numpy(), num_host_slots, slab.num_layers))
                undo.callback(memories[-1].close)
            undo.pop_all()
        return memories

    def poisoned(self, memories: Sequence[BlockMemory]) -> list[BlockMemory]:
        """The same memories, whose slots that hold nothing are not a number."""
        return [PoisonedMemory(memory, slab.blocks) for memory, slab in zip(memories, self._slabs, strict=True)]

    def close(self) -> None:
        """Give the model its own attention back; the caller may go on using it."""
        self.model.set_attn_implementation(self._own_attention)
        if self._lora_rows is not None:
            self._lora_rows.unhook()

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        """Compute all chunks in one pass; the logits after each chunk's last token, [len(chunks), vocab], float32.

        Their keys and values are in the slabs when the pass has run (on CUDA: has been enqueued).
        """
        if self._lora_rows is None:
            return self._forward(chunks)
        order = sorted(range(len(chunks)), key=lambda i: _lora_name(chunks[i]))  # rows of an adapter are consecutive
        sorted_chunks = [chunks[i] for i in order]
        with self._lora_rows.on(self._spans(sorted_chunks)):
            logits = self._forward(sorted_chunks)
        if order == list(range(len(chunks))):
            return logits
        in_place = torch.empty_like(logits)
        in_place[order] = logits
        return in_place

    def _forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        positions = [chunk.start + i for chunk in chunks for i in range(len(chunk.token_ids))]
        ends, end = [], 0
        for chunk in chunks:
            end += len(chunk.token_ids)
            ends.append(end)
        with self._step(chunks, ends):
            logits: torch.Tensor = self.model(
                input_ids=torch.tensor([token_ids], device=self.device),
                position_ids=torch.tensor([positions], device=self.device),
                use_cache=False,
                logits_to_keep=torch.tensor(ends, device=self.device) - 1,
            ).logits
        return logits[0].float()

    def _spans(self, chunks: Sequence[Chunk]) -> list[LoraSpan]:
        """The rows of each adapter, whose chunks follow each other."""
        spans = []
        first_chunk = first_row = 0
        for lora, run in groupby(chunks, key=lambda chunk: chunk.lora):
            lengths = [len(chunk.token_ids) for chunk in run]
            end_chunk, end_row = first_chunk + len(lengths), first_row + sum(lengths)
            if lora is not None:
                rows, chunk_rows = slice(first_row, end_row), slice(first_chunk, end_chunk)
                spans.append(LoraSpan(rows, chunk_rows, self.adapters[lora].deltas))
            first_chunk, first_row = end_chunk, end_row
        return spans

    @contextmanager
    def _step(self, chunks: Sequence[Chunk], ends: Sequence[int]) -> Iterator[None]:
        groups = tuple(self._group_step(group_id, chunks, ends) for group_id in range(len(self.groups)))
        gates = tuple(chunk.gate for chunk in chunks if chunk.gate is not None)
        token = current_step.set(Step(groups, self._layers, gates, time.monotonic() + ARRIVAL_WAIT_S))
        try:
            yield
        finally:
            current_step.reset(token)

    def _group_step(self, group_id: int, chunks: Sequence[Chunk], ends: Sequence[int]) -> GroupStep:
        slots: list[int] = []
        offsets: list[int] = []
        segments: list[Segment] = []
        for chunk, end in zip(chunks, ends, strict=True):
            table, num_tokens = chunk.tables[group_id], len(chunk.token_ids)
            positions = range(chunk.start, chunk.start + num_tokens)
            slots += [table[position // self.block_size] for position in positions]
            offsets += [position % self.block_size for position in positions]
            rows = slice(end - num_tokens, end)
            segments.append(segment(self.groups[group_id], table, rows, chunk.start, num_tokens, self.device))
        return GroupStep(
            self._slabs[group_id].tensor,
            torch.tensor(slots, device=self.device),
            torch.tensor(offsets, device=self.device),
            tuple(segments),
            self._scratch,
        )

    def _verify(self) -> None:
        """Compare with the model's own attention, in two chunks, before anybody relies on it."""
        num_tokens = min(2 * self.block_size, self.num_slots * self.block_size, 48)
        token_ids = [(7 * i + 3) % self.vocab_size for i in range(num_tokens)]
        num_blocks = -(-num_tokens // self.block_size)
        tables = [list(range(num_blocks))[::-1] for _ in self.groups]
        half = num_tokens // 2
        self.run([Chunk(token_ids[:half], 0, tables)])
        paged = self.run([Chunk(token_ids[half:], half, tables)])[0]
        with _own_attention(self.model), torch.inference_mode():
            plain = self.model(input_ids=torch.tensor([token_ids], device=self.device), use_cache=False).logits[0, -1]
        error = float((paged - plain.float()).abs().max() / plain.float().abs().max())
        if not error <= TOLERANCE.get(self.model.dtype, 0.1):
            raise UnsupportedModel(
                f"{type(self.model).__name__}: its logits with a paged cache differ from its own by {error:.1e}; "
                "its attention needs something that kvtier does not pass on"
            )

    def _verify_rows(self, lora_rows: LoraRows) -> None:
        """See that the layers with adapters get the rows that they are thought to."""
        num_tokens = min(self.block_size, 16)
        first, second = (
            Chunk([(factor * i + 5) % self.vocab_size for i in range(num_tokens)], 0, [[slot] for _ in self.groups])
            for slot, factor in enumerate((7, 11))
        )
        with lora_rows.inputs() as of_both:
            self.run([first, second])
        with lora_rows.inputs() as of_second:
            self.run([second])
        lora_rows.check_order(of_both, of_second, num_tokens)


def bytes_per_block(model: PreTrainedModel, block_size: int) -> int:
    """Bytes of keys and values of *block_size* tokens, all layers together."""
    return sum(num_bytes for _, num_bytes in layers_of(model, block_size, model.dtype.itemsize))


def layers_of(model: PreTrainedModel, block_size: int, itemsize: int) -> list[tuple[AttentionGroup, int]]:
    """Each layer's kind of attention, and the bytes of a block of its keys and values, *itemsize* each.

    The model may be on the meta device. Raises `UnsupportedModel` like `ModelRunner`.
    """
    layers = _inspect(model, block_size).values()
    return [(layer.group, 2 * block_size * layer.num_kv_heads * layer.head_dim * itemsize) for layer in layers]


def config_digest(config: PreTrainedConfig) -> str:
    """Digest of a model's configuration, all but its name and what only says how it is loaded."""
    fields = {key: value for key, value in config.to_dict().items() if key not in LOADING and key[0] != "_"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def weights_digest(model: torch.nn.Module) -> str:
    """Digest of names, shapes, types and bytes of all parameters and buffers, those included that no file holds.

    xxh3_128 of each tensor, sha256 over the list.
    """
    total = hashlib.sha256()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode() + tensor_digest(tensor))
    return total.hexdigest()


@contextmanager
def _own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let the model use transformers' own attention for a moment."""
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(IMPLEMENTATION)


def _inspect(model: PreTrainedModel, block_size: int) -> dict[int, _Layer]:
    """Run the model on two tokens and see what each layer asks of its attention."""
    layers: dict[int, _Layer] = {}
    config = model.config.get_text_config()
    before = model.config._attn_implementation
    refusal = _refusal(model)

    def observe(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        layer_id = getattr(module, "layer_idx", None)
        if not isinstance(layer_id, int) or layer_id in layers:
            raise UnsupportedModel(refusal("an attention layer has no index of its own (layer_idx)"))
        if key.dtype != model.dtype:
            raise UnsupportedModel(refusal(f"its keys are {key.dtype}, its weights {model.dtype}"))
        if key.shape != value.shape:
            raise UnsupportedModel(refusal("keys and values differ in shape (latent attention)"))
        if kwargs.get("position_bias") is not None:
            raise UnsupportedModel(refusal("it adds a bias for each distance between tokens (position_bias)"))
        if not getattr(module, "is_causal", True) or key.shape[2] != query.shape[2]:
            raise UnsupportedModel(refusal(f"layer {layer_id} reads tokens that come later, or another sequence"))
        group = _group(config, layer_id, kwargs.get("sliding_window"), block_size, refusal)
        layers[layer_id] = _Layer(group, key.shape[1], key.shape[3])
        return torch.zeros_like(query).transpose(1, 2), None

    if getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedModel(
            refusal("an adapter is loaded into it, which its blocks would not be named after; name it in [lora]")
        )
    if getattr(config, "attn_temperature_tuning", False):
        raise UnsupportedModel(refusal("it scales attention by a row's number in the batch (attn_temperature_tuning)"))
    for rope_type in _rope_types(getattr(config, "rope_parameters", None) or {}):
        if rope_type in LENGTH_DEPENDENT_ROPE:
            raise UnsupportedModel(refusal(f"its rotary embedding ({rope_type}) changes with the length of the prompt"))
    AttentionInterface.register(OBSERVED, observe)
    with torch.inference_mode():
        try:
            model.set_attn_implementation(OBSERVED)
            model(input_ids=torch.tensor([[0, 1]], device=model.device), use_cache=False)
        except UnsupportedModel:
            model.set_attn_implementation(before)
            raise
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            model.set_attn_implementation(before)
            raise UnsupportedModel(refusal(f"it cannot run with another attention function ({error})")) from error
        model.set_attn_implementation(IMPLEMENTATION)
    num_layers = config.num_hidden_layers
    if set(layers) != set(range(num_layers)):
        raise UnsupportedModel(
            refusal(
                f"{len(layers)} of its {num_layers} layers call the attention function that transformers lets one "
                "register (AttentionInterface); the others keep a state that is not a block of keys and values"
            )
        )
    return dict(sorted(layers.items()))


def _group(
    config: Any, layer_id: int, window: int | None, block_size: int, refusal: Callable[[str], str]
) -> AttentionGroup:
    """The kind of attention of a layer: what its configuration says, held against what it asks for."""
    layer_types = getattr(config, "layer_types", None)
    kind = layer_types[layer_id] if layer_types else "sliding_attention" if window else "full_attention"
    match kind:
        case "full_attention" if window is None:
            return FullAttention(block_size)
        case "sliding_attention" if window is not None or getattr(config, "sliding_window", None):
            return SlidingWindow(block_size, int(window or config.sliding_window))
        case "chunked_attention":
            return ChunkedLocal(block_size, int(config.attention_chunk_size))
        case _:
            raise UnsupportedModel(refusal(f"layer {layer_id} is of kind {kind} with window {window}"))


def _lora_name(chunk: Chunk) -> str:
    return "" if chunk.lora is None else chunk.lora.name


def _rope_types(parameters: Mapping[str, Any]) -> Iterator[str]:
    """The kinds of rotary embedding in a configuration, which may have one for each kind of layer."""
    if "rope_type" in parameters:
        yield str(parameters["rope_type"])
    for value in parameters.values():
        if isinstance(value, Mapping):
            yield from _rope_types(value)


def _refusal(model: PreTrainedModel) -> Callable[[str], str]:
    return lambda why: f"{type(model).__name__} cannot keep its KV cache in kvtier: {why}"
