"""Prompt: the tokens that a request asks to continue, and the breakpoints up to which the cache keeps them."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.server.documents.kept_prefixes import Breakpoint


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request, tokenized."""

    token_ids: Sequence[int]
    breakpoints: Sequence[Breakpoint] = ()  # in their order
    text: str | None = None  # the whole prompt as the client sent it; None: not sent as text

    def last(self, num_tokens: int) -> "Prompt":
        """Return a prompt of the last *num_tokens* tokens, with the breakpoints among them."""
        num_cut = max(0, len(self.token_ids) - num_tokens)
        if not num_cut:
            return self
        left = [Breakpoint(each.num_tokens - num_cut, each.ttl_s) for each in self.breakpoints]
        return Prompt(self.token_ids[num_cut:], [each for each in left if each.num_tokens > 0])
