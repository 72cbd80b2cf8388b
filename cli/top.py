"""The `kvtier top` command, which shows a sidecar's tiers, hits, transfers, clients and leases in a terminal."""

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvtier.cli.user_input import token_of
from kvtier.engine.config import is_loopback, size_text

_ANSWER_S = 5.0
_MAX_BYTES = 16 << 20  # limit on a response
_MAX_ROWS = 16  # rows of clients, and of leases
_OTHER_WIDTH = 110  # width, in columns, of output that does not go to a terminal

_Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class View:
    """The sidecar's responses, and the time when they were received."""

    stats: _Object
    clients: Sequence[_Object]
    leases: Sequence[_Object]
    at: float


class NoAnswer(RuntimeError):
    """An error for a sidecar that could not be queried. The message says why and what to do."""


def top(url: str, token_file: Path | None, interval_s: float | None) -> int:
    """Show the state of the sidecar at *url*, and return the exit status.

    The view is updated every *interval_s* seconds until Ctrl-C, or shown once if *interval_s* is None. Raises
    `NoAnswer` if the sidecar does not answer the first query. If a later query fails, the view says so.
    """
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ValueError(f"{url}: is not a URL; write http://HOST:PORT")
    token = None if token_file is None else token_of(str(token_file))
    console = Console()
    if not console.is_terminal:
        console = Console(width=_OTHER_WIDTH)
    view = read(url, token)
    if interval_s is None:
        console.print(rendered(view, None))
        return 0
    with Live(rendered(view, None), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                latest = read(url, token)
                shown = rendered(latest, view)
            except NoAnswer as error:
                shown = Group(Text(f"no answer: {error}", style="bold red"), rendered(view, None))
            else:
                view = latest
            live.update(shown, refresh=True)


def read(url: str, token: str | None) -> View:
    """Query the sidecar. Raise `NoAnswer` if it does not answer, or is not a sidecar."""
    answers = [_answer(f"{url.rstrip('/')}/v1/kvtier/{what}", token) for what in ("stats", "clients", "leases")]
    try:
        return View(answers[0], answers[1]["clients"], answers[2]["leases"], time.monotonic())
    except (KeyError, TypeError):
        raise NoAnswer(f"{url}: the server is not a kvtier sidecar; give the sidecar's HTTP address") from None


def rendered(view: View, before: View | None) -> RenderableType:
    """Return what to display. *before* is the previous view, from which transfer rates are computed.

    Raises `NoAnswer` if the responses are not those of a sidecar of this version.
    """
    stats = view.stats
    try:
        return Group(
            _head(stats),
            _tiers(stats),
            _endpoints(stats),
            _lanes(view, before),
            _layouts(stats),
            _clients(view.clients),
            _leases(view.leases),
        )
    except (KeyError, TypeError, AttributeError, ValueError):
        raise NoAnswer("the server is not a sidecar, or has another version of kvtier; use the same version") from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A handler that makes redirects an error, because following one would send the token to another server."""

    def redirect_request(self, *_: object) -> None:
        """Return None, so that the redirect is not followed."""


def _answer(url: str, token: str | None) -> Any:
    request = urllib.request.Request(url, headers={} if token is None else {"Authorization": f"Bearer {token}"})
    is_own = is_loopback(urlsplit(url).hostname or "")
    # Use no proxy for a sidecar on this machine, because the proxy would look for the sidecar on the proxy's machine.
    opener = urllib.request.build_opener(_NoRedirects, *([urllib.request.ProxyHandler({})] if is_own else []))
    try:
        with opener.open(request, timeout=_ANSWER_S) as reply:
            return json.loads(reply.read(_MAX_BYTES))
    except urllib.error.HTTPError as error:
        if error.code == 401:
            raise NoAnswer(f"{url}: the sidecar asks for a token; give --token-file FILE") from None
        raise NoAnswer(f"{url}: {_message(error)}") from None
    except urllib.error.URLError as error:
        raise NoAnswer(f"{url}: {error.reason}; is the sidecar running, and is this its HTTP port?") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoAnswer(f"{url}: {error or type(error).__name__}") from None


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read(_MAX_BYTES))["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}"


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="ellipsis", no_wrap=True)
    return table


def _head(stats: _Object) -> Text:
    state = "ready" if stats["ready"] else stats["why_not_ready"]
    head = Text.assemble(
        ("kvtier sidecar ", "bold"),
        (state, "green" if stats["ready"] else "bold red"),
        f"   up {_age(stats['uptime_s'])}",
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
    table = _table("tier", "used", "of", "full", "chunks", "evicted", "bad")
    for name, tier in stats["tiers"].items():
        table.add_row(
            name,
            size_text(tier["num_bytes"]),
            size_text(tier["capacity_bytes"]),
            _percent(tier["num_bytes"], tier["capacity_bytes"]),
            f"{tier['num_blocks']:,}",
            f"{tier['num_evicted']:,}",
            f"{sum(tier['corrupt'].values()):,}",
        )
    return table


def _endpoints(stats: _Object) -> Table:
    table = _table("endpoint", "asked", "hits", "hit ratio", "loaded", "stored", "lost", "refused")
    for endpoint in stats["endpoints"]:
        table.add_row(
            _plain(endpoint["kind"]),
            f"{endpoint['num_asked']:,}",
            f"{endpoint['num_promised']:,}",
            _percent(endpoint["num_promised"], endpoint["num_asked"]),
            f"{endpoint['num_loaded']:,}",
            f"{endpoint['num_stored']:,}",
            f"{sum(endpoint['lost'].values()):,}",
            f"{sum(endpoint['refused'].values()):,}",
        )
    return table


def _lanes(view: View, before: View | None) -> Table:
    table = _table("lane", "now", "recent", "moved", "failed")
    for name, lane in view.stats["lanes"].items():
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


def _rate(view: View, before: View, lane: str) -> float:
    """Return the bytes per second that the transfer lane *lane* moved between two views.

    If the sidecar was restarted in between, its counter started again from 0.
    """
    moved = view.stats["lanes"][lane]["num_bytes"]
    if view.stats["segment"] == before.stats["segment"]:
        moved -= before.stats["lanes"].get(lane, {"num_bytes": 0})["num_bytes"]
    return float(moved) / max(view.at - before.at, 1e-3)


def _layouts(stats: _Object) -> Table:
    table = _table("model", "weights", "layout", "chunk", "memory", "chunks", "leased", "unsaved")
    for each in stats["layouts"]:
        table.add_row(
            _plain(each["model"]),
            _plain(each["weights"])[:24],
            each["digest"][:8],
            size_text(each["chunk_bytes"]),
            size_text(each["held_bytes"]),
            f"{each['host']['num_blocks']:,}",
            f"{each['leased_chunks']:,}",
            f"{each['unsaved_chunks']:,}",
        )
    return table


def _clients(clients: Sequence[_Object]) -> Table:
    table = _table(f"client ({len(clients)})", "attached", "model", "leased")
    for client in clients[:_MAX_ROWS]:
        layout = client["layout"]
        model = "" if layout is None else _plain(layout["model"])
        table.add_row(_plain(client["name"]), _age(client["attached_s"]), model, f"{client['leased_chunks']:,}")
    return table


def _leases(leases: Sequence[_Object]) -> Table:
    table = _table(f"lease ({len(leases)})", "client", "group", "chunks", "held")
    for lease in leases[:_MAX_ROWS]:
        table.add_row(
            lease["use"],
            _plain(lease["client"]),
            str(lease["group"]),
            f"{lease['num_chunks']:,}",
            _age(lease["held_s"]),
        )
    return table


def _plain(text: str) -> Text:
    """Return *text*, which a client chose, with "?" in place of control characters."""
    return Text("".join(letter if letter.isprintable() else "?" for letter in text))


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else ""


def _age(seconds: float) -> str:
    minutes, _ = divmod(int(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d"
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
