"""The report of a benchmark: one table, or with --json one object in the schema of DESIGN.md section 8."""

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

from rich import box
from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).parent / "results"
DIRTY = "-dirty"
# Instructions that decide which code runs, where the processor has them.
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sha_ni", "vaes", "sve")


_Size = TypeVar("_Size")


@dataclass(frozen=True)
class Row:
    """A figure of a benchmark. *target* is the promised value in words, "" without a promise; *ok* is whether the
    promise was kept, None without one.

    Args:
        varies: Whether the figure varies with the machine's speed or with how much is measured. A quick run need not
            keep the promise of such a figure; it keeps every other promise.
    """

    name: str
    value: float
    unit: str
    target: str = ""
    ok: bool | None = None
    varies: bool = False


class Effort(Enum):
    """The amount of work of a benchmark: that of a measurement, or with --quick a few seconds of it."""

    FULL = "full"
    QUICK = "quick"

    def of(self, full: _Size, quick: _Size) -> _Size:
        """Return the size to use: *full* in a measurement, *quick* in a quick run."""
        return full if self is Effort.FULL else quick


def arguments(question: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark; the *question* is its description.

    The parsed options have `json`, and `effort`, an `Effort`.
    """
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument(
        "--quick",
        dest="effort",
        action="store_const",
        const=Effort.QUICK,
        default=Effort.FULL,
        help="run for seconds, to show that the benchmark works; its figures mean nothing",
    )
    return parser


def publish(bench: str, rows: Sequence[Row], as_json: bool) -> None:
    """Print *rows* as a table, or as JSON.

    Raises:
        SystemExit: The JSON would become a result of this repository, and the tree is dirty: nobody could say what was
            measured.
    """
    if as_json:
        if DIRTY in commit() and _becomes_a_result():
            raise SystemExit(f"{bench}: not written, the tree is {commit()}; commit its changes, or use make results")
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
    """The machine in a few words: its processor, cores and instructions, and the version of Python."""
    facts = dict(_cpu_facts())
    model = facts.get("model name", platform.machine())
    found = facts.get("flags", facts.get("Features", "")).split()
    flags = " ".join(flag for flag in _FLAGS if flag in found) or "no vector flags"
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {flags}, Python {platform.python_version()}"


def _cpu_facts(file: Path = Path("/proc/cpuinfo")) -> Iterator[tuple[str, str]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return ((name.strip(), value.strip()) for name, _, value in (line.partition(":") for line in lines))


def _becomes_a_result() -> bool:
    """Whether what is printed goes to a file in the folder of results."""
    target = Path("/proc/self/fd/1")
    return target.exists() and target.resolve().is_relative_to(FOLDER.resolve())


def is_measured_here(measured: str) -> bool:
    """Return whether the tree's files that decide a result are those of the commit *measured*.

    A commit that adds results, tests or pages only leaves the results that were measured before it valid.
    """
    if not measured or DIRTY in commit():
        return False
    known = _git("rev-parse", "--verify", "--quiet", f"{measured}^{{commit}}")
    return bool(known) and not any(
        map(_decides, _git("diff", "--name-only", "--no-renames", known, "HEAD", "--", ":/").splitlines())
    )


def _decides(path: str) -> bool:
    """Return whether the file at *path*, relative to the repository, can change what a benchmark measures."""
    if path.startswith(("tests/support/", "tests/torture/")):  # benchmarks import these
        return True
    return not path.startswith(("bench/results/", "docs/", "tests/")) and not path.endswith(".md")


def commit() -> str:
    """The commit that is measured, with "-dirty" if tracked files other than bench/results/ have changed since."""
    name = _git("describe", "--always", "--exclude=*")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)bench/results")
    return f"{name}{DIRTY}" if name and changed else name or "unknown"


def _git(*command: str) -> str:
    """What git says of the repository that this file is in; empty where there is none, or no git."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *command], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip()
