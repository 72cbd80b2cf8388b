"""Usage: the tokens of a request, as OpenAI's `usage` and as the `kvtier` object of an answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from kvtier.engine.scheduling.request import Completion
from kvtier.server.answers import CachedTokens, KvtierObject, TokenSources, UsageObject
from kvtier.server.cache_usage import CacheUsage
from kvtier.server.documents.kept_prefixes import Keeping
from kvtier.tiers.lower.statistics import TokenBalance


@dataclass(slots=True)
class Usage:
    """The token counts of one request.

    A prompt with several choices counts once, with the cache hits of its first choice.
    """

    num_choices: int  # of each prompt
    prompts: TokenBalance = field(default_factory=TokenBalance)
    num_generated: int = 0
    ttft_s: float | None = None  # time to first token of the first choice, measured by the engine
    is_pinned: bool | None = None  # whether all prompts are pinned now; None: the request asks for no pin
    kept: Keeping | None = None  # the kept part of the prompt; None: the request has no breakpoints
    left_out: Sequence[str] = ()  # keywords of the request's schemas that are not enforced

    def note_pinned(self, has_room: bool) -> None:
        """Record whether the cache had room for a pin that the request asks for.

        `is_pinned` is True only if there was room for every such pin.
        """
        self.is_pinned = has_room and self.is_pinned is not False

    def add(self, index: int, completion: Completion) -> None:
        """Add the tokens of the choice at *index*, which has ended with *completion*."""
        self.num_generated += len(completion.token_ids)
        if index % self.num_choices == 0:
            self.prompts = self.prompts.plus(completion.tokens)
        if index == 0:
            self.ttft_s = completion.ttft_s

    def openai(self) -> UsageObject:
        """Return the object `usage` of an answer."""
        num_prompt = self.prompts.num_tokens
        return UsageObject(
            prompt_tokens=num_prompt,
            completion_tokens=self.num_generated,
            total_tokens=num_prompt + self.num_generated,
            prompt_tokens_details=CachedTokens(num_prompt - self.prompts.recomputed),
        )

    def kvtier(self) -> KvtierObject:
        """Return the object `kvtier`: which tiers the prompt's tokens came from, and why some were recomputed."""
        return KvtierObject(
            tokens=self.by_tier(),
            reasons=dict(self.prompts.reasons),
            ttft_s=self.ttft_s,
            pinned=UNSET if self.is_pinned is None else self.is_pinned,
            cache_creation=UNSET if self.kept is None else CacheUsage.of(self.prompts, self.kept).creation(),
            left_out=list(self.left_out) if self.left_out else UNSET,
        )

    def by_tier(self) -> TokenSources:
        """Return the numbers of prompt tokens that came from each tier, and of recomputed ones."""
        tokens = self.prompts
        return TokenSources(
            device=tokens.device,
            host=tokens.host,
            disk=tokens.disk,
            remote=tokens.remote,
            recomputed=tokens.recomputed,
        )
