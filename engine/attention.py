"""Paged attention as transformers calls it: writes new keys and values into the slab, reads the prefix from it."""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from kvtier.tiers.groups import AttentionGroup, ChunkedLocal, SlidingWindow

IMPLEMENTATION = "kvtier"  # the name under which transformers finds `paged_attention`


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's share of a step, in one group: which rows it has in the batch and which blocks it reads."""

    rows: slice  # of the packed batch
    slots: torch.Tensor  # [num_blocks] int64, the blocks from the first needed one on
    num_keys: int  # tokens in those blocks up to the last one of this step
    mask: torch.Tensor | None  # [num_queries, num_keys] bool, True where a query reads a key
    is_causal: bool  # instead of a mask, when queries and keys are the same tokens


@dataclass(frozen=True, slots=True)
class GroupStep:
    """What a group's layers need to know in one forward pass."""

    slab: torch.Tensor  # [num_slots, group_layers, 2, block_size, num_kv_heads, head_dim]
    write_slots: torch.Tensor  # [num_tokens] int64: where each token of the batch is written
    write_offsets: torch.Tensor  # [num_tokens] int64, within the block
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass. `layers[layer_idx]` is (group, the layer's index within the group's slab)."""

    groups: tuple[GroupStep, ...]
    layers: dict[int, tuple[int, int]]


# transformers passes nothing of ours down to its attention function; the step travels beside the call.
current_step: ContextVar[Step] = ContextVar("kvtier_step")


def segment(
    group: AttentionGroup, table: Sequence[int], rows: slice, start: int, num_tokens: int, device: torch.device
) -> Segment:
    """The segment of a request whose tokens *start* to *start* + *num_tokens* are computed in this step."""
    end = start + num_tokens
    first_block = group.first_needed(start)
    first_key = first_block * group.block_size
    slots = torch.tensor(table[first_block : -(-end // group.block_size)], dtype=torch.int64, device=device)
    if num_tokens == 1:  # decoding: all that was read back, but for the first block's tokens outside the window
        needs_mask = first_key < _oldest_key(group, start)
    else:  # nothing before the chunk, nothing outside the window: plain causal attention
        needs_mask = first_key < start or first_key < _oldest_key(group, end - 1)
    mask = _mask(group, start, num_tokens, first_key, device) if needs_mask else None
    return Segment(rows, slots, end - first_key, mask, is_causal=mask is None and num_tokens > 1)


def _oldest_key(group: AttentionGroup, position: int) -> int:
    """The first token that the token at *position* reads."""
    match group:
        case SlidingWindow(window_tokens=window):
            return max(0, position - window + 1)
        case ChunkedLocal(chunk_tokens=chunk):
            return position // chunk * chunk
        case _:
            return 0


def _mask(group: AttentionGroup, start: int, num_tokens: int, first_key: int, device: torch.device) -> torch.Tensor:
    queries = torch.arange(start, start + num_tokens, device=device)[:, None]
    keys = torch.arange(first_key, start + num_tokens, device=device)[None, :]
    mask = keys <= queries
    match group:
        case SlidingWindow(window_tokens=window):
            mask &= keys > queries - window
        case ChunkedLocal(chunk_tokens=chunk):
            mask &= keys >= queries // chunk * chunk
    return mask


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]; all requests' tokens one after the other
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,  # [num_heads], attention sinks
    **_kwargs: Any,  # what else models hand to attention functions (dropout, sliding_window …) is known already
) -> tuple[torch.Tensor, None]:
    """The attention function registered with transformers. Returns [1, num_tokens, num_heads, head_dim]."""
    step = current_step.get()
    group_id, layer = step.layers[module.layer_idx]  # type: ignore[index]  # an int that Module types as a tensor
    group = step.groups[group_id]
    keys, values = group.slab[:, layer, 0], group.slab[:, layer, 1]  # [num_slots, block_size, num_kv_heads, head_dim]
    keys[group.write_slots, group.write_offsets] = key[0].transpose(0, 1)
    values[group.write_slots, group.write_offsets] = value[0].transpose(0, 1)

    output = torch.empty_like(query)
    for part in group.segments:
        read_keys = _gather(keys, part)
        read_values = _gather(values, part)
        queries = query[:, :, part.rows]
        if softcap is None and s_aux is None:
            attended = F.scaled_dot_product_attention(
                queries,
                read_keys,
                read_values,
                attn_mask=part.mask,
                is_causal=part.is_causal,
                scale=scaling,
                enable_gqa=queries.shape[1] != read_keys.shape[1],
            )
        else:
            attended = _capped_attention(queries, read_keys, read_values, part, scaling, softcap, s_aux)
        output[:, :, part.rows] = attended
    return output.transpose(1, 2), None


def _gather(slab: torch.Tensor, part: Segment) -> torch.Tensor:
    blocks = torch.index_select(slab, 0, part.slots)  # [num_blocks, block_size, num_kv_heads, head_dim]
    return blocks.flatten(0, 1)[: part.num_keys].transpose(0, 1).unsqueeze(0)


def _capped_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    part: Segment,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with capped scores (Gemma 2) or sinks (gpt-oss), which SDPA does not have."""
    repeat = queries.shape[1] // keys.shape[1]
    scores = queries @ keys.repeat_interleave(repeat, dim=1).transpose(2, 3)
    scores = scores * (queries.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    mask = part.mask
    if part.is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(1, -1, scores.shape[2], 1).to(scores.dtype)
        weights = torch.softmax(torch.cat([scores, column], dim=-1).float(), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores.float(), dim=-1)
    return weights.to(values.dtype) @ values.repeat_interleave(repeat, dim=1)


AttentionInterface.register(IMPLEMENTATION, paged_attention)
