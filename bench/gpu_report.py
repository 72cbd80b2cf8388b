"""What the benchmarks of a GPU share: their arguments, the machine they need, the file they write."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from report import Row, commit, machine, publish


def gpu_arguments(question: str) -> Namespace:
    """The arguments; ends the program with status 2 where there is no CUDA."""
    parser = ArgumentParser(description=question)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as one JSON object too")
    parser.add_argument("--quick", action="store_true", help="little and seldom: does it run? The figures mean nothing")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"{Path(sys.argv[0]).name}: needs a CUDA device, and torch sees none", file=sys.stderr)
        sys.exit(2)
    return options


def publish_gpu(bench: str, rows: Sequence[Row], file: Path | None) -> None:
    """Print the rows as a table, and write them to *file* in the schema of DESIGN.md section 8."""
    publish(bench, rows, as_json=False)
    print(f"on {torch.cuda.get_device_name()}, torch {torch.__version__}")
    if file is not None:
        where = f"{machine()}, {torch.cuda.get_device_name()}, torch {torch.__version__}"
        facts = {"bench": bench, "machine": where, "commit": commit(), "rows": [asdict(row) for row in rows]}
        file.write_text(json.dumps(facts, indent=1) + "\n")
