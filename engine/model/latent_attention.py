"""Latent attention (MLA): a layer keeps one row of each token, and its module expands keys and values from the rows.

There are two ways to compute attention over rows. *Expanded*: the module expands the rows of a request's whole prefix.
This is worthwhile if many tokens of the request are computed together. *Absorbed*: queries are multiplied with the
module's own matrices, so that the rows serve as the keys and values of a single head. In DeepSeek V3's shape, this is
over 50 times faster for one token after 8,192 others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvtier.engine.model.paged_gather import Scoring, attend_segment
from kvtier.engine.model.paged_segment import Segment

ABSORBED_QUERIES = 16  # tokens of a request in a step, up to which they are absorbed
# Keys of earlier tokens that a step expands at most, because an expanded key takes 82 KB in DeepSeek V3. The other
# requests of the step are absorbed.
EXPANDED_KEYS = 16_384
MAX_SCORES = 1 << 26  # numbers in a tensor of scores; queries are cut into parts so that no tensor is larger
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices that a layer's module multiplies latents with, to expand them to keys and to values."""

    keys: torch.Tensor  # [num_heads, rank, width of keys without their rotated end]
    values: torch.Tensor  # [num_heads, rank, width of values]


@dataclass(frozen=True, slots=True)
class LatentPaths:
    """The segments (each one request's tokens in a step) by the way in which they attend.

    Each expanded segment has the rows of the expanded keys and values that are its own.
    """

    expanded: tuple[tuple[Segment, slice], ...]
    absorbed: tuple[Segment, ...]
    reads_earlier: bool  # whether rows of earlier tokens are expanded, and not only those of this step


def latent_paths(segments: Sequence[Segment], can_absorb: bool) -> LatentPaths:
    """Choose for each segment whether it is expanded or absorbed."""
    expanded, absorbed, num_left = [], [], EXPANDED_KEYS
    for part in segments:
        is_alone = part.first_key == part.start
        if is_alone or not can_absorb or (part.num_queries > ABSORBED_QUERIES and part.num_keys <= num_left):
            expanded.append(part)
            num_left -= 0 if is_alone else part.num_keys
        else:
            absorbed.append(part)
    if all(part.first_key == part.start for part in expanded):
        return LatentPaths(tuple((part, part.rows) for part in expanded), tuple(absorbed), reads_earlier=False)
    places, end = [], 0
    for part in expanded:
        places.append((part, slice(end, end + part.num_keys)))
        end += part.num_keys
    return LatentPaths(tuple(places), tuple(absorbed), reads_earlier=True)


@torch.inference_mode()
def matrices_of(model: PreTrainedModel, ranks: Mapping[int, tuple[int, int]]) -> dict[int, Matrices] | None:
    """Return the matrices of each latent layer; None if the expansion of some layer is not a matrix.

    *ranks* has the widths of a row's latent and rotated part, by layer.
    """
    found = {}
    for module in model.modules():
        layer_id = getattr(module, "layer_idx", None)
        if hasattr(module, "expand_kv") and isinstance(layer_id, int) and layer_id in ranks:
            matrices = _matrices(module, *ranks[layer_id], model)
            if matrices is None:
                return None
            found[layer_id] = matrices
    return found if set(found) == set(ranks) else None


def _matrices(module: Any, rank: int, rope: int, model: PreTrainedModel) -> Matrices | None:
    one = torch.eye(rank, dtype=model.dtype, device=model.device)[None, None]
    keys, values = module.expand_kv(one, one.new_zeros(1, 1, rank, rope))
    matrices = Matrices(keys[0, ..., : keys.shape[-1] - rope].contiguous(), values[0].contiguous())
    probe = torch.linspace(-1, 1, 2 * (rank + rope), device=model.device).to(model.dtype).view(1, 1, 2, -1)
    rows, rotated = probe[0, 0, :, :rank], probe[0, 0, :, rank:]
    mine = (torch.cat([rows @ matrices.keys, rotated.expand(keys.shape[1], -1, -1)], dim=-1), rows @ matrices.values)
    expanded = module.expand_kv(probe[..., :rank], probe[..., rank:])
    for found, expected in zip(mine, expanded, strict=True):
        if not float((found - expected[0]).abs().max()) <= ROUNDING.get(model.dtype, 0.05) * float(
            expected.abs().max()
        ):
            return None
    return matrices


def rows_of(kept: torch.Tensor, part: Segment) -> torch.Tensor:
    """Return the rows of a segment's keys, [num_keys, width], from *kept*, [num_slots, block_size, width]."""
    return kept[part.slots].flatten(0, 1)[: part.num_keys]


def attend_absorbed(
    queries: torch.Tensor,  # [num_heads, num_queries, width of keys]
    rows: torch.Tensor,  # [num_keys, rank + rope]
    matrices: Matrices,
    part: Segment,
    scale: float,
) -> torch.Tensor:
    """Return the attention of a segment, [num_heads, num_queries, width of values]."""
    rank, width = matrices.keys.shape[1:]
    latent = torch.cat([queries[..., :width] @ matrices.keys.transpose(1, 2), queries[..., width:]], dim=-1)
    at_once = max(1, MAX_SCORES // (len(queries) * len(rows)))
    attended = []
    for start in range(0, part.num_queries, at_once):
        some = latent[:, start : start + at_once]
        scores = (some.flatten(0, 1) @ rows.T).view(*some.shape[:2], -1) * scale
        if part.mask is not None:
            scores = scores.masked_fill(~part.mask[start : start + at_once], float("-inf"))
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(rows.dtype)
        attended.append((weights.flatten(0, 1) @ rows[:, :rank]).view(*some.shape[:2], -1) @ matrices.values)
    return torch.cat(attended, dim=1)


def attend_latent(
    query: torch.Tensor,  # [1, num_heads, num_tokens, width of keys]
    keys: torch.Tensor,  # expanded, [1, num_heads, rows, width of keys]
    values: torch.Tensor,  # expanded, [1, num_heads, rows, width of values]
    kept: torch.Tensor,  # [num_slots, block_size, rank + rope]
    paths: LatentPaths,
    matrices: Matrices | None,
    scoring: Scoring,
    output: torch.Tensor,  # [num_tokens, num_heads, width of values]
) -> None:
    """Write the attention of all segments to *output*."""
    for part, rows in paths.expanded:
        attended = attend_segment(query[:, :, part.rows], keys[:, :, rows], values[:, :, rows], part, scoring)
        output[part.rows] = attended[0].transpose(0, 1)
    for part in paths.absorbed:
        assert matrices is not None, "absorbed without matrices"
        attended = attend_absorbed(query[0, :, part.rows], rows_of(kept, part), matrices, part, scoring.scale)
        output[part.rows] = attended.transpose(0, 1)
