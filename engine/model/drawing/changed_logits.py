"""Changes to logits before sampling, in vLLM's order: bias, penalties, bans, grammars, each for all rows at once."""

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from kvtier.engine.model.drawing.ranking import Scratch
from kvtier.engine.model.drawing.sampler import Sampler
from kvtier.engine.model.drawing.token_counts import TokenCounts


def changed_logits(logits: torch.Tensor, samplers: Sequence[Sampler], copies: Scratch) -> torch.Tensor:
    """Return *logits* `[rows, vocab]` with the bias, penalties, bans and grammar of each row's sampler applied.

    If no sampler changes anything, the result is *logits* itself. Otherwise the result is in the memory of *copies*.
    *logits* is overwritten only if it is in that memory, too.
    """
    if not any(sampler.changes_logits for sampler in samplers):
        return logits
    changed = copies.tensor(logits.shape, logits.dtype)
    if changed.data_ptr() != logits.data_ptr():
        changed.copy_(logits)
    _add_bias(changed, samplers)
    _penalise(changed, samplers)
    _ban(changed, samplers)
    _constrain(changed, samplers)
    return changed


def _add_bias(logits: torch.Tensor, samplers: Sequence[Sampler]) -> None:
    biases = [sampler.params.logit_bias for sampler in samplers]
    if any(biases):
        rows, token_ids = _places(logits, [list(bias) for bias in biases])
        values = list(chain.from_iterable(bias.values() for bias in biases))
        logits[rows, token_ids] += torch.tensor(values, dtype=logits.dtype, device=logits.device)


def _penalise(logits: torch.Tensor, samplers: Sequence[Sampler]) -> None:
    penalised = [(row, sampler, sampler.counts) for row, sampler in enumerate(samplers) if sampler.counts is not None]
    if not penalised:
        return
    all_counts: list[TokenCounts] = [counts for _, _, counts in penalised]
    lengths = [len(counts.token_ids) for counts in all_counts]
    params = [sampler.params for _, sampler, _ in penalised]

    def repeated(values: Sequence[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, dtype=np.float32), lengths)).to(logits.device)

    rows = torch.from_numpy(np.repeat([row for row, _, _ in penalised], lengths)).to(logits.device)
    token_ids = torch.from_numpy(np.concatenate([counts.token_ids for counts in all_counts])).to(logits.device)
    num_times = torch.from_numpy(np.concatenate([counts.num_times for counts in all_counts])).to(logits.device)
    values = logits[rows, token_ids]
    factors = repeated([p.repetition_penalty for p in params])
    values = torch.where(values > 0, values / factors, values * factors)
    values -= repeated([p.frequency_penalty for p in params]) * num_times
    values -= repeated([p.presence_penalty for p in params]) * (num_times > 0)
    logits[rows, token_ids] = values


def _ban(logits: torch.Tensor, samplers: Sequence[Sampler]) -> None:
    banned = [sampler.banned() for sampler in samplers]
    if any(banned):
        logits[_places(logits, banned)] = -torch.inf


def _constrain(logits: torch.Tensor, samplers: Sequence[Sampler]) -> None:
    """Set the logits of all tokens that a row's grammar forbids to -inf.

    A grammar that allows most tokens lists the forbidden ones as its `exceptions`. Any other grammar lists the allowed
    ones.
    """
    grammars = {row: sampler.grammar for row, sampler in enumerate(samplers) if sampler.grammar is not None}
    forbidden = {row: grammar.exceptions for row, grammar in grammars.items() if grammar.allows_majority}
    if forbidden:
        logits[_exceptions(logits, forbidden)] = -torch.inf
    allowed = {row: grammar.exceptions for row, grammar in grammars.items() if not grammar.allows_majority}
    if allowed:
        places = _exceptions(logits, allowed)
        values = logits[places]
        logits.index_fill_(0, torch.tensor(list(allowed), device=logits.device), -torch.inf)
        logits[places] = values


def _exceptions(
    logits: torch.Tensor, token_ids: Mapping[int, npt.NDArray[np.int64]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row and column indices in *logits* of the tokens in *token_ids*, which has token ids by row."""
    rows = np.repeat(list(token_ids), [len(ids) for ids in token_ids.values()])
    columns = np.concatenate(list(token_ids.values()))
    return torch.from_numpy(rows).to(logits.device), torch.from_numpy(columns).to(logits.device)


def _places(logits: torch.Tensor, token_ids: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows and the columns in *logits* of the tokens in *token_ids*, which has a list for every row."""
    rows: npt.NDArray[np.int64] = np.repeat(np.arange(len(token_ids)), [len(ids) for ids in token_ids])
    columns = torch.tensor(list(chain.from_iterable(token_ids)), dtype=torch.long, device=logits.device)
    return torch.from_numpy(rows).to(logits.device), columns
