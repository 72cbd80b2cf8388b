"""Every number on the page is the server's: tiles and tables as /stats has them, charts as the history has them.

With and without each tier. What a chart's legend shows is computed here anew from the history; that the history adds up
to /stats is what the tiles, which add it up, are compared for.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Seen
from serving import ServerInThread, come_true, serving, tables
from sidecars import RunningSidecar, running_sidecar, small_config
from small_models import VOCAB, build
from under_load import under_load

from kvtier.sidecar.endpoint import AttachedClient, ConnectorCounts
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.tier import Reason

pytestmark = pytest.mark.long

SOURCES = ("device", "host", "disk", "remote", "recomputed")
RATES = {"Prompt tokens": SOURCES, "Output tokens": ("generated",)}  # tiles, and the columns that they add up
RATE_S, RATIO_S = 5, 30  # of token_cards.js
SHARES = ("p50", "p90", "p95", "p99")
NUM_ERRORS = 3  # requests of an unknown route
LEGEND_S = 3  # a legend shows the newest value that is no older
MOMENTS = 40  # that are compared until one is right: a page on a busy machine misses a second, and averages over 30
TIERS = [
    ("device",),
    ("device", "host"),
    ("device", "host", "disk"),
    ("device", "host", "remote"),
    ("device", "host", "disk", "remote"),
]
SCALES = {
    **{"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12},
    **{"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "%": 0.01},
    **{"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0},
}
# Whether the page shows that tokens come.
COMING = (
    """() => [...document.querySelectorAll('[data-line^="tokens."]')].some((each) => /[1-9]/.test(each.textContent))"""
)
# Pauses the page, and tells which moment it shows.
PAUSE = "() => { document.getElementById('pause').click(); return Number(document.documentElement.dataset.at); }"
LATER = "(before) => Number(document.documentElement.dataset.at) > before"


def config_of(tiers: Sequence[str], folder: Path) -> dict[str, object]:
    """A server's configuration with small *tiers*."""
    config = tables(60)
    if "host" not in tiers:
        config["host"] = {"capacity": 0}  # without the table it has a size of its own choice
    if "disk" in tiers:
        config["disk"] = {"path": str(folder / "store"), "capacity": "16MiB"}
    if "remote" in tiers:
        config["remote"] = {"url": f"file://{folder / 'remote'}"}
    return config


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    return [(seed * 7919 + 31 * i * i + i) % VOCAB for i in range(num_tokens)]


def load(server: ServerInThread) -> AbstractContextManager[None]:
    """Return a context in which seven prompts come again and again: more than the device holds."""
    return under_load(lambda number: server.complete(prompt_of(number % 7, 300), max_tokens=2))


def number_of(text: str) -> float | None:
    """The number that a text on the page says, None for a dash."""
    if text in ("–", "–/s"):
        return None
    found = re.match(r"<? ?([\d.,]+) ?(\D*)$", text.removesuffix("/s"))
    assert found is not None, text
    return float(found[1].replace(",", "")) * SCALES[found[2]]


def is_shown(text: str, value: float | None) -> bool:
    """Whether *text* says the *value*, in its three digits, or as a percentage."""
    shown = number_of(text)
    if shown is None or value is None:
        return shown is value
    rounding = 0.006 if "%" in text else 0.0
    return abs(shown - value) <= max(rounding, 0.006 * abs(value), 1e-9)


