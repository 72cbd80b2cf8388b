"""SidecarSource: provides the dashboard's data about a `kvtier sidecar`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain

from kvtier.engine.observability.memory import memory_statistics
from kvtier.sidecar.attach_commands import AttachCommand
from kvtier.sidecar.endpoint import ConnectorCounts
from kvtier.sidecar.http.owner import Owner
from kvtier.sidecar.http.views import LANES, Snapshot, clients_view, snapshot_of
from kvtier.tiers.naming.tier import Tier
from kvtier.web.api_error import ApiError
from kvtier.web.dashboard import parts
from kvtier.web.dashboard.dashboard import NoSample
from kvtier.web.dashboard.health import as_facts, disk_conditions, remote_conditions, tier_conditions
from kvtier.web.dashboard.sample import START, Sample

NUM_CLIENTS = 64  # shown at most
NUM_PINS = 64
TIERS = (Tier.HOST, Tier.DISK, Tier.REMOTE)

_CHUNKS: Mapping[str, Callable[[ConnectorCounts], int]] = {
    "asked": lambda endpoint: endpoint.num_asked,
    "promised": lambda endpoint: endpoint.num_promised,
    "loaded": lambda endpoint: endpoint.num_loaded,
    "stored": lambda endpoint: endpoint.num_stored,
    "lost": lambda endpoint: sum(endpoint.lost.values()),
    "refused": lambda endpoint: sum(endpoint.refused.values()),
}


class SidecarSource:
    """A source of samples for the dashboard, with the statistics of `/v1/kvtier/stats`. Owned by the event loop."""

    def __init__(self, owner: Owner, attach: Sequence[AttachCommand]) -> None:
        """Create the source. The page shows the commands *attach* while no engine is attached."""
        self._owner = owner
        self._ages = parts.RecentAges()
        self.columns = (
            *parts.token_columns(),
            *(column for tier in TIERS for column in parts.tier_columns(tier)),
            *(column for lane in LANES.values() for column in parts.lane_columns(lane)),
            *parts.what_if_columns(TIERS),
            *(f"chunks.{name}" for name in _CHUNKS),
            "clients",
            "pinned.bytes",
            "backed.bytes",
            *parts.memory_columns(),
            START,
            "disk.written",
        )
        self.about: Mapping[str, object] = {
            "kind": "sidecar",
            **parts.process_facts(),
            "name": "",
            "own_only": False,
            "attach": [asdict(each) for each in attach],
        }

    async def sample(self, at: float, monotonic_s: float) -> Sample:
        """Return a sample of the current state. Raise `NoSample` while the sidecar's thread does not answer."""
        try:
            snapshot = await self._owner.ask(partial(snapshot_of, self._owner.sidecar))
        except ApiError as error:
            raise NoSample(str(error)) from None
        return self._sampled(snapshot, at, monotonic_s)

    async def own(self, group: str | None) -> Mapping[str, object]:
        """Return the slowest lookups. All viewers get the same, whatever their *group*."""
        sidecar = self._owner.sidecar
        try:
            records = await self._owner.ask(sidecar.records.slowest)
        except ApiError as error:
            raise NoSample(str(error)) from None
        return {"slowest": [parts.record_facts(record) for record in records[: parts.NUM_SLOWEST]]}

    def _sampled(self, snapshot: Snapshot, at: float, monotonic_s: float) -> Sample:
        statistics = snapshot.statistics
        totals = parts.token_totals(statistics.tokens)
        levels: parts.Numbers = {
            "clients": len(snapshot.clients),
            "pinned.bytes": statistics.pins.num_bytes,
            "backed.bytes": statistics.backed_bytes,
        }
        for tier, found in statistics.tiers.items():
            totals |= parts.tier_totals(tier, found)
            levels |= parts.tier_levels(tier, found)
        for route, moved in statistics.routes.items():
            totals |= parts.lane_totals(LANES[route], moved)
            levels |= parts.lane_levels(LANES[route], moved)
        levels |= self._ages.levels(monotonic_s, statistics.tiers) | parts.what_if_levels(statistics.what_if)
        levels |= parts.memory_levels(memory_statistics(), statistics.backed_bytes)
        for name, count in _CHUNKS.items():
            totals[f"chunks.{name}"] = sum(count(endpoint) for endpoint in statistics.endpoints)
        if statistics.disk is not None:
            totals["disk.written"] = statistics.disk.written_bytes_total
        return Sample(at, monotonic_s, totals, levels, self._facts(snapshot))

    def _facts(self, snapshot: Snapshot) -> dict[str, object]:
        statistics = snapshot.statistics
        conditions = chain(
            disk_conditions(statistics.store, statistics.disk),
            remote_conditions(statistics.remote),
            tier_conditions(statistics.tiers),
        )
        return {
            "why_not_ready": snapshot.why_not_ready,
            "conditions": as_facts(conditions),
            "corrupt": parts.corrupt_facts(statistics.tiers),
            "evicted": parts.evicted_facts(statistics.tiers),
            "disk": None if statistics.disk is None else parts.disk_facts(statistics.disk),
            "remote": None if statistics.remote is None else parts.remote_facts(statistics.remote),
            "store": None if statistics.store is None else parts.store_facts(statistics.store),
            "segment_bytes": statistics.segment_bytes,
            "clients": clients_view(snapshot)[:NUM_CLIENTS],
            "num_clients": len(snapshot.clients),
            "layouts": [
                {
                    "digest": each.layout.digest.hex(),
                    "model": each.layout.model,
                    "weights": each.layout.weights,
                    "held_bytes": each.held_bytes,
                    "chunks": each.host.num_blocks,
                    "leased": each.num_leased_chunks,
                    "unsaved": each.num_unsaved,
                }
                for each in statistics.layouts
            ],
            "endpoints": _endpoints(statistics.endpoints),
            "pins": {
                "num": statistics.pins.num_pins,
                "bytes": statistics.pins.num_bytes,
                "max_bytes": statistics.pins.max_bytes,
                "held": [
                    {
                        "name": pin.name,
                        "held_s": round(snapshot.now - pin.since, 1),
                        "model": None if pin.layout is None else pin.layout.model,
                        "chunks": sum(lease.num_chunks for lease in pin.leases),
                    }
                    for pin in snapshot.pins[:NUM_PINS]
                ],
            },
        }


def _endpoints(endpoints: Iterable[ConnectorCounts]) -> list[dict[str, object]]:
    return [
        {
            "kind": endpoint.kind,
            **{name: count(endpoint) for name, count in _CHUNKS.items()},
            "why_lost": dict(endpoint.lost),
            "why_refused": dict(endpoint.refused),
        }
        for endpoint in endpoints
    ]
