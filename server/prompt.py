"""Prompt: the tokens that a request asks to continue, with the breakpoints that its `cache_control` sets."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.engine.images.prompt_images import PromptImages
from kvtier.server.documents.kept_prefixes import Breakpoint
from kvtier.tiers.naming.block_hash import MultimodalItem


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt of a request. The prefix before each of its *breakpoints* is to be pinned."""

    token_ids: Sequence[int]
    breakpoints: Sequence[Breakpoint] = ()  # in the order of the prompt
    images: PromptImages | None = None
    text: str | None = None  # the whole prompt as the client sent it; None: not sent as text

    @property
    def items(self) -> tuple[MultimodalItem, ...]:
        """The images' part in the names of the prompt's blocks."""
        return () if self.images is None else self.images.items

    def last(self, num_tokens: int) -> "Prompt":
        """Return the prompt cut to its last *num_tokens* tokens, with the breakpoints in this part."""
        num_cut = max(0, len(self.token_ids) - num_tokens)
        if not num_cut:
            return self
        assert self.images is None, "a prompt with images is not truncated"
        left = [Breakpoint(each.num_tokens - num_cut, each.ttl_s) for each in self.breakpoints]
        return Prompt(self.token_ids[num_cut:], [each for each in left if each.num_tokens > 0])
