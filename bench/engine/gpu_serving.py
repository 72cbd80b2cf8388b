"""What do the tiers give, and cost, with a model of Llama-3.1-8B's shape on a GPU?

TTFT cold and from each tier by length (b), decoding while blocks are spilled (c), prompts without a hit (d), and
whether every promoted block has the bytes that were computed (e). Random weights. Six and a half minutes at most.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import PreTrainedModel

from bench.engine.gpu_decoding import decoding_speed
from bench.engine.gpu_misses import cost_of_misses
from bench.engine.gpu_shapes import SHAPES, weights_read_once
from bench.engine.gpu_ttft import ttft_by_tier
from bench.gpu_plots import plot
from bench.gpu_progress import Clock, failure, has_failed
from bench.report import Row, commit, machine, publish

BENCH = "gpu_serving"
PARTS = "b,c,d,e"
SHARES = {"b": 0.55, "c": 0.25, "d": 0.20}  # of the time; later parts get what a part leaves over
SECONDS = 390.0


def parse(arguments: Sequence[str] | None = None) -> Namespace:
    """Parse the arguments; ends the program where they cannot work."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b", help="tiny runs on a CPU, and means nothing")
    parser.add_argument("--parts", default=PARTS, help=f"which of them ({PARTS})")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"time for all of them ({SECONDS:g})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as one JSON object too")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw them there")
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - {*SHARES, "e"}:
        parser.error(f"--parts {','.join(sorted(unknown))}: there are {PARTS}")
    if "e" in options.parts and "b" not in options.parts:
        parser.error("--parts e is found out while b runs: ask for both")
    if options.shape != "tiny" and not torch.cuda.is_available():
        print(f"{BENCH}: needs a CUDA device, and torch sees none; --shape tiny runs without", file=sys.stderr)
        sys.exit(2)
    return options


def measure(options: Namespace, clock: Clock) -> list[Row]:
    """Measure all parts that were asked for, writing the rows after each.

    A part that fails gives a row that says so, and the next one is measured all the same: time on a GPU is short.
    """
    shape, device = SHAPES[options.shape], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = shape.build(device)
    clock.note(f"{shape.name} on {device}, {shape.token_bytes:,} bytes of keys and values a token")
    works: dict[str, Callable[[PreTrainedModel, Clock], list[Row]]] = {
        "b": lambda model, clock: ttft_by_tier(model, shape, clock, "e" in options.parts),
        "c": lambda model, clock: decoding_speed(model, shape, clock),
        "d": lambda model, clock: cost_of_misses(model, shape, clock),
    }
    rows: list[Row] = []
    chosen = [part for part in works if part in options.parts]
    for i, part in enumerate(chosen):
        share = SHARES[part] / sum(SHARES[other] for other in chosen[i:])
        clock.note(f"part {part}")
        try:
            rows += works[part](model, clock.part(share))
        except Exception as error:
            rows.append(failure(f"part {part}", error))
        rows.append(Row(f"time after part {part}", clock.elapsed, "s"))
        if options.json is not None:
            write(rows, options.json)
    return rows


def write(rows: Sequence[Row], file: Path) -> None:
    """Write the rows to *file* in the schema of DESIGN.md section 8."""
    facts = {"bench": BENCH, "machine": where(), "commit": commit(), "rows": [asdict(row) for row in rows]}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(facts, indent=1) + "\n")


def where() -> str:
    """The machine in a few words, with its GPU if it has one."""
    gpu = [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    return ", ".join([machine(), *gpu, f"torch {torch.__version__}"])


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    with weights_read_once():
        rows = measure(options, Clock.of(options.seconds))
    publish(BENCH, rows, as_json=False)
    print(f"on {where()}")
    if options.plots is not None:
        plot([asdict(row) for row in rows], options.plots)
    if has_failed(rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
