"""sample_tokens: samples the next token of each request in a step."""

from collections.abc import Callable, Iterator, Sequence

import torch

from kvtier.engine.model.drawing.changed_logits import changed_logits
from kvtier.engine.model.drawing.cuts import Cuts, argmax_tokens, draw, draw_uncut
from kvtier.engine.model.drawing.ranking import Scratch
from kvtier.engine.model.drawing.sampler import Sampler
from kvtier.engine.model.structured.grammar import find_allowed

# Logits per batch of rows: on a CPU 8 MiB of float64, elsewhere 256 MiB.
_MAX_AT_ONCE = {"cpu": 1 << 20}
_MAX_ELSEWHERE = 1 << 25

_Way = Callable[[torch.Tensor, Cuts, Scratch], torch.Tensor]


@torch.inference_mode()
def sample_tokens(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Sample the next token id of each request from *logits*, `[requests, vocab]` in float32.

    The logits are not changed. A greedy request gets its most likely token, and of equally likely tokens the lowest id.
    Each sampler records its token. If a row's largest logit is not finite, the result is an arbitrary token. A
    request with a grammar only gets tokens that the grammar allows.
    """
    token_ids = torch.empty(len(samplers), dtype=torch.long, device=logits.device)
    if likeliest := [i for i, sampler in enumerate(samplers) if sampler.is_greedy and not sampler.changes_logits]:
        token_ids[likeliest] = logits.argmax(dim=-1)[likeliest]

    if grammars := [sampler.grammar for sampler in samplers if sampler.grammar is not None]:
        find_allowed(grammars)
    num_rows = max(1, _MAX_AT_ONCE.get(logits.device.type, _MAX_ELSEWHERE) // logits.shape[-1])
    scratch, copies = (Scratch(min(num_rows, len(samplers)) * logits.shape[-1], logits.device) for _ in range(2))
    for rows, way in _passes(samplers, logits.shape[-1], num_rows):
        some = [samplers[row] for row in rows]
        changed = changed_logits(_rows_of(logits, rows, copies), some, copies)
        token_ids[rows] = way(changed, Cuts.of(some, changed), scratch)

    drawn = [
        token_id if sampler.grammar is None else sampler.grammar.nearest(token_id)
        for sampler, token_id in zip(samplers, token_ids.tolist(), strict=True)
    ]
    for sampler, token_id in zip(samplers, drawn, strict=True):
        sampler.on_drawn(token_id)
    return drawn


def _passes(samplers: Sequence[Sampler], vocab_size: int, num_rows: int) -> Iterator[tuple[list[int], _Way]]:
    """Yield groups of at most *num_rows* rows, each with the function that samples all rows of the group.

    Greedy rows whose logits no sampler changes are left out, because `sample_tokens` handles them.
    """
    ways: dict[_Way, list[int]] = {draw: [], draw_uncut: [], argmax_tokens: []}
    for row, sampler in enumerate(samplers):
        if not sampler.is_greedy:
            ways[draw if sampler.cuts(vocab_size) else draw_uncut].append(row)
        elif sampler.changes_logits:
            ways[argmax_tokens].append(row)
    for way, rows in ways.items():
        for start in range(0, len(rows), num_rows):
            yield rows[start : start + num_rows], way


def _rows_of(logits: torch.Tensor, rows: Sequence[int], copies: Scratch) -> torch.Tensor:
    """Return the *rows* of *logits*: a view if they are consecutive, otherwise a copy in the scratch."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return logits[rows[0] : rows[-1] + 1]
    some = copies.tensor(torch.Size((len(rows), logits.shape[-1])), logits.dtype)
    return torch.index_select(logits, 0, torch.tensor(rows, device=logits.device), out=some)
