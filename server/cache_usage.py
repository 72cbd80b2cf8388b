"""CacheUsage: a prompt's tokens as Anthropic's `usage` counts them: read from the cache, kept from now on, neither."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.server.cache_control import TTL_S
from kvtier.server.documents.kept_prefixes import Keeping
from kvtier.tiers.lower.statistics import TokenBalance

_TTL = {ttl_s: ttl for ttl, ttl_s in TTL_S.items()}


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Read, created and other tokens add up to the prompt. A token counts as *created* if it was computed, is kept now
    up to one of the request's breakpoints, and was not kept before."""

    num_read: int  # that came from a tier, whichever, kept or not
    created: Mapping[str, int]  # by the ttl of the first breakpoint after them
    num_other: int  # that were computed, and are not kept, or were so before: computing them was sooner than loading

    @classmethod
    def of(cls, tokens: TokenBalance, kept: Keeping) -> "CacheUsage":
        """The usage of a prompt with this balance, of which so much is *kept*."""
        num_read = tokens.num_tokens - tokens.recomputed
        end, created = max(num_read, kept.num_before), dict.fromkeys(TTL_S, 0)
        for each in kept.breakpoints:
            if each.num_tokens > end:
                created[_TTL[each.ttl_s]] += each.num_tokens - end
                end = each.num_tokens
        return cls(num_read, created, tokens.recomputed - sum(created.values()))

    def anthropic(self) -> dict[str, object]:
        """The fields of Anthropic's `usage` that are about the prompt."""
        return {
            "input_tokens": self.num_other,
            "cache_creation_input_tokens": sum(self.created.values()),
            "cache_read_input_tokens": self.num_read,
            "cache_creation": self.creation(),
        }

    def creation(self) -> dict[str, int]:
        """The object `cache_creation`."""
        return {f"ephemeral_{ttl}_input_tokens": num_tokens for ttl, num_tokens in self.created.items()}
