"""The view of a `kvtier sidecar`: tiers, hits, lanes, layouts, clients and leases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtier.cli.top.cells import age, new_table, percent, plain, with_content
from kvtier.engine.config import size_text

_MAX_ROWS = 16  # rows of clients, and of leases

_Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SidecarView:
    """The sidecar's responses, and the time when they were received."""

    stats: _Object
    clients: Sequence[_Object]
    leases: Sequence[_Object]
    at: float


def rendered(view: SidecarView, before: SidecarView | None) -> RenderableType:
    """Return what to display. *before* is the previous view, from which transfer rates are computed.

    Raises KeyError, TypeError, AttributeError or ValueError if the responses are those of another version.
    """
    stats = view.stats
    return Group(
        *with_content(
            [
                _head(stats),
                _tiers(stats),
                _endpoints(stats),
                _lanes(view, before),
                _layouts(stats),
                _clients(view.clients),
                _leases(view.leases),
            ]
        )
    )


def _head(stats: _Object) -> Text:
    state = "ready" if stats["ready"] else stats["why_not_ready"]
    head = Text.assemble(
        ("kvtier sidecar ", "bold"),
        (state, "green" if stats["ready"] else "bold red"),
        f"   up {age(stats['uptime_s'])}",
        f"   {size_text(stats['backed_bytes'])} of {size_text(stats['segment_bytes'])} host memory prepared",
    )
    pins = stats["pins"]
    if pins["num_pins"]:
        pinned = f"{size_text(pins['num_bytes'])} of {size_text(pins['max_bytes'])}"
        head.append(f"   {pins['num_pins']:,} pins: {pinned}")
    store = stats["store"]
    if store is not None and store["not_open"] is not None:
        head.append(f"\nthe disk is not open: {store['why'] or store['not_open']}", "bold red")
    if stats["disk"] is not None:
        for side, state in stats["disk"]["breakers"].items():
            if state != "closed":
                why = stats["disk"]["why_failed"][side]
                cause = why or "errors, or no answer"
                head.append(f"\nthe disk is not used for a while ({side} breaker {state}): {cause}", "bold red")
    return head


def _tiers(stats: _Object) -> Table:
    table = new_table("tier", "used", "of", "full", "chunks", "evicted", "bad")
    for name, tier in stats["tiers"].items():
        table.add_row(
            name,
            size_text(tier["num_bytes"]),
            size_text(tier["capacity_bytes"]),
            percent(tier["num_bytes"], tier["capacity_bytes"]),
            f"{tier['num_blocks']:,}",
            f"{tier['num_evicted']:,}",
            f"{sum(tier['corrupt'].values()):,}",
        )
    return table


def _endpoints(stats: _Object) -> Table:
    table = new_table("endpoint", "asked", "hits", "hit ratio", "loaded", "stored", "lost", "refused")
    for endpoint in stats["endpoints"]:
        table.add_row(
            plain(endpoint["kind"]),
            f"{endpoint['num_asked']:,}",
            f"{endpoint['num_promised']:,}",
            percent(endpoint["num_promised"], endpoint["num_asked"]),
            f"{endpoint['num_loaded']:,}",
            f"{endpoint['num_stored']:,}",
            f"{sum(endpoint['lost'].values()):,}",
            f"{sum(endpoint['refused'].values()):,}",
        )
    return table


def _lanes(view: SidecarView, before: SidecarView | None) -> Table:
    table = new_table("lane", "now", "recent", "moved", "failed")
    for name, lane in view.stats["lanes"].items():
        if not (lane["num_bytes"] or lane["num_failed"]):
            continue
        now = "" if before is None else f"{size_text(_rate(view, before, name))}/s"
        speed = lane["bytes_per_s"]
        table.add_row(
            name,
            now,
            "" if speed is None else f"{size_text(speed)}/s",
            size_text(lane["num_bytes"]),
            f"{lane['num_failed']:,}",
        )
    return table


def _rate(view: SidecarView, before: SidecarView, lane: str) -> float:
    """Return the bytes per second that the transfer lane *lane* moved between two views.

    If the sidecar was restarted in between, its counter started again from 0.
    """
    moved = view.stats["lanes"][lane]["num_bytes"]
    if view.stats["segment"] == before.stats["segment"]:
        moved -= before.stats["lanes"].get(lane, {"num_bytes": 0})["num_bytes"]
    return float(moved) / max(view.at - before.at, 1e-3)


def _layouts(stats: _Object) -> Table:
    table = new_table("model", "weights", "layout", "chunk", "memory", "chunks", "leased", "unsaved")
    for each in stats["layouts"]:
        table.add_row(
            plain(each["model"]),
            plain(each["weights"])[:24],
            each["digest"][:8],
            size_text(each["chunk_bytes"]),
            size_text(each["held_bytes"]),
            f"{each['host']['num_blocks']:,}",
            f"{each['leased_chunks']:,}",
            f"{each['unsaved_chunks']:,}",
        )
    return table


def _clients(clients: Sequence[_Object]) -> Table:
    table = new_table(f"client ({len(clients)})", "attached", "model", "leased")
    for client in clients[:_MAX_ROWS]:
        layout = client["layout"]
        model = "" if layout is None else plain(layout["model"])
        table.add_row(plain(client["name"]), age(client["attached_s"]), model, f"{client['leased_chunks']:,}")
    return table


def _leases(leases: Sequence[_Object]) -> Table:
    table = new_table(f"lease ({len(leases)})", "client", "group", "chunks", "held")
    for lease in leases[:_MAX_ROWS]:
        table.add_row(
            lease["use"],
            plain(lease["client"]),
            str(lease["group"]),
            f"{lease['num_chunks']:,}",
            age(lease["held_s"]),
        )
    return table
