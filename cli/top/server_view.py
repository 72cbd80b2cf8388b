"""The view of a `kvtier serve`: requests, latencies, sources of prompt tokens, tiers and lanes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtier.cli.top.cells import new_table, percent, plain, with_content
from kvtier.engine.config import size_text
from kvtier.tiers.histogram import HistogramStatistics
from kvtier.web.dashboard.recent_values import RecentValues, quantile

_WINDOW_S = 60.0
_SHARES = (0.5, 0.9, 0.99)
_LATENCIES = {"first token": "ttft", "between tokens": "token_gap", "whole request": "total"}
_SOURCES = {"device": "device", "host": "host", "disk": "disk", "remote": "remote", "computed": "recomputed"}

_Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ServerView:
    """A server's statistics, and the time when they were received, in monotonic seconds."""

    url: str
    model: str
    stats: _Object
    at: float


class ServerViews:
    """Renders the views of one server. Compares each view with earlier ones, for rates and recent latencies."""

    def __init__(self) -> None:
        self._before: ServerView | None = None
        self._recent: dict[str, RecentValues] = {}

    def rendered(self, view: ServerView) -> RenderableType:
        """Return what to display. Raises KeyError or TypeError if the statistics are those of another version."""
        before = self._before
        if before is not None and _num_generated(view) < _num_generated(before):  # the server was restarted
            before, self._recent = None, {}
        self._before = view
        return Group(
            *with_content(
                [
                    _head(view, before),
                    self._latencies(view),
                    _sources(view, before),
                    _tiers(view.stats),
                    _lanes(view, before),
                ]
            )
        )

    def _latencies(self, view: ServerView) -> Table:
        """Return the table of latencies: of the last minute, or of all requests until there is a recent one."""
        table = new_table("latency", "p50", "p90", "p99", "of")
        for title, name in _LATENCIES.items():
            found = view.stats["requests"]["served"][name]
            every = HistogramStatistics(tuple(found["bounds"]), tuple(found["counts"]), found["total"])
            recent = self._recent.setdefault(name, RecentValues(_WINDOW_S)).since(view.at, every)
            shown, span = (recent, "last minute") if recent.num_values else (every, "since the start")
            if shown.num_values:
                texts = [_duration(quantile(shown, share) or 0.0) for share in _SHARES]
                table.add_row(title, *texts, f"{shown.num_values:,} {span}")
        return table


def _head(view: ServerView, before: ServerView | None) -> Text:
    stats = view.stats
    prefix = stats["prefix"]
    head = Text.assemble(("kvtier serve ", "bold"), plain(view.model), f"   {view.url}")
    head.append(
        f"\nrequests: {stats['num_running']:,} running, {stats['num_waiting']:,} waiting, "
        f"{stats['num_promoting']:,} loading, {sum(stats['requests']['served']['finished'].values()):,} finished"
    )
    head.append(f"\nhit ratio: {percent(prefix['hits'], prefix['queries']) or 'no requests yet'}")
    if prefix["queries"]:
        head.append(f" since the start, {100 * prefix['recent_hit_ratio']:.1f}% recently")
    if before is not None:
        head.append(f"   output: {_rate(_num_generated(view) - _num_generated(before), view, before):,.1f} tokens/s")
    store, disk, sidecar = stats["store"], stats["cache"]["disk"], stats["sidecar"]
    if store is not None and store["not_open"] is not None:
        head.append(f"\nthe disk is not open: {store['why'] or store['not_open']}", "bold red")
    for side, state in ({} if disk is None else disk["breakers"]).items():
        if state != "closed":
            cause = disk["why_failed"][side] or "errors, or no answer"
            head.append(f"\nthe disk is not used for a while ({side} breaker {state}): {cause}", "bold red")
    if sidecar is not None and not sidecar["is_attached"]:
        head.append(f"\nthe sidecar at {sidecar['path']} is not attached", "bold red")
    return head


def _sources(view: ServerView, before: ServerView | None) -> Table:
    table = new_table("prompt tokens from", "tokens", "share", "now")
    tokens = view.stats["tokens"]
    total = sum(tokens[key] for key in _SOURCES.values())
    for title, key in _SOURCES.items():
        if tokens[key]:
            now = "" if before is None else f"{_rate(tokens[key] - before.stats['tokens'][key], view, before):,.0f}/s"
            table.add_row(title, f"{tokens[key]:,}", percent(tokens[key], total), now)
    return table


def _tiers(stats: _Object) -> Table:
    table = new_table("tier", "used", "of", "full", "blocks", "evicted", "corrupt")
    for name, tier in stats["cache"]["tiers"].items():
        table.add_row(
            name,
            size_text(tier["num_bytes"]),
            size_text(tier["capacity_bytes"]),
            percent(tier["num_bytes"], tier["capacity_bytes"]),
            f"{tier['num_blocks']:,}",
            f"{sum(tier['evicted'].values()):,}",
            f"{sum(tier['corrupt'].values()):,}",
        )
    return table


def _lanes(view: ServerView, before: ServerView | None) -> Table:
    """Return the table of the lanes that have copied or are to copy blocks."""
    table = new_table("copies", "now", "recent", "in total", "pending", "failed")
    for name, lane in view.stats["cache"]["routes"].items():
        if not (lane["num_bytes"] or lane["pending_bytes"] or lane["num_failed"]):
            continue
        moved = lane["num_bytes"] - (0 if before is None else before.stats["cache"]["routes"][name]["num_bytes"])
        speed = lane["bytes_per_s"]
        table.add_row(
            name.replace("_to_", " to "),
            "" if before is None else f"{size_text(_rate(moved, view, before))}/s",
            "" if speed is None else f"{size_text(speed)}/s",
            size_text(lane["num_bytes"]),
            size_text(lane["pending_bytes"]),
            f"{lane['num_failed']:,}",
        )
    return table


def _num_generated(view: ServerView) -> int:
    return int(view.stats["requests"]["served"]["num_generated"])


def _rate(difference: float, view: ServerView, before: ServerView) -> float:
    return max(0.0, difference) / max(view.at - before.at, 1e-3)


def _duration(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1000 * seconds:,.1f} ms"
