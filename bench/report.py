"""The report of a benchmark: one table, or with --json one object in the schema of DESIGN.md section 8."""

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
    """One figure. *target* is the promised value in words, *ok* whether it was kept; "" and None without a promise."""

    name: str
    value: float
    unit: str
    target: str = ""
    ok: bool | None = None


def arguments(question: str) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark; the *question* is its description."""
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser


def publish(bench: str, rows: Sequence[Row], as_json: bool) -> None:
    """Print *rows* as a table, or as JSON."""
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
    """The machine in a few words: its processor, and the version of Python."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    return f"{model}, Python {platform.python_version()}"


def commit() -> str:
    """The commit that is measured, with "-dirty" if tracked files other than bench/results/ have changed since."""
    name = _git("describe", "--always", "--exclude=*")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)bench/results")
    return f"{name}-dirty" if name and changed else name or "unknown"


def _git(*command: str) -> str:
    """What git says of the repository that this file is in; empty where there is none, or no git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *command], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip()
