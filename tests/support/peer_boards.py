"""The boards of others, by panel and query, as they are in `boards/` beside the tests of metrics."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "engine" / "observability" / "metrics" / "boards"


@dataclass(frozen=True)
class Query:
    """A query as its board has it. *not_served*: why kvtier has no answer; *only* "engine": a sidecar has none."""

    expr: str
    not_served: str = ""
    only: str = ""


@dataclass(frozen=True)
class Panel:
    """A panel under its row's title."""

    row: str | None
    title: str
    queries: Sequence[Query]

    def served(self, by: str) -> list[Query]:
        """What an "engine" or a "sidecar" has an answer to."""
        return [query for query in self.queries if not query.not_served and query.only in ("", by)]

    def how_far(self, by: str) -> str:
        """How much of it is served, in a word."""
        return {0: "no", len(self.queries): "yes"}.get(len(self.served(by)), "in part")


@dataclass(frozen=True)
class Board:
    """A board in another project's repository, at one commit."""

    title: str
    repository: str
    path: str
    commit: str
    panels: Sequence[Panel]

    @property
    def url(self) -> str:
        """Where people read it."""
        return f"https://github.com/{self.repository}/blob/{self.commit}/{self.path}"


def _board(path: Path) -> Board:
    found = json.loads(path.read_text())
    panels = [
        Panel(each["row"], each["title"], [Query(**query) for query in each["queries"]]) for each in found.pop("panels")
    ]
    return Board(panels=panels, **found)


BOARDS = {path.stem: _board(path) for path in sorted(FOLDER.glob("*.json"))}
