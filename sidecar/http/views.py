"""The sidecar's state and counters as JSON."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import msgspec

from kvtier.engine.config import DiskConfig, RemoteConfig
from kvtier.engine.observability.memory import memory_statistics
from kvtier.engine.stores.reopening_store import StoreStanding
from kvtier.sidecar.config import SidecarConfig
from kvtier.sidecar.endpoint import AttachedClient, ConnectorCounts
from kvtier.sidecar.layout import Layout
from kvtier.sidecar.sidecar import Sidecar
from kvtier.sidecar.statistics import LayoutStatistics, SidecarStatistics
from kvtier.tiers.lower.statistics import DiskStatistics, TierStatistics
from kvtier.tiers.naming.tier import Tier
from kvtier.tiers.reuse.what_if import HitRatios
from kvtier.transfer.transfer_engine import Route, RouteStatistics

Object = dict[str, object]

# Names of a sidecar's lanes. Without a device, the two lanes for copies to and from a device compute digests instead.
LANES = {
    Route.HOST_TO_DISK: "store",
    Route.DISK_TO_HOST: "load",
    Route.HOST_TO_REMOTE: "put",
    Route.REMOTE_TO_HOST: "get",
    Route.DEVICE_TO_HOST: "digest",  # of chunks that engines have written
    Route.HOST_TO_DEVICE: "verify",  # chunks before engines read them
}
SET = "(set)"  # in place of a secret


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a sidecar at one moment.

    *why_not_ready* is empty if the sidecar is ready. *pins* lists each pin as if it were a client with leases.
    *quarantined* lists clients that have ended, but keep their leases, because their processes may still copy. *now*
    and *started_at* are in seconds of the sidecar's clock.
    """

    statistics: SidecarStatistics
    why_not_ready: str
    clients: tuple[AttachedClient, ...]
    pins: tuple[AttachedClient, ...]
    quarantined: tuple[AttachedClient, ...]
    now: float
    started_at: float


def snapshot_of(sidecar: Sidecar) -> Snapshot:
    """Return the sidecar's current state. Call it on the sidecar's own thread."""
    return Snapshot(
        sidecar.statistics(),
        sidecar.why_not_ready,
        tuple(sidecar.clients()),
        tuple(sidecar.pins.holders()),
        tuple(sidecar.quarantined()),
        sidecar.now(),
        sidecar.started_at,
    )


def stats_view(snapshot: Snapshot) -> Object:
    """Return the state and the counters of all parts of the sidecar. Clients are counted, but not listed."""
    statistics = snapshot.statistics
    return {
        "segment": statistics.segment_name,
        "uptime_s": round(snapshot.now - snapshot.started_at, 1),
        "ready": not snapshot.why_not_ready,
        "why_not_ready": snapshot.why_not_ready,
        "segment_bytes": statistics.segment_bytes,
        "backed_bytes": statistics.backed_bytes,
        "num_clients": len(snapshot.clients),
        "tiers": tiers_view(statistics.tiers),
        "layouts": [_layout_statistics_view(each) for each in statistics.layouts],
        "disk": None if statistics.disk is None else _disk_view(statistics.disk),
        "remote": None if statistics.remote is None else asdict(statistics.remote),
        "store": None if statistics.store is None else _store_view(statistics.store),
        "lanes": {LANES[route]: _lane_view(totals) for route, totals in statistics.routes.items()},
        "pins": asdict(statistics.pins),
        "quarantine": asdict(statistics.quarantine),
        "memory": asdict(memory_statistics()),
        "what_if": what_if_view(statistics.what_if),
        "endpoints": [_endpoint_view(endpoint) for endpoint in statistics.endpoints],
    }


def tiers_view(tiers: Mapping[Tier, TierStatistics]) -> Object:
    """Return the statistics of each tier: its current content and its evictions."""
    return {tier.value: _tier_view(found) for tier, found in tiers.items()}


def what_if_view(ratios: HitRatios) -> Object:
    """Return for each tier the hit ratios that are estimated for multiples of its size.

    A hit ratio includes the hits in faster tiers.
    """
    return {tier.value: {f"{size:g}": ratio for size, ratio in each.items()} for tier, each in ratios.items()}


def clients_view(snapshot: Snapshot) -> list[Object]:
    """Return a description of each attached client."""
    return [
        {
            "name": client.name,
            "attached_s": _age(snapshot, client.since),
            "layout": None if client.layout is None else layout_view(client.layout),
            "leased_chunks": sum(lease.num_chunks for lease in client.leases),
        }
        for client in snapshot.clients
    ]


def leases_view(snapshot: Snapshot) -> list[Object]:
    """Return all leases, oldest first: of clients, of pins, and of ended clients whose processes may still copy."""
    holders = (*snapshot.clients, *snapshot.pins, *snapshot.quarantined)
    leases = [(lease, client) for client in holders for lease in client.leases]
    return [
        {
            "client": client.name,
            "use": lease.use.value,
            "layout": None if client.layout is None else client.layout.digest.hex(),
            "group": lease.group,
            "num_chunks": lease.num_chunks,
            "held_s": _age(snapshot, lease.since),
        }
        for lease, client in sorted(leases, key=lambda each: each[0].since)
    ]


def layout_view(layout: Layout) -> Object:
    """Return the layout (an engine's model and KV format) as a JSON object that operators read."""
    return {
        "digest": layout.digest.hex(),
        "model": layout.model,
        **layout.details(),
        "weights": layout.weights or "not known",
    }


def config_view(config: SidecarConfig) -> Object:
    """Return the configuration without secrets, such as a tenant's salt, a password or a command that prints a key."""
    view: Object = msgspec.to_builtins(config, enc_hook=int)
    view["tenants"] = [msgspec.to_builtins(tenant, enc_hook=int) for tenant in config.tenants.values()]
    view["http"] = msgspec.to_builtins(config.http) | ({} if config.http.token is None else {"token": SET})
    view["disk"] = None if config.disk is None else _store_table(config.disk)
    view["remote"] = None if config.remote is None else _store_table(config.remote) | {"url": config.remote.where}
    return view


def _store_table(config: DiskConfig | RemoteConfig) -> Object:
    table: Object = msgspec.to_builtins(config, enc_hook=int)
    return table | ({} if config.encryption_key_command is None else {"encryption_key_command": SET})


def _layout_statistics_view(each: LayoutStatistics) -> Object:
    return {
        **layout_view(each.layout),
        "held_bytes": each.held_bytes,
        "leased_chunks": each.num_leased_chunks,
        "unsaved_chunks": each.num_unsaved,
        "host": _tier_view(each.host),
    }


def _tier_view(tier: TierStatistics) -> Object:
    return {**asdict(tier), "num_evicted": tier.num_evicted}


def _disk_view(disk: DiskStatistics) -> Object:
    view = {name: getattr(disk, name) for name in DiskStatistics.__slots__ if name != "tenants"}
    if disk.life is not None:
        years = disk.life.years_left
        view["life"] = {"used": disk.life.used, "years_left": None if math.isinf(years) else years}
    return view


def _store_view(store: StoreStanding) -> Object:
    return {**asdict(store), "folder": str(store.folder)}


def _lane_view(totals: RouteStatistics) -> Object:
    return asdict(totals)


def _endpoint_view(endpoint: ConnectorCounts) -> Object:
    view = {name: _plain(getattr(endpoint, name)) for name in ConnectorCounts.__slots__ if name != "tokens"}
    return view | {"tokens": asdict(endpoint.tokens)}


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value


def _age(snapshot: Snapshot, since: float) -> float:
    return round(snapshot.now - since, 1)
