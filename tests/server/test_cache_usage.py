"""How a prompt's tokens are counted in the words of Anthropic's usage."""

import random

import pytest

from kvtier.server.cache_usage import CacheUsage
from kvtier.server.documents.kept_prefixes import Breakpoint, Keeping
from kvtier.tiers.lower.statistics import TokenBalance

MINUTES, HOUR = 300.0, 3600.0


@pytest.mark.parametrize(
    ("tokens", "kept", "counted"),
    [
        (TokenBalance(recomputed=100), [], (0, {"5m": 0, "1h": 0}, 100)),
        (TokenBalance(recomputed=100), [Breakpoint(80, MINUTES)], (0, {"5m": 80, "1h": 0}, 20)),
        (TokenBalance(recomputed=100), [Breakpoint(32, HOUR), Breakpoint(80, MINUTES)], (0, {"5m": 48, "1h": 32}, 20)),
        (TokenBalance(host=48, recomputed=52), [Breakpoint(32, HOUR)], (48, {"5m": 0, "1h": 0}, 52)),
        (TokenBalance(disk=48, recomputed=52), [Breakpoint(64, MINUTES)], (48, {"5m": 16, "1h": 0}, 36)),
        (TokenBalance(device=99, recomputed=1), [Breakpoint(96, MINUTES)], (99, {"5m": 0, "1h": 0}, 1)),
    ],
)
def test_tokens_are_read_created_or_neither(
    tokens: TokenBalance, kept: list[Breakpoint], counted: tuple[int, dict[str, int], int]
) -> None:
    usage = CacheUsage.of(tokens, Keeping(0, kept))

    assert (usage.num_read, usage.created, usage.num_other) == counted


def test_what_was_kept_before_and_is_computed_again_since_that_is_sooner_is_not_created_again() -> None:
    tokens = TokenBalance(host=48, recomputed=52)  # the front of the hit is computed while the rest is loaded

    usage = CacheUsage.of(tokens, Keeping(64, [Breakpoint(64, HOUR), Breakpoint(96, MINUTES)]))

    assert (usage.num_read, usage.created, usage.num_other) == (48, {"5m": 32, "1h": 0}, 20)


def test_the_parts_add_up_to_the_prompt_whatever_is_kept() -> None:
    rng = random.Random(5)
    for _ in range(500):
        computed = rng.randrange(1, 50)
        tokens = TokenBalance(rng.randrange(50), rng.randrange(50), rng.randrange(50), computed)
        ends = sorted(rng.randrange(1, tokens.num_tokens + 1) for _ in range(rng.randrange(5)))
        num_hours = rng.randrange(len(ends) + 1)
        kept = [Breakpoint(end, HOUR if place < num_hours else MINUTES) for place, end in enumerate(ends)]

        usage = CacheUsage.of(tokens, Keeping(rng.randrange(tokens.num_tokens), kept)).anthropic(num_output=7)

        parts = [usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens]
        assert min(parts) >= 0
        assert sum(parts) == tokens.num_tokens
        assert sum(usage.cache_creation.values()) == usage.cache_creation_input_tokens
        assert usage.output_tokens == 7
