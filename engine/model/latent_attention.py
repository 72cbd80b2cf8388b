"""Latent attention (MLA): a layer keeps one row of each token, and its module expands keys and values from the rows.

There are two ways to compute attention over rows. *Expanded*: the module expands the rows of a request's whole prefix.
This is worthwhile if many tokens of the request are computed together. *Absorbed*: queries are multiplied with the
module's own matrices, so that the rows serve as the keys and values of a single head. In DeepSeek V3's shape, this is
over 50 times faster for one token after 8,192 others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvtier.engine.model.paged_gather import Scoring, attend_segment, softmax
from kvtier.engine.model.paged_segment import Segment, rows_of

ABSORBED_QUERIES = 16  # tokens of a request in a step, up to which they are absorbed
# Keys of earlier tokens that a step expands at most, because an expanded key takes 82 KB in DeepSeek V3. The other
# requests of the step are absorbed.
EXPANDED_KEYS = 16_384
DECODES = 8  # requests that decode, whose tokens are multiplied with a layer's matrices together
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


def attend_absorbed(
    queries: torch.Tensor,  # [num_heads, num_queries, width of keys]
    kept: torch.Tensor,  # [num_slots, block_size, rank + rope]
    matrices: Matrices,
    part: Segment,
    scoring: Scoring,
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of a segment, [num_heads, num_queries, width of values].

    *chosen* has the positions of the keys that each query reads, [num_queries, num_chosen]; None if it reads all.
    """
    read = _read(_absorbed(queries, matrices), kept, matrices.keys.shape[1], part, scoring, chosen)
    return torch.cat([latents @ matrices.values for latents in read], dim=1)


def attend_decodes(
    query: torch.Tensor,  # [1, num_heads, num_tokens, width of keys]
    kept: torch.Tensor,  # [num_slots, block_size, rank + rope]
    matrices: Matrices,
    parts: Sequence[Segment],
    scoring: Scoring,
    output: torch.Tensor,  # [num_tokens, num_heads, width of values]
    chosen: torch.Tensor | None = None,
) -> None:
    """Write the attention of up to `DECODES` segments of one token each to *output*.

    The layer's matrices are multiplied with all of these tokens at once, which reads the matrices only once. If there
    are fewer tokens, zeros take their place. So each token is computed by the same operations, whichever tokens are
    computed with it.
    """
    num_heads, rank = len(matrices.keys), matrices.keys.shape[1]
    queries = query.new_zeros(num_heads, DECODES, query.shape[3])
    read = query.new_zeros(num_heads, DECODES, rank)
    for i, part in enumerate(parts):
        queries[:, i] = query[0, :, part.rows.start]
    latent = _absorbed(queries, matrices)
    for i, part in enumerate(parts):
        (read[:, i : i + 1],) = _read(latent[:, i : i + 1], kept, rank, part, scoring, _chosen_of(chosen, part))
    attended = read @ matrices.values
    for i, part in enumerate(parts):
        output[part.rows.start] = attended[:, i]


def _read(
    latent: torch.Tensor,  # [num_heads, num_queries, rank + rope], from `_absorbed`
    kept: torch.Tensor,
    rank: int,
    part: Segment,
    scoring: Scoring,
    chosen: torch.Tensor | None,
) -> Iterator[torch.Tensor]:
    """Yield weighted sums of latents, which queries read with `_absorbed` queries: [num_heads, some queries, rank]."""
    if chosen is None:
        yield from _read_all(latent, rows_of(kept, part), rank, part, scoring)
    else:
        yield from _read_chosen(latent, kept, rank, part, scoring, chosen)


