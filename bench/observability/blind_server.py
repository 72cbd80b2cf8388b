"""`kvtier serve` that keeps no books of its requests: what all that is seen is compared with.

It is to be started with `GOMP_SPINCOUNT` as `kvtier serve` sets it: here torch is loaded before that could.
"""

import sys
from collections.abc import Hashable, Mapping
from unittest.mock import patch

from kvtier.cli.main import main
from kvtier.engine import build_core as engine_build
from kvtier.engine.observability.records.request_accounts import RequestAccounts, RequestStatistics
from kvtier.engine.scheduling.request import Request
from kvtier.engine.scheduling.timeline import Timeline
from kvtier.engine.scheduling.trail import Trail, Trails
from kvtier.tiers.lower.statistics import TierStatistics
from kvtier.tiers.naming.tier import Tier


class NoTrails(Trails):
    """Keeps none."""

    def begin(self, request: Hashable, trail: Trail) -> None:
        """Nothing."""


class NoAccounts(RequestAccounts):
    """Takes nothing in, and says what was at the start."""

    _first: RequestStatistics | None = None

    def on_added(self, request: Request) -> None:
        """Nothing."""

    def on_token(self, timeline: Timeline) -> None:
        """Nothing."""

    def on_ended(self, request: Request) -> None:
        """Nothing."""

    def statistics(self, tiers: Mapping[Tier, TierStatistics]) -> RequestStatistics:
        """The first ones."""
        self._first = self._first or super().statistics(tiers)
        return self._first


if __name__ == "__main__":
    with patch.object(engine_build, "RequestAccounts", NoAccounts), patch.object(engine_build, "Trails", NoTrails):
        sys.exit(main())
