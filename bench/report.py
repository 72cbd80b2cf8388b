"""What every benchmark prints: one table, or with --json one object in the schema of DESIGN.md section 8."""

import argparse
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One figure. *target* is what was promised, as a person would write it; *ok* whether it was kept, None without."""

    name: str
    value: float
    unit: str
    target: str = ""
    ok: bool | None = None


def arguments(question: str) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes; the *question* is its first line."""
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser


def publish(bench: str, rows: Sequence[Row], as_json: bool) -> None:
    """Print the rows."""
    if as_json:
        facts = {"bench": bench, "machine": machine(), "commit": commit()}
        print(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1))
        return
    table = Table(title=f"{bench} ({machine()}, {commit()})", box=box.SIMPLE_HEAD)
    for heading in ("figure", "value", "unit", "target", ""):
        table.add_column(heading, justify="right" if heading == "value" else "left", no_wrap=True)
    for row in rows:
        kept = {True: "kept", False: "MISSED", None: ""}[row.ok]
        table.add_row(row.name, f"{row.value:,.4g}", row.unit, row.target, kept)
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(table)


def machine() -> str:
    """Processor and operating system in a few words."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    return f"{model}, Python {platform.python_version()}"


def commit() -> str:
    """The commit that is measured; with a mark if the tree has changes besides results."""
    folder = Path(__file__).parent
    describe = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(describe, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