class Shown:
    """What the history says of the moment that the page shows."""

    def __init__(self, history: Mapping[str, Any], at: float) -> None:
        assert history["step_s"] == 1
        self._columns = history["columns"]
        self._end = int(at) - int(history["start"])
        assert 0 <= self._end < history["rows"]

    def column(self, name: str) -> list[float | None]:
        """The values by second, up to the moment."""
        return self._columns.get(name, [None] * (self._end + 1))[: self._end + 1]

    def smooth(self, name: str, seconds: int) -> list[float | None]:
        """Means of the seconds before each."""
        values = self.column(name)
        return [
            None if value is None else mean(values[max(0, i - seconds + 1) : i + 1]) for i, value in enumerate(values)
        ]

    def ratio(self, tiers: Sequence[str]) -> list[float | None]:
        """The share of tokens that came from *tiers*."""
        by_source = {source: self.smooth(f"tokens.{source}", RATIO_S) for source in SOURCES}
        ratios: list[float | None] = []
        for at in zip(*by_source.values(), strict=True):
            known = dict(zip(by_source, at, strict=True))
            total = None if None in at else sum(value or 0.0 for value in at)
            ratios.append(sum(known[tier] or 0.0 for tier in tiers) / total if total else None)
        return ratios

    def share(self, part: str, whole: str) -> list[float | None]:
        parts, wholes = self.column(part), self.column(whole)
        return [value / all_ if value is not None and all_ else None for value, all_ in zip(parts, wholes, strict=True)]


def mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known)


def newest(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values[-LEGEND_S:]) if value is not None), None)


def lines_of(tiers: Sequence[str], lanes: Sequence[str], shown: Shown) -> dict[str, Sequence[float | None]]:
    """The values of the lines of all charts that a server and a sidecar have, by the line's key."""
    sized = [tier for tier in tiers if tier != "remote"]
    lines: dict[str, Sequence[float | None]] = {
        f"tokens.{source}": shown.smooth(f"tokens.{source}", RATE_S) for source in [*tiers, "recomputed"]
    }
    lines |= {f"ratio.{tier}": shown.ratio([tier]) for tier in tiers} | {"ratio.all": shown.ratio(tiers)}
    lines |= {f"fill.{tier}": shown.share(f"tier.{tier}.bytes", f"tier.{tier}.capacity") for tier in sized}
    lines |= {f"age.{tier}": shown.column(f"tier.{tier}.age") for tier in sized}
    lines |= {f"lane.{lane}": shown.smooth(f"lane.{lane}.bytes", RATE_S) for lane in lanes}
    lines |= {name: shown.column(name) for name in ("memory.resident", "memory.host_tier")}
    return lines


def request_lines(shown: Shown) -> dict[str, Sequence[float | None]]:
    """The values of the lines of the charts that only a server has."""
    lines: dict[str, Sequence[float | None]] = {
        f"{name}.{share}": shown.column(f"{name}.{share}") for name in ("ttft", "token_gap") for share in SHARES
    }
    lines |= {f"requests.{state}": shown.column(f"requests.{state}") for state in ("running", "promoting", "waiting")}
    rates = ("tokens.generated", "http.4xx", "http.429", "http.5xx")
    return lines | {name: shown.smooth(name, RATE_S) for name in rates}


def charts_differ(said: Mapping[str, str], lines: Mapping[str, Sequence[float | None]]) -> list[str]:
    """What the legends say that is not the newest value, and lines of charts that are not shown but have values."""
    known = {key: text for key, text in said.items() if not key.startswith("what-if.")}
    faults = [f"{key}: a line that is not expected" for key in known if key not in lines]
    for key, values in lines.items():
        if key not in known:
            faults += [f"{key}: not shown, but there are values"] if any(values) else []
        elif not is_shown(known[key], newest(values)):
            faults.append(f"{key}: {known[key]} for {newest(values)}")
    return faults


def lanes_between(tiers: Sequence[str], lanes: Iterable[str]) -> list[str]:
    """The *lanes* whose lower tier is one of *tiers*."""
    named = {"store": "disk", "load": "disk", "put": "remote", "get": "remote"}  # a sidecar's

    def lower(lane: str) -> str:
        return named.get(lane) or next((tier for tier in ("remote", "disk") if tier in lane), "host")

    return [lane for lane in lanes if lower(lane) in tiers]


