"""Tables, and the texts of their cells, that the views of servers and sidecars share."""

from collections.abc import Iterable

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text


def new_table(*columns: str) -> Table:
    """Return a table without rows. The first column is aligned to the left, the others to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="ellipsis", no_wrap=True)
    return table


def with_content(parts: Iterable[RenderableType]) -> list[RenderableType]:
    """Return *parts* without the tables that have no rows."""
    return [part for part in parts if not isinstance(part, Table) or part.row_count]


def plain(text: str) -> Text:
    """Return *text*, which a client chose, with "?" in place of control characters."""
    return Text("".join(letter if letter.isprintable() else "?" for letter in text))


def percent(part: float, whole: float) -> str:
    """Return *part* of *whole* as a percentage, or an empty text if *whole* is 0."""
    return f"{100 * part / whole:.1f}%" if whole else ""


def age(seconds: float) -> str:
    """Return a duration with its largest unit, or with hours and minutes."""
    minutes, _ = divmod(int(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d"
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"
