"""What Grafana does with a panel's query before it asks Prometheus, and what it then has to show."""

import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_server import SCRAPE_S, Prometheus
from waiting import wait_for

# Grafana's own: four times the scrape interval, or one more than the step between two points.
RATE_INTERVAL_S = max(4 * SCRAPE_S, SCRAPE_S + SCRAPE_S)


Panel = Mapping[str, Any]


def open_panels(board: Mapping[str, Any]) -> list[Panel]:
    """The panels of a board that are shown when it is opened."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def all_panels(board: Mapping[str, Any]) -> list[Panel]:
    """The panels of a board, with those in its collapsed rows."""
    return open_panels(board) + [panel for row in board["panels"] for panel in row.get("panels", [])]


@dataclass(frozen=True)
class Grafana:
    """Asks a Prometheus for the time since it began. *variables* are a board's own, with what is chosen; those that
    *are_of* a series have all values that their label has there, which is what "All" is."""

    prometheus: Prometheus
    are_of: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    def asked(self, expression: str) -> str:
        """The expression with each `$variable` and `${variable}` replaced."""
        range_s = max(1, round(time.time() - self.prometheus.began_at))
        own = {"__rate_interval": f"{RATE_INTERVAL_S}s", "__range": f"{range_s}s", "__interval": f"{SCRAPE_S}s"}

        def value(found: re.Match[str]) -> str:
            name = found[1] or found[2]
            return {**own, **self.variables}.get(name) or self._all(name)

        return re.sub(r"\$\{(\w+)\}|\$(\w+)", value, expression)

    def is_shown(self, expression: str) -> bool:
        """Whether there is anything to draw: a number at any moment."""
        series = self.prometheus.over_time(self.asked(expression), self.prometheus.began_at, time.time())
        return any(not math.isnan(value) for each in series for value in each.values)

    def shows_all(self, expressions: Iterable[str]) -> None:
        """Wait until each is shown; AssertionError with those that are not."""
        left = list(dict.fromkeys(expressions))

        def is_all_shown() -> bool:
            left[:] = [expression for expression in left if not self.is_shown(expression)]
            return not left

        try:
            wait_for(is_all_shown, pause_s=SCRAPE_S / 2)
        except AssertionError:
            raise AssertionError(f"{len(left)} queries return nothing: {left}") from None

    def _all(self, name: str) -> str:
        values = [re.escape(each).replace("\\", "\\\\") for each in self.prometheus.values_of(name, self.are_of)]
        assert values, f"no {self.are_of} has a label {name}"
        return values[0] if len(values) == 1 else f"({'|'.join(values)})"
