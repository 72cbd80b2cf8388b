"""CacheUsage: the counts of Anthropic's `usage`: tokens read from the cache, tokens newly kept in it, and others."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.server.answers import MessageUsage
from kvtier.server.cache_control import TTL_S
from kvtier.server.documents.kept_prefixes import Keeping
from kvtier.tiers.lower.statistics import TokenBalance

_TTL = {ttl_s: ttl for ttl, ttl_s in TTL_S.items()}


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """The tokens of a prompt, counted as read, created or other. The counts add up to the prompt's length.

    A token counts as *created* if it was computed, is kept because of this request's `cache_control`, and was not kept
    before.
    """

    num_read: int  # loaded from any tier, kept or not
    created: Mapping[str, int]  # by the ttl of the first breakpoint after the token
    num_other: int  # computed, and either not kept, or already kept before (computing was faster than loading)

    @classmethod
    def of(cls, tokens: TokenBalance, kept: Keeping) -> "CacheUsage":
        """Return the counts of a prompt, from the sources of its *tokens* and the part that the cache has *kept*."""
        num_read = tokens.num_tokens - tokens.recomputed
        end, created = max(num_read, kept.num_before), dict.fromkeys(TTL_S, 0)
        for each in kept.breakpoints:
            if each.num_tokens > end:
                created[_TTL[each.ttl_s]] += each.num_tokens - end
                end = each.num_tokens
        return cls(num_read, created, tokens.recomputed - sum(created.values()))

    def anthropic(self, num_output: int) -> MessageUsage:
        """Return Anthropic's `usage` of the prompt and of an answer with *num_output* tokens."""
        return MessageUsage(
            input_tokens=self.num_other,
            cache_creation_input_tokens=sum(self.created.values()),
            cache_read_input_tokens=self.num_read,
            cache_creation=self.creation(),
            output_tokens=num_output,
        )

    def creation(self) -> dict[str, int]:
        """Return the object `cache_creation` of Anthropic's `usage`: the created tokens by ttl."""
        return {f"ephemeral_{ttl}_input_tokens": num_tokens for ttl, num_tokens in self.created.items()}
