"""EngineSource: provides the data that the dashboard of `kvtier serve` shows."""

from collections.abc import Mapping
from dataclasses import asdict

from kvtier.engine.core import EngineStatistics
from kvtier.engine.observability.memory import memory_statistics
from kvtier.engine.observability.metrics.tiers import sources_of
from kvtier.server.document_routes import document_object
from kvtier.server.service import Service
from kvtier.tiers.naming.tier import Tier
from kvtier.transfer.transfer_engine import Route
from kvtier.web.dashboard import parts
from kvtier.web.dashboard.dashboard import NoSample
from kvtier.web.dashboard.health import (
    as_facts,
    disk_conditions,
    remote_conditions,
    sidecar_condition,
    tier_conditions,
)
from kvtier.web.dashboard.sample import START, Sample

NUM_DOCUMENTS = 32
QUANTILES_WINDOW_S = 60.0

_REQUESTS = ("waiting", "promoting", "running")


class EngineSource:
    """The dashboard's source of data: samples of the same engine statistics as in `/stats`. Owned by the event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._ages = parts.RecentAges()
        self._ttft = parts.RecentQuantiles("ttft", QUANTILES_WINDOW_S)
        self._token_gap = parts.RecentQuantiles("token_gap", QUANTILES_WINDOW_S)
        self.columns = (
            *parts.token_columns(),
            *(column for tier in Tier for column in parts.tier_columns(tier)),
            *(column for route in Route for column in parts.lane_columns(route)),
            *parts.what_if_columns(Tier),
            *(f"requests.{state}" for state in _REQUESTS),
            "requests.answered",
            *self._ttft.columns,
            *self._token_gap.columns,
            "tokens.generated",
            *parts.http_columns(),
            *parts.memory_columns(),
            START,
            "pinned.bytes",
            "disk.written",
        )
        self.about: Mapping[str, object] = {
            "kind": "serve",
            **parts.process_facts(),
            "name": service.models.name,
            "own_only": service.is_strict,
        }

    async def sample(self, at: float, monotonic_s: float) -> Sample:
        """Return a sample of the engine's latest statistics; raise `NoSample` once the engine has ended."""
        try:
            statistics = self._service.llm.statistics()
        except RuntimeError as error:
            raise NoSample(str(error)) from None
        return self._sampled(statistics, at, monotonic_s)

    async def own(self, group: str | None) -> Mapping[str, object]:
        """Return what viewers of the tenant *group* get: its newest documents, and the server's slowest requests.

        If tenants are isolated, only this tenant's own requests are included. On a server without API keys, the only
        tenant is None.
        """
        service = self._service
        documents = service.documents.of(group)
        shown = documents[-NUM_DOCUMENTS:][::-1]
        try:
            records = await service.llm.ask(lambda core: core.records.slowest())
            residences = await service.documents.residences(shown)
        except RuntimeError as error:
            raise NoSample(str(error)) from None
        visible = [each for each in records if not service.is_strict or each.tenant == group]
        name = service.models.name
        return {
            "slowest": [parts.record_facts(record) for record in visible[: parts.NUM_SLOWEST]],
            "documents": [
                document_object(document, residence, name)
                for document, residence in zip(shown, residences, strict=True)
            ],
            "num_documents": len(documents),
        }

    def _sampled(self, statistics: EngineStatistics, at: float, monotonic_s: float) -> Sample:
        cache = statistics.cache
        totals = parts.token_totals(statistics.tokens)
        levels: parts.Numbers = {
            "requests.waiting": statistics.num_waiting,
            "requests.promoting": statistics.num_promoting,
            "requests.running": statistics.num_running,
            "pinned.bytes": statistics.pinned_bytes,
        }
        for tier, found in cache.tiers.items():
            totals |= parts.tier_totals(tier, found)
            levels |= parts.tier_levels(tier, found)
        for route, moved in cache.routes.items():
            totals |= parts.lane_totals(route, moved)
            levels |= parts.lane_levels(route, moved)
        levels |= self._ages.levels(monotonic_s, cache.tiers) | parts.what_if_levels(statistics.requests.what_if)
        totals |= parts.http_totals(self._service.metrics.statistics())
        levels |= parts.memory_levels(memory_statistics(), statistics.host_prepared_bytes)
        served = statistics.requests.served
        totals |= {"requests.answered": served.ttft.num_values, "tokens.generated": served.num_generated}
        levels |= self._ttft.levels(monotonic_s, served.ttft)
        levels |= self._token_gap.levels(monotonic_s, served.token_gap)
        if cache.disk is not None:
            totals["disk.written"] = cache.disk.written_bytes_total
        return Sample(at, monotonic_s, totals, levels, self._facts(statistics))

    def _facts(self, statistics: EngineStatistics) -> dict[str, object]:
        cache = statistics.cache
        conditions = [
            *disk_conditions(statistics.store, cache.disk),
            *remote_conditions(cache.remote),
            *tier_conditions(cache.tiers),
        ]
        if statistics.sidecar is not None:
            conditions.append(sidecar_condition(statistics.sidecar))
        return {
            "is_draining": self._service.is_draining,
            "recent_hit_ratio": statistics.prefix.recent_hit_ratio,
            "conditions": as_facts(conditions),
            "corrupt": parts.corrupt_facts(cache.tiers),
            "evicted": parts.evicted_facts(cache.tiers),
            "disk": None if cache.disk is None else parts.disk_facts(cache.disk),
            "remote": None if cache.remote is None else parts.remote_facts(cache.remote),
            "store": None if statistics.store is None else parts.store_facts(statistics.store),
            "tenants": _tenants(statistics),
            "images": None if statistics.images is None else asdict(statistics.images),
        }


def _tenants(statistics: EngineStatistics) -> list[dict[str, object]]:
    """Return the token counts of the largest tenants, and the cached bytes by tier of tenants with a quota."""
    tokens = statistics.requests.tenants
    names = [*tokens, *(name for name in statistics.tenants if name not in tokens)]
    return [
        {
            "name": name,
            "tokens": sources_of(tokens[name]) if name in tokens else None,
            "bytes": {tier.value: number for tier, number in statistics.tenants.get(name, {}).items()},
        }
        for name in names
    ]
