"""Prompts of random tokens for `generate`, and an open `KVTierCache` of a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from small_models import VOCAB
from transformers import PreTrainedModel

from kvtier import KVTierCache

NUM_TOKENS = 300


def prompt_of(seed: int, num_tokens: int = NUM_TOKENS) -> torch.Tensor:
    """Return token ids, [1, num_tokens]. Some models take token 0 for padding, so their tests need a mask."""
    return torch.randint(VOCAB, (1, num_tokens), generator=torch.Generator().manual_seed(seed))


@contextmanager
def opened(folder: Path, model: PreTrainedModel, **options: Any) -> Iterator[KVTierCache]:
    """Open a cache of *model* with a store of 64 MiB in *folder*."""
    with KVTierCache.open(folder / "store", model, capacity="64MiB", read_timeout_s=60, **options) as cache:
        yield cache
