"""Attention over copied blocks: gathers a segment's keys and values from the slab, then calls SDPA or plain torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from kvtier.engine.model.paged_segment import Segment


@dataclass(frozen=True, slots=True)
class Scoring:
    """The options with which a layer turns products of queries and keys into attention scores."""

    scale: float
    softcap: float | None = None  # scores s become softcap * tanh(s / softcap)
    sinks: torch.Tensor | None = None  # [num_heads], one more score in the softmax, without a value


class Scratch:
    """A buffer for the keys and values of one segment in one layer, reused by every layer, segment and step.

    The buffer grows to the size of the longest context. Without it, every layer of a long context would touch new
    memory, because the allocator gets every allocation above 32 MiB from the operating system. On one CPU, this took
    170 ms for 256 MiB, and the copy itself took 15 ms. Only the engine's thread uses the buffer.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def of(self, num_rows: int, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor [num_rows, like.shape[1]] of undefined content, valid until the next call.

        *like* must have the same dtype and device in every call.
        """
        size = num_rows * like.shape[1]
        if self._memory is None or self._memory.numel() < size:
            self._memory = None  # free it before allocating more
            self._memory = torch.empty(size, dtype=like.dtype, device=like.device)
        return self._memory[:size].view(num_rows, -1)


def attend_gathered(
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]; all requests' tokens one after the other
    slab: torch.Tensor,  # [num_slots, group_layers, 2, block_size, num_kv_heads, head_dim], contiguous
    layer: int,
    segments: Sequence[Segment],
    scoring: Scoring,
    output: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    scratch: Scratch,
) -> None:
    """Copy the KV blocks of each segment (one request's tokens in a step), and write its attention to *output*."""
    for part in segments:
        keys, values = _gather(slab, layer, part, scratch)
        attended = attend_segment(query[:, :, part.rows], keys, values, part, scoring)
        output[part.rows] = attended[0].transpose(0, 1)


def attend_parts(
    query: torch.Tensor,  # [1, num_heads, num_tokens, width of keys]
    kept: Sequence[torch.Tensor],  # keys and values, each [num_slots, block_size, num_kv_heads, width]
    segments: Sequence[Segment],
    scoring: Scoring,
    output: torch.Tensor,  # [num_tokens, num_heads, width of values]
) -> None:
    """Do as `attend_gathered` for keys and values of different widths."""
    for part in segments:
        keys, values = (one[part.slots].flatten(0, 1)[: part.num_keys].transpose(0, 1)[None] for one in kept)
        attended = attend_segment(query[:, :, part.rows], keys, values, part, scoring)
        output[part.rows] = attended[0].transpose(0, 1)


def attend_segment(
    queries: torch.Tensor,  # [1, num_heads, num_queries, width of keys]
    keys: torch.Tensor,  # [1, num_kv_heads, num_keys, width of keys]
    values: torch.Tensor,  # [1, num_kv_heads, num_keys, width of values]
    part: Segment,
    scoring: Scoring,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of one segment, [1, num_heads, num_queries, width of values].

    *mask*, [num_queries, num_keys], is True where a query reads a key. None for the segment's own mask.
    """
    if scoring.softcap is not None or scoring.sinks is not None:
        return _capped_attention(queries, keys, values, part, scoring, mask)
    width = values.shape[3]
    if width < keys.shape[3]:  # flash attention needs equal widths; other code keeps all scores in memory
        values = F.pad(values, (0, keys.shape[3] - width))
    attended: torch.Tensor = F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=_sdpa_mask(part, keys.dtype) if mask is None else mask,
        is_causal=mask is None and part.is_causal,
        scale=scoring.scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return attended[..., :width]


def _gather(slab: torch.Tensor, layer: int, part: Segment, scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a segment's keys and values, each [1, num_kv_heads, num_keys, head_dim], valid until the next call."""
    num_slots, num_layers, _, _, num_kv_heads, head_dim = slab.shape
    # Each row is half of a block's part in one layer: its keys, then its values, then its keys in the next layer …
    halves = slab.view(num_slots * num_layers * 2, -1)
    rows = part.half_rows(num_layers) + layer * 2
    copy = scratch.of(len(rows), halves)
    torch.index_select(halves, 0, rows, out=copy)
    keys, values = copy.view(2, -1, num_kv_heads, head_dim)[:, : part.num_keys].transpose(1, 2).unsqueeze(1)
    return keys, values


def _sdpa_mask(part: Segment, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the segment's mask in the form with which SDPA is fastest.

    This is torch's causal bias object if flash attention supports the mask (on CUDA), otherwise a tensor or None. On a
    CPU the tensor has numbers to add to the scores, otherwise booleans.
    """
    is_lower_right = part.num_queries > 1 and part.reads_all_before and not part.is_causal
    if part.device.type == "cuda" and dtype.itemsize == 2 and is_lower_right:
        return causal_lower_right(part.num_queries, part.num_keys)
    return part.added_mask(dtype) if part.device.type == "cpu" else part.mask


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the softmax of scores [..., num_keys] in float32, with one more score for each row if there are *sinks*.

    *sinks* has as many dimensions as *scores*. Sinks have no value, so their column is left out of the result.
    """
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32)
    column = sinks.expand(*scores.shape[:-1], 1).to(scores.dtype)
    return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1, dtype=torch.float32)[..., :-1]


def _capped_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    part: Segment,
    scoring: Scoring,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention with capped scores (Gemma 2) or sinks (gpt-oss), which SDPA does not support."""
    repeat = queries.shape[1] // keys.shape[1]
    scores = queries @ keys.repeat_interleave(repeat, dim=1).transpose(2, 3)
    scores = scores * scoring.scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    if mask is None:
        mask = part.mask
        if part.is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = softmax(scores, None if scoring.sinks is None else scoring.sinks.reshape(1, -1, 1, 1))
    return weights.to(values.dtype) @ values.repeat_interleave(repeat, dim=1)
