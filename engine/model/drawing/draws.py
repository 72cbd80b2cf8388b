"""Draws the next tokens of all requests of a step."""

from collections.abc import Callable, Iterator, Sequence

import torch

from kvtier.engine.model.drawing.changed_logits import changed_logits
from kvtier.engine.model.drawing.cuts import Cuts, draw, draw_uncut
from kvtier.engine.model.drawing.sampler import Sampler
from kvtier.engine.model.drawing.scratch import Scratch

# Logits that are looked at together: on a CPU in 8 MiB of float64, elsewhere in 256.
_MOST_AT_ONCE = {"cpu": 1 << 20}
_MOST_ELSEWHERE = 1 << 25

_Way = Callable[[torch.Tensor, Cuts, Scratch], torch.Tensor]


@torch.inference_mode()
def draw_tokens(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """The next token id of each request from *logits* `[requests, vocab]`, float32, which stay as they are.

    Greedy ones take the lowest of the likeliest ids. Each sampler takes note of its token. A row of logits without a
    largest finite one gives any token.
    """
    changed = changed_logits(logits, samplers)
    vocab_size = logits.shape[-1]
    greedy = [row for row, sampler in enumerate(samplers) if sampler.is_greedy]
    drawn_from = [row for row, sampler in enumerate(samplers) if not sampler.is_greedy]
    cut = [row for row in drawn_from if samplers[row].cuts(vocab_size)]
    uncut = [row for row in drawn_from if not samplers[row].cuts(vocab_size)]

    token_ids = torch.empty(len(samplers), dtype=torch.long, device=logits.device)
    if greedy:
        token_ids[greedy] = _rows_of(changed, greedy).argmax(dim=-1)
    numbers = [0.0 if sampler.is_greedy else sampler.number() for sampler in samplers]
    num_rows = max(1, _MOST_AT_ONCE.get(logits.device.type, _MOST_ELSEWHERE) // vocab_size)
    scratch = Scratch(min(num_rows, len(samplers)) * vocab_size, logits.device)
    for rows, way in _passes(num_rows, [(cut, draw), (uncut, draw_uncut)]):
        some = _rows_of(changed, rows)
        cuts = Cuts.of([samplers[row].params for row in rows], [numbers[row] for row in rows], some)
        token_ids[rows] = way(some, cuts, scratch)

    drawn: list[int] = token_ids.tolist()
    for sampler, token_id in zip(samplers, drawn, strict=True):
        sampler.on_drawn(token_id)
    return drawn


def _passes(num_rows: int, ways: Sequence[tuple[Sequence[int], _Way]]) -> Iterator[tuple[Sequence[int], _Way]]:
    """The rows of each way, *num_rows* at a time."""
    for rows, way in ways:
        for start in range(0, len(rows), num_rows):
            yield rows[start : start + num_rows], way


def _rows_of(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    if rows[-1] - rows[0] + 1 == len(rows):
        return logits[rows[0] : rows[-1] + 1]  # no copy
    return logits[rows]
