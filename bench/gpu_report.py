"""Arguments, machine and result file of the benchmarks of a GPU."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from bench.gpu_progress import failure, has_failed
from bench.report import Row, commit, machine, publish


def gpu_arguments(question: str) -> Namespace:
    """Parse the arguments; ends the program with status 2 where there is no CUDA device."""
    parser = ArgumentParser(description=question)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as one JSON object too")
    parser.add_argument("--quick", action="store_true", help="little and seldom: does it run? The figures mean nothing")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"{Path(sys.argv[0]).name}: needs a CUDA device, and torch sees none", file=sys.stderr)
        sys.exit(2)
    return options


def measure(bench: str, parts: Mapping[str, Callable[[], list[Row]]], file: Path | None) -> list[Row]:
    """Measure all parts, writing the rows after each. A part that fails gives a row that says so."""
    rows: list[Row] = []
    for name, part in parts.items():
        try:
            rows += part()
        except Exception as error:
            rows.append(failure(name, error))
        if file is not None:
            write_gpu(bench, rows, file)
    return rows


def write_gpu(bench: str, rows: Sequence[Row], file: Path) -> None:
    """Write the rows to *file* in the schema of DESIGN.md section 8."""
    facts = {"bench": bench, "machine": f"{machine()}, {_gpu()}", "commit": commit(), "rows": [asdict(r) for r in rows]}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(facts, indent=1) + "\n")


def publish_gpu(bench: str, rows: Sequence[Row]) -> None:
    """Print the rows as a table; ends the program with status 1 if a part failed."""
    publish(bench, rows, as_json=False)
    print(f"on {_gpu()}")
    if has_failed(rows):
        sys.exit(1)


def _gpu() -> str:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{name}, torch {torch.__version__}"