def legends(seen: Seen) -> dict[str, str]:
    """What stands beside each line of each chart that is shown."""
    script = """() => Object.fromEntries([...document.querySelectorAll('#cards .card:not([hidden]) [data-line]')]
      .map((each) => [each.dataset.line, each.textContent]))"""
    return dict(seen.page.evaluate(script))


def wrong(said: Mapping[str, str], expected: Mapping[str, float | None]) -> list[str]:
    return [f"{key}: {said[key]} for {value}" for key, value in expected.items() if not is_shown(said[key], value)]


@pytest.mark.parametrize("tiers", TIERS, ids="+".join)
def test_a_servers_numbers_are_those_of_stats_and_of_the_history(
    tiers: Sequence[str], browser: Browser, tmp_path: Path
) -> None:
    with serving(build("llama"), config_of(tiers, tmp_path)) as server:
        # Tokens that come before the first sample have no rate.
        come_true(lambda: "requests.running" in server.get("/dashboard/history?range=600").json()["columns"])
        for seed in (0, 1, 2, 3, 4, 5, 6, 0, 1, 6, 6):
            server.complete(prompt_of(seed, 300), max_tokens=2)
        for _ in range(NUM_ERRORS):
            assert server.get("/v1/no-such-route").status_code == 404
        with browser.open(f"{server.url}/dashboard") as seen:
            seen.wait_live()
            with load(server):
                seen.wait("() => document.querySelectorAll('#slowest tbody tr').length > 0")
                faults = [moment_differences(seen, server, tiers)]
                while faults[-1] and len(faults) < MOMENTS:
                    before = float(seen.page.locator("html").get_attribute("data-at") or 0.0)
                    seen.page.locator("#pause").click()
                    seen.wait(LATER, before)
                    faults.append(moment_differences(seen, server, tiers))
            assert faults[-1] == []

            seen.page.locator("#pause").click()
            come_true(server.is_at_rest)
            come_true(lambda: differences(seen, server.get("/v1/kvtier/stats").json(), tiers) == [], pause_s=0.2)
            assert seen.errors == []

        stats = server.get("/v1/kvtier/stats").json()
        used = {source for source in SOURCES if stats["tokens"][source]}
        assert {"recomputed"} < used <= {*tiers, "recomputed"}  # or the tile's ratio would be 0 or 1


def moment_differences(seen: Seen, server: ServerInThread, tiers: Sequence[str]) -> list[str]:
    """Pause the page, and return what its charts and tiles say that the history does not say of that moment."""
    seen.wait(COMING)
    at = seen.page.evaluate(PAUSE)
    said, tiles = legends(seen), tiles_of(seen)
    shown = Shown(server.get("/dashboard/history?range=600").json(), at)
    lanes = lanes_between(tiers, server.get("/v1/kvtier/stats").json()["cache"]["routes"])

    lines = lines_of(tiers, lanes, shown) | request_lines(shown)
    assert any(newest(lines[f"tokens.{source}"]) for source in [*tiers, "recomputed"])
    rates = {
        name: sum(newest(shown.column(f"tokens.{each}")) or 0.0 for each in names) for name, names in RATES.items()
    }
    of_tiles = [(title, tiles[title][0], rate) for title, rate in rates.items()]
    for title, name in (("Time to first token", "ttft"), ("Inter-token latency", "token_gap")):
        parts = re.fullmatch(r"p50 · p90 (.*) · p99 (.*)", tiles[title][1])
        assert parts is not None, tiles[title]
        texts = {"p50": tiles[title][0], "p90": parts[1], "p99": parts[2]}
        of_tiles += [(f"{title} {share}", text, newest(lines[f"{name}.{share}"])) for share, text in texts.items()]
    return charts_differ(said, lines) + [
        f"{title}: {text} for {value}" for title, text, value in of_tiles if not is_shown(text, value)
    ]


