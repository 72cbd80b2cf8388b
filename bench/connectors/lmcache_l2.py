"""How fast is our store below LMCache, beside LMCache's own stores on disk, by the functions of `lmcache bench l2`?"""

import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from foreign.lmcache_server import our_l2
from foreign.told_script import environment

from bench.report import Effort, Row
from bench.rounds import at_least, at_most

MEASURE = Path(__file__).parents[2] / "tests" / "support" / "foreign" / "lmcache_l2_measure.py"
ROUND_BYTES = 32 << 20  # of 32 keys
OURS = "kvtier"
Seconds = Mapping[str, Mapping[str, Sequence[float]]]  # by adapter and by what was done


def l2_rows(effort: Effort, python: str, folder: Path) -> list[Row]:
    """Ours, which verifies every load, in turns with `fs` and `fs_native`, which do not; medians of rounds, and of
    ratios within them. First below memory that is shared, as LMCache's server has it on a CPU by itself; then below
    memory that is not, as `lmcache bench l2` has it: there our store's process cannot read into it."""
    rows: list[Row] = []
    for memory in ("shared", "private"):
        took = _measured(python, folder / memory, memory, effort.of(9, quick=2))
        rows += _rows(f"{memory} memory", took)
    return rows


def _measured(python: str, folder: Path, memory: str, num_rounds: int) -> Seconds:
    specs = {name: json.dumps({"type": name, "base_path": str(folder / name)}) for name in ("fs", "fs_native")}
    specs[OURS] = our_l2(folder / OURS, "4GiB")
    command = [python, str(MEASURE), str(num_rounds), memory, *(f"{name}={spec}" for name, spec in specs.items())]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment(knows_kvtier=True))
    took: Seconds = json.loads(done.stdout.splitlines()[-1])
    return took


def _rows(where: str, took: Seconds) -> list[Row]:
    rows: list[Row] = []
    for what in took[OURS]:
        for name, seconds in took.items():
            median = statistics.median(seconds[what])
            label = f"{where}, {what}: {name}"
            moves = what.startswith(("store", "load"))
            rows.append(Row(label, ROUND_BYTES / median / 1e9, "GB/s") if moves else Row(label, 1e3 * median, "ms"))
    for load in ("load", "load again"):
        rows.append(at_least(f"{where}, {load}: speed of fs's", _times_faster(took, "fs", load), 3))
        rows.append(at_least(f"{where}, {load}: speed of fs_native's", _times_faster(took, "fs_native", load), 0.8))
    for kind in ("hits", "misses"):
        time = 1 / _times_faster(took, "fs_native", f"lookup of {kind}")
        rows.append(at_most(f"{where}, lookup of 32 {kind}: time of fs_native's", time, "", 2))
    return rows


def _times_faster(took: Seconds, other: str, what: str) -> float:
    """Median over the rounds of the other's seconds over ours."""
    pairs = zip(took[other][what], took[OURS][what], strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)
