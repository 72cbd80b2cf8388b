"""Attention that reads KV blocks in place: plans the work of a step, and launches the kernels of `paged_kernel`.

Triton comes with the CUDA builds of torch, not with the CPU build. Without Triton `supports` returns False, and no
other function of this module may be called.

FlexAttention was rejected. It needs keys as one sequence, [1, num_kv_heads, num_slots * block_size, head_dim], and a
new BlockMask in every step, which in vLLM took memory proportional to the whole pool (vllm#55977). It recompiles for
new shapes while a request waits (pytorch#141486). It does not support attention sinks, so kvtier would have to add them
to the result by means of the log-sum-exp.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch

from kvtier.engine.model.paged_gather import Scoring
from kvtier.engine.model.paged_segment import Segment
from kvtier.tiers.naming.groups import AttentionGroup, ChunkedLocal, FullAttention, SlidingWindow

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256  # because a tile's queries and sums are kept in registers
MAX_ROWS = 128  # of a tile: queries times query heads per KV head
MIN_ROWS = 16  # the smallest size of a tensor core operation
# A split of this size reads 256 * 2 * kv_heads * head_dim * 2 bytes of keys and values in bf16. It also writes sums of
# heads * head_dim * 4 bytes, which are read again: an overhead of 3 % with four query heads per KV head.
MIN_SPLIT_KEYS = 256
PROGRAMS_PER_PROCESSOR = 2  # a segment is cut into this many programs per processor, to fill the GPU when it is alone
TILE_SPLITS = 16
SEGMENT_FIELDS = 8  # as in `paged_kernel`
ALIGNMENT = 4  # int32 words, because Triton recompiles for a pointer that is not a multiple of 16 bytes


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel launch of a step, for all segments that are computed with the same tile size."""

    tile_rows: int
    tile_queries: int
    tiles: torch.Tensor  # [num_tiles, 2] int32: segment, first query
    max_splits: int
    split_rows: torch.Tensor  # [num_split_rows, 2] int32: segment and query, for queries whose keys are split
    num_partials: int


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The input of the Triton kernels in a step. Each segment is the tokens of one request.

    All layers of an attention group use the same plan.
    """

    segments: torch.Tensor  # [num_segments, SEGMENT_FIELDS] int32
    slots: torch.Tensor  # int32: the block tables of all segments, one after the other
    launches: tuple[Launch, ...]


def supports(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, group: AttentionGroup
) -> bool:
    """Return whether the kernels support attention of this device, dtype, shape and kind."""
    return (
        dtype in DTYPES
        and head_dim <= MAX_HEAD_DIM
        and num_heads // num_kv_heads <= MAX_ROWS
        and isinstance(group, FullAttention | SlidingWindow | ChunkedLocal)
        and (device.type == "cuda" or _is_interpreted())
        and _has_triton()
    )


def plan(
    segments: Sequence[Segment],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    device: torch.device,
    num_programs: int | None = None,  # programs to cut a segment into; by default derived from the device's processors
) -> LaunchPlan:
    """Plan the kernel launches for *segments*, and copy the plan to the device in one transfer.

    The queries of each segment are cut into tiles, and the keys of each tile into splits. The cuts do not depend on
    other segments, so the results of a segment are the same in any batch.
    """
    heads_per_kv = num_heads // num_kv_heads
    num_programs = _num_programs(device) if num_programs is None else num_programs
    small = max(MIN_ROWS, _power_of_two(heads_per_kv))
    # Tiles of these sizes fit into registers: ptxas spills nothing for sm_90. Larger tiles in float32 spill up to 8 KiB
    # per thread.
    large = max(small, MIN_ROWS if itemsize == 4 else MAX_ROWS if head_dim <= 128 else MAX_ROWS // 2)
    fields = np.zeros((len(segments), SEGMENT_FIELDS), np.int32)
    first_slot = 0
    members: dict[int, list[int]] = {}
    for i, part in enumerate(segments):
        members.setdefault(small if part.num_queries * heads_per_kv <= small else large, []).append(i)
        fields[i, :5] = part.rows.start, part.num_queries, part.start, part.first_key, first_slot
        first_slot += len(part.table)

    parts: list[np.ndarray] = [fields, np.concatenate([np.array(part.table, np.int32) for part in segments])]
    sizes: list[tuple[int, int, int]] = []
    for tile_rows, ids in members.items():
        tile_queries = tile_rows // heads_per_kv
        tiles, split_rows, first_partial = [], [], 0
        for i in ids:
            part = segments[i]
            starts = np.arange(0, part.num_queries, tile_queries, dtype=np.int32)[::-1]  # tiles with most keys first
            tiles.append(_pairs(i, starts))
            num_splits = _num_splits(part, tile_queries, len(starts) * num_kv_heads, num_programs)
            fields[i, 5:7] = num_splits, first_partial
            if num_splits > 1:
                split_rows.append(_pairs(i, np.arange(part.num_queries, dtype=np.int32)))
                first_partial += part.num_queries * num_splits
        parts += [np.concatenate(tiles), np.concatenate(split_rows) if split_rows else np.zeros((0, 2), np.int32)]
        sizes.append((tile_rows, int(fields[ids, 5].max()), first_partial))

    on_device = _copy(parts, device)
    launches = tuple(
        Launch(tile_rows, tile_rows // heads_per_kv, tiles, max_splits, split_rows, num_partials)
        for (tile_rows, max_splits, num_partials), tiles, split_rows in zip(
            sizes, on_device[2::2], on_device[3::2], strict=True
        )
    )
    return LaunchPlan(on_device[0], on_device[1], launches)


def attend_in_place(
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    slab: torch.Tensor,  # [num_slots, group_layers, 2, block_size, num_kv_heads, head_dim], contiguous
    layer: int,
    plan: LaunchPlan,
    group: AttentionGroup,
    scoring: Scoring,
    output: torch.Tensor,  # [num_tokens, num_heads, head_dim], contiguous
) -> None:
    """Compute the attention of the plan's segments in one layer, and write it to their rows of *output*.

    With CUDA, the kernels run in the current stream.
    """
    from kvtier.engine.model import paged_kernel as kernel

    if query.stride(-1) != 1:
        query = query.contiguous()
    _, num_heads, _, head_dim = query.shape
    block_size, num_kv_heads = slab.shape[3:5]
    padded_dim = max(MIN_ROWS, _power_of_two(head_dim))
    kind, span = _kind(group)
    sinks = output if scoring.sinks is None else scoring.sinks  # without sinks the kernel does not read the pointer
    on_tensor_cores = slab.dtype.itemsize == 2
    with torch.cuda.device(query.device) if query.is_cuda else nullcontext():
        for launch in plan.launches:
            num_partials = max(1, launch.num_partials)  # tensors even if unused, because Triton recompiles for None
            sums = output.new_empty((num_partials, num_heads, head_dim), dtype=torch.float32)
            weights = output.new_empty((num_partials, num_heads, 2), dtype=torch.float32)
            kernel.attend_tiles[(len(launch.tiles), num_kv_heads, launch.max_splits)](
                query,
                slab[:, layer],
                output,
                sums,
                weights,
                sinks,
                plan.segments,
                launch.tiles,
                plan.slots,
                query.stride(1),
                query.stride(2),
                slab.stride(0),
                scoring.scale,
                1.0 if scoring.softcap is None else scoring.softcap,
                span,
                MASK=kind,
                HAS_SOFTCAP=scoring.softcap is not None,
                HAS_SINKS=scoring.sinks is not None,
                NUM_KV_HEADS=num_kv_heads,
                HEADS_PER_KV=num_heads // num_kv_heads,
                HEAD_DIM=head_dim,
                PADDED_DIM=padded_dim,
                BLOCK_SIZE=block_size,
                TILE_ROWS=launch.tile_rows,
                TILE_QUERIES=launch.tile_queries,
                TILE_KEYS=(64 if on_tensor_cores else 32) // (1 if padded_dim <= 128 else 2),
                PRECISION="tf32" if on_tensor_cores else "ieee",  # float32 stays exact, as is torch's default
                num_warps=4 if on_tensor_cores and (launch.tile_rows == MIN_ROWS or padded_dim <= 64) else 8,
                num_stages=3 if on_tensor_cores else 2,
            )
            if launch.num_partials:
                kernel.merge_splits[(len(launch.split_rows), num_heads)](
                    sums,
                    weights,
                    output,
                    sinks,
                    plan.segments,
                    launch.split_rows,
                    HAS_SINKS=scoring.sinks is not None,
                    NUM_HEADS=num_heads,
                    HEAD_DIM=head_dim,
                    PADDED_DIM=padded_dim,
                    TILE_SPLITS=TILE_SPLITS,
                    num_warps=4,
                )


def _num_splits(part: Segment, tile_queries: int, num_programs_alone: int, num_programs: int) -> int:
    """Return into how many splits to cut the keys, so that about *num_programs* Triton programs fill the GPU.

    Without splits there would be *num_programs_alone* programs.
    """
    match part.group:
        case SlidingWindow(window_tokens=span) | ChunkedLocal(chunk_tokens=span):
            num_keys = min(part.num_keys, span + tile_queries)
        case _:
            num_keys = part.num_keys
    return max(1, min(-(-num_programs // num_programs_alone), -(-num_keys // MIN_SPLIT_KEYS)))


def _kind(group: AttentionGroup) -> tuple[int, int]:
    """Return the kernel's number for this kind of mask, and the size of its window or chunk in tokens."""
    match group:
        case SlidingWindow(window_tokens=window):
            return 1, window
        case ChunkedLocal(chunk_tokens=chunk):
            return 2, chunk
        case _:
            return 0, 0


def _pairs(segment_id: int, numbers: np.ndarray) -> np.ndarray:
    return np.stack([np.full_like(numbers, segment_id), numbers], axis=1)


def _copy(parts: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy *parts* to the device in one transfer, each aligned to 16 bytes."""
    starts, size = [], 0
    for part in parts:
        starts.append(size)
        size += -(-part.size // ALIGNMENT) * ALIGNMENT
    words = np.zeros(max(size, 1), np.int32)
    for start, part in zip(starts, parts, strict=True):
        words[start : start + part.size] = part.ravel()
    on_device = torch.from_numpy(words).to(device)
    return [on_device[start : start + part.size].view(part.shape) for start, part in zip(starts, parts, strict=True)]


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least *number*."""
    return 1 << (number - 1).bit_length()


@cache
def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return PROGRAMS_PER_PROCESSOR * int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _is_interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU, because TRITON_INTERPRET=1 was set at its import."""
    if not _has_triton():
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)