def tiles_of(seen: Seen) -> dict[str, tuple[str, str]]:
    """The value of each tile and what stands below, by title."""
    script = """() => [...document.querySelectorAll('#tiles .tile')].map((tile) =>
      ['h2', '.big', '.small'].map((part) => tile.querySelector(part).textContent))"""
    return {title: (value, about) for title, value, about in seen.page.evaluate(script)}


def differences(seen: Seen, stats: Mapping[str, Any], tiers: Sequence[str]) -> list[str]:
    """What the tiles and tables of a server at rest say that is not what /stats says."""
    tiles, said = tiles_of(seen), legends(seen)
    tokens = stats["tokens"]
    faults = hits_tile(tiles, tokens)
    http = stats["http"]
    errors = f"{http['num_5xx']:,} 5xx, {http['num_429']:,} 429, {http['num_4xx']:,} other 4xx"
    assert http["num_4xx"] == NUM_ERRORS
    expected_tiles = {
        "Requests": ("0", "running, 0 waiting, 0 loading"),
        "Prompt tokens": ("0/s", f"{sum(tokens[source] for source in SOURCES):,} since the start"),
        "Output tokens": ("0/s", f"{stats['requests']['served']['num_generated']:,} since the start"),
        "HTTP errors": (str(NUM_ERRORS), f"in this time range · since the start {errors}"),
    }
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    faults += [f"{title}: {tiles[title]}" for title, text in expected_tiles.items() if tiles[title] != text]
    states = seen.page.eval_on_selector_all("#health [data-state]", "(all) => all.map((each) => each.dataset.state)")
    counted = {state: states.count(state) for state in ("bad", "watch")}
    health = "OK"
    for state, text in (("watch", "warning" if counted["watch"] == 1 else "warnings"), ("bad", "bad")):
        health = f"{counted[state]} {text}" if counted[state] else health
    faults += [] if tiles["Health"][0] == health else [f"Health: {tiles['Health']}"]
    what_if = {f"what-if.{tier}": sizes["1"] for tier, sizes in stats["what_if"].items()}
    faults += wrong(said, {key: value for key, value in what_if.items() if key in said})
    return faults + table_differences(seen, stats["cache"]["tiers"], stats["cache"]["routes"], tokens["reasons"], tiers)


def hits_tile(tiles: Mapping[str, tuple[str, str]], tokens: Mapping[str, Any]) -> list[str]:
    """What the first tile says that is not what is found of all tokens. All of them came in the time that is shown."""
    total = sum(tokens[source] for source in SOURCES)
    found = total - tokens["recomputed"]
    value, about = tiles["Cache hit ratio"]
    parts = re.fullmatch(r"(\S+) of (\S+) tokens in this time range", about)
    is_right = parts is not None and is_shown(value, found / total)
    is_right = is_right and parts is not None and is_shown(parts[1], found) and is_shown(parts[2], total)
    return [] if is_right else [f"Cache hit ratio: {value}, {about}, for {found} of {total}"]


def table_differences(
    seen: Seen,
    tiers: Mapping[str, Any],
    routes: Mapping[str, Any],
    reasons: Mapping[str, int],
    expected_tiers: Sequence[str],
) -> list[str]:
    """What the tables of tiers, lanes and reasons say that is not what /stats says."""
    sized = [tier for tier in expected_tiers if tier != "remote"]
    exact = {f"lane.{lane}.bytes": routes[lane]["num_bytes"] for lane in lanes_between(expected_tiers, routes)}
    for tier in sized:
        found = tiers[tier]
        exact[f"tier.{tier}.bytes"] = found["num_bytes"]
        exact[f"tier.{tier}.capacity"] = found["capacity_bytes"]
        exact[f"tier.{tier}.evicted"] = sum(found["evicted"].values())
        exact[f"tier.{tier}.dropped"] = found["dropped_spills"]
        exact[f"tier.{tier}.corrupt"] = sum(found["corrupt"].values())
    faults = [name for name, value in exact.items() if seen.exact(name) != str(value)]
    rows = seen.page.locator("#tiers tbody tr > :first-child").all_inner_texts()
    faults += [] if rows == sized else [f"rows of tiers: {rows}"]
    named = {f"reason.{reason}": f"{tokens:,}" for reason, tokens in reasons.items() if tokens}
    return faults + [name for name, text in named.items() if seen.numbers(name) != text]


