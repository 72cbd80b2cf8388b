"""Is a hit on disk ever slower than computing it? Time is simulated; cache, scheduler, planner and store are real.

Mean time to first token of many prompts on a device that is busy most of the time, by the disk's speed: without a disk,
loading every hit from it, and loading what the planner decides. With --trace FILE (JSON lines: timestamp in ms,
input_length, hash_ids of blocks of 512 tokens) for its prompts too, stretched to what the device can compute.
"""

import json
import statistics
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from simulated_engine import BLOCK_BYTES, BLOCK_SIZE, TOKENS_EACH, WAYS, Arriving, Machine, SimulatedEngine, documents

from bench.report import Row, arguments, publish
from kvtier.tiers.lower import reads
from kvtier.tiers.up import uploads

SPEEDS = {"1 GB/s": 1e9, "3 GB/s": 3e9, "6 GB/s": 6e9, "50 GB/s": 50e9}
ROUNDING = 1.02  # the planner may be that much slower than the better way: it learns while it works


def traced(file: Path, num_prompts: int, machine: Machine) -> list[Arriving]:
    """The first *num_prompts* of a trace, with times stretched so that computing all takes as long as they arrive."""
    lines = list(islice(file.open(), num_prompts))
    rows = [json.loads(line) for line in lines]
    seconds = sum(
        row["input_length"] * (1 + row["input_length"] / 2 / machine.attention_depth) / machine.prefill_tokens_per_s
        for row in rows
    )
    stretch = seconds / max(1, rows[-1]["timestamp"] - rows[0]["timestamp"])
    prompts = []
    for row in rows:
        text = [block for block in row["hash_ids"] for _ in range(BLOCK_SIZE)]
        prompts.append(Arriving(row["timestamp"] * stretch, text[: max(1, row["input_length"] // TOKENS_EACH)]))
    return prompts


def rows_of(name: str, prompts: Sequence[Arriving], blocks: int) -> list[Row]:
    """Rows of the mean TTFT of each way, for each speed of the disk."""
    rows = []
    for speed, bytes_per_s in SPEEDS.items():
        means = {}
        for way, (load, with_disk) in WAYS.items():
            machine = Machine(disk_bytes_per_s=bytes_per_s, device_blocks=blocks, host_blocks=blocks)
            engine = SimulatedEngine(machine, load, with_disk)
            means[way] = statistics.mean(engine.answer(prompts))
            if way in ("no disk", "always"):
                rows.append(Row(f"{name}, {speed}: {way}", means[way], "s"))
        best = min(means["no disk"], means["always"])
        for way in ("cost", "split"):
            kept = means[way] <= best * ROUNDING
            rows.append(
                Row(f"{name}, {speed}: {way}", means[way], "s", f"<= {best:.3g} s, the better one", kept, varies=True)
            )
    return rows


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--trace", type=Path, help="a file of prompts in Mooncake's format")
    parser.add_argument("--prompts", type=int, default=1500, help="of the trace (1500)")
    options = parser.parse_args()
    uploads.BATCH_BYTES = reads.BATCH_BYTES = BLOCK_BYTES  # a block of 512 tokens is a batch: 64 MiB of the model
    num_documents = options.effort.of(300, quick=12)
    rows = rows_of("documents, one at a time", documents(num_documents, per_s=0.03), 256)
    rows += rows_of("documents, device idle half the time", documents(num_documents, per_s=0.3), 256)
    rows += rows_of("documents, device saturated", documents(num_documents, per_s=1.0), 256)
    if options.trace:
        rows += rows_of(options.trace.stem, traced(options.trace, options.prompts, Machine()), 1024)
    publish("load_or_recompute", rows, options.json)


if __name__ == "__main__":
    main()
