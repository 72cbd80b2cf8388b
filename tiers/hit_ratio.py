"""HitRatio: the share of prompt tokens found in the cache, over all requests and over the most recent ones."""

from collections import deque
from dataclasses import replace

from kvtier.tiers.lower.statistics import PrefixStatistics


class HitRatio:
    """Counts of prompt tokens that were looked up (queries) and found in the cache (hits).

    The recent ratio covers the last *num_recent* requests. Requests that are admitted again after a preemption are
    counted separately.
    """

    def __init__(self, num_recent: int = 1000) -> None:
        self._recent: deque[tuple[int, int]] = deque(maxlen=num_recent)
        self._recent_queries = self._recent_hits = 0
        self._totals = PrefixStatistics()

    def on_admitted(self, queries: int, hits: int) -> None:
        """Count a request that was admitted for the first time: *hits* of its *queries* tokens were found."""
        if len(self._recent) == self._recent.maxlen:
            old_queries, old_hits = self._recent[0]
            self._recent_queries -= old_queries
            self._recent_hits -= old_hits
        self._recent.append((queries, hits))
        self._recent_queries += queries
        self._recent_hits += hits
        totals = self._totals
        self._totals = replace(
            totals, num_requests=totals.num_requests + 1, queries=totals.queries + queries, hits=totals.hits + hits
        )

    def on_readmitted(self, queries: int, hits: int) -> None:
        """Count a preempted request that was admitted again."""
        totals = self._totals
        self._totals = replace(
            totals,
            num_preempted=totals.num_preempted + 1,
            preempted_queries=totals.preempted_queries + queries,
            preempted_hits=totals.preempted_hits + hits,
        )

    def forget_recent(self) -> None:
        """Reset the recent ratio after the cache was emptied."""
        self._recent.clear()
        self._recent_queries = self._recent_hits = 0

    def statistics(self) -> PrefixStatistics:
        """Return a copy of the current counts."""
        return replace(self._totals, recent_hit_ratio=self._recent_hits / max(1, self._recent_queries))