@pytest.mark.parametrize(
    "tiers", [("host",), ("host", "disk"), ("host", "remote"), ("host", "disk", "remote")], ids="+".join
)
def test_a_sidecars_numbers_are_those_of_stats_and_of_the_history(
    tiers: Sequence[str], browser: Browser, tmp_path: Path
) -> None:
    given = {"remote": {"url": f"file://{tmp_path / 'remote'}"}} if "remote" in tiers else {}
    with running_sidecar(small_config(tmp_path / "store" if "disk" in tiers else None, **given)) as running:
        balance = {"host": 512, "disk": 128, "remote": 64}
        reasons = {Reason.NEVER_SEEN: 90, Reason.EVICTED_FROM_HOST: 6}
        tokens = TokenBalance(**{tier: balance[tier] for tier in tiers}, recomputed=96, reasons=reasons)
        with browser.open(f"{running.url}/dashboard") as seen:
            seen.wait_live()
            layout = running.store(1, 6)
            running.endpoint.counted = ConnectorCounts("open", num_asked=8, num_promised=6, num_loaded=5, tokens=tokens)
            running.endpoint.attached = [AttachedClient("an engine", running.sidecar.now() - 60.0, layout)]
            seen.wait("() => document.querySelector('[data-line=\"ratio.all\"]').textContent !== '–'")
            at = seen.page.evaluate(PAUSE)
            said = legends(seen)
            shown = Shown(running.get("/dashboard/history?range=600").json(), at)
            lanes = lanes_between(tiers, running.get("/v1/kvtier/stats").json()["lanes"])

            lines = lines_of(tiers, lanes, shown)
            assert charts_differ(said, lines) == []
            assert (newest(lines["ratio.all"]), newest(lines["ratio.host"])) == (
                pytest.approx(1 - 96 / sum_of(tokens)),
                pytest.approx(512 / sum_of(tokens)),
            )

            seen.page.locator("#pause").click()
            come_true(lambda: sidecar_differences(seen, running, tokens, tiers) == [], pause_s=0.2)
            assert seen.errors == []


def sum_of(tokens: TokenBalance) -> int:
    return sum(getattr(tokens, source) for source in SOURCES)


def sidecar_differences(seen: Seen, running: RunningSidecar, tokens: TokenBalance, tiers: Sequence[str]) -> list[str]:
    """What the tiles and tables of a sidecar say that is not what /stats says."""
    stats, tiles = running.get("/v1/kvtier/stats").json(), tiles_of(seen)
    counted = {source: getattr(tokens, source) for source in SOURCES}
    faults = hits_tile(tiles, counted)
    endpoint = stats["endpoints"][0]
    faults += [] if tiles["Prompt tokens"] == ("0/s", f"{sum_of(tokens):,} since the start") else ["Prompt tokens"]
    faults += [] if tiles["Engines"] == ("1", "attached, 0 B pinned") else [f"Engines: {tiles['Engines']}"]
    found, about = tiles["Chunks found"]
    is_right = is_shown(found, endpoint["num_promised"] / endpoint["num_asked"]) and about == "of 8 looked up, 0 lost"
    faults += [] if is_right else [f"Chunks found: {found}, {about}"]
    resident = number_of(tiles["Memory"][0])
    is_near = resident is not None and abs(resident - stats["memory"]["resident_bytes"]) < 0.1 * resident
    faults += [] if is_near and tiles["Memory"][1].endswith(" of it host tier") else [f"Memory: {tiles['Memory']}"]
    return faults + table_differences(seen, stats["tiers"], stats["lanes"], tokens.reasons, tiers)
