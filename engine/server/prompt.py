"""Prompt: the tokens that a request asks to continue, and up to where they are to be kept."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.engine.documents.kept_prefixes import Breakpoint


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request, tokenized."""

    token_ids: Sequence[int]
    breakpoints: Sequence[Breakpoint] = ()  # in their order