def _read_all(
    latent: torch.Tensor,
    rows: torch.Tensor,  # [num_keys, rank + rope]
    rank: int,
    part: Segment,
    scoring: Scoring,
) -> Iterator[torch.Tensor]:
    at_once = max(1, MAX_SCORES // (len(latent) * len(rows)))
    sinks = None if scoring.sinks is None else scoring.sinks[:, None, None]
    for start in range(0, part.num_queries, at_once):
        some = latent[:, start : start + at_once]
        scores = (some.flatten(0, 1) @ rows.T).view(*some.shape[:2], -1) * scoring.scale
        if part.mask is not None:
            scores = scores.masked_fill(~part.mask[start : start + at_once], float("-inf"))
        weights = softmax(scores, sinks).to(rows.dtype)
        yield (weights.flatten(0, 1) @ rows[:, :rank]).view(*some.shape[:2], -1)


def _read_chosen(
    latent: torch.Tensor,
    kept: torch.Tensor,
    rank: int,
    part: Segment,
    scoring: Scoring,
    chosen: torch.Tensor,  # [num_queries, num_chosen], positions of keys; those after a query's own are not read
) -> Iterator[torch.Tensor]:
    by_query = latent.transpose(0, 1)
    positions = torch.arange(part.start, part.end, device=part.device)
    is_later = chosen > positions[:, None]
    keys = torch.where(is_later, positions[:, None], chosen).long()  # a later key may not be computed yet
    sinks = None if scoring.sinks is None else scoring.sinks[None, :, None]
    at_once = max(1, MAX_SCORES // (chosen.shape[1] * max(kept.shape[2], len(latent))))
    for start in range(0, part.num_queries, at_once):
        some = slice(start, start + at_once)
        rows = kept[part.slots[keys[some] // kept.shape[1]], keys[some] % kept.shape[1]]  # [queries, chosen, width]
        scores = by_query[some] @ rows.transpose(1, 2) * scoring.scale
        scores = scores.masked_fill(is_later[some, None], float("-inf"))
        weights = softmax(scores, sinks).to(rows.dtype)
        yield (weights @ rows[..., :rank]).transpose(0, 1)


def _absorbed(queries: torch.Tensor, matrices: Matrices) -> torch.Tensor:
    """Return queries by which latent rows are multiplied, [num_heads, num_queries, rank + rope]."""
    width = matrices.keys.shape[2]
    return torch.cat([queries[..., :width] @ matrices.keys.transpose(1, 2), queries[..., width:]], dim=-1)


def chosen_mask(chosen: torch.Tensor, part: Segment) -> torch.Tensor:
    """Return a segment's mask [num_queries, num_keys], True where a query reads a key, from the keys' positions."""
    positions = torch.arange(part.start, part.end, device=part.device)[:, None]
    columns = torch.where(chosen <= positions, chosen, part.num_keys).long()  # later keys go to one more column
    mask = torch.zeros(part.num_queries, part.num_keys + 1, dtype=torch.bool, device=part.device)
    return mask.scatter_(1, columns, True)[:, : part.num_keys].contiguous()


def attend_latent(
    query: torch.Tensor,  # [1, num_heads, num_tokens, width of keys]
    keys: torch.Tensor,  # expanded, [1, num_heads, rows, width of keys]
    values: torch.Tensor,  # expanded, [1, num_heads, rows, width of values]
    kept: torch.Tensor,  # [num_slots, block_size, rank + rope]
    paths: LatentPaths,
    matrices: Matrices | None,
    scoring: Scoring,
    output: torch.Tensor,  # [num_tokens, num_heads, width of values]
    chosen: torch.Tensor | None = None,
) -> None:
    """Write the attention of all segments to *output*.

    *chosen* has the positions of the keys that each token reads, [num_tokens, num_chosen]. A request with no more keys
    than that reads all of them. None if all requests read all of their keys.
    """
    for part, rows in paths.expanded:
        of_part = _chosen_of(chosen, part)
        mask = None if of_part is None else chosen_mask(of_part, part)
        attended = attend_segment(query[:, :, part.rows], keys[:, :, rows], values[:, :, rows], part, scoring, mask)
        output[part.rows] = attended[0].transpose(0, 1)
    if not paths.absorbed:
        return
    assert matrices is not None, "absorbed without matrices"
    decodes = [part for part in paths.absorbed if part.num_queries == 1]
    for first in range(0, len(decodes), DECODES):
        attend_decodes(query, kept, matrices, decodes[first : first + DECODES], scoring, output, chosen)
    for part in paths.absorbed:
        if part.num_queries > 1:
            queries, of_part = query[0, :, part.rows], _chosen_of(chosen, part)
            attended = attend_absorbed(queries, kept, matrices, part, scoring, of_part)
            output[part.rows] = attended.transpose(0, 1)


def _chosen_of(chosen: torch.Tensor | None, part: Segment) -> torch.Tensor | None:
    return None if chosen is None or part.num_keys <= chosen.shape[1] else chosen[part.rows]
