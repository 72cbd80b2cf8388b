"""Metrics of where prompts' tokens came from: an engine's and a sidecar's."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from kvtier.engine.observability.metrics import names
from kvtier.engine.observability.records.request_log import LogCounts
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.tier import Reason, Tier


def balance_metrics(tokens: TokenBalance) -> Iterator[Metric]:
    """Where the tokens came from, and why some were computed."""
    yield names.PROMPT_TOKENS.of(tokens.num_tokens)
    yield names.HIT_TOKENS.by({tier: getattr(tokens, tier) for tier in Tier})
    yield names.RECOMPUTED_TOKENS.by({**dict.fromkeys(Reason, 0), **tokens.reasons})


def request_log_metrics(counts: LogCounts) -> Iterator[Metric]:
    """How the log of requests does."""
    yield names.REQUEST_LOG_LINES.by({"written": counts.num_written, "dropped": counts.num_dropped})


def sources_of(tokens: TokenBalance) -> dict[str, int]:
    """The tokens by where they came from: a tier, or "recomputed"."""
    return {**{tier.value: getattr(tokens, tier) for tier in Tier}, "recomputed": tokens.recomputed}
