"""How long is a decode step of 32 requests on a CPU: now, before keys were read where they are, and in transformers?

The sides are processes that take turns, so that each has its own kvtier; what counts is their processor time, which
other programs lengthen less than the clock's. "Before" is the commit --before, checked out beside this one meanwhile.
transformers has the same model and lengths as one batch, padded on the left, with its static cache.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.report import Row, arguments, publish
from bench.rounds import at_most, ratio_of

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("decoding_worker.py")
MAX = 0.6  # of the time before
NOW, BEFORE, PLAIN = "kvtier", "kvtier before", "transformers, static cache"


@dataclass(frozen=True)
class Case:
    """Requests of *shortest* to *longest* tokens."""

    num_requests: int
    shortest: int
    longest: int
    is_promised: bool

    @property
    def lengths(self) -> list[int]:
        """The tokens of each request, spread evenly."""
        step = (self.longest - self.shortest) / (self.num_requests - 1)
        return [round(self.shortest + step * i) for i in range(self.num_requests)]


CASES = (Case(32, 256, 1024, is_promised=True), Case(32, 128, 128, is_promised=False))
QUICK_CASES = (Case(2, 16, 32, is_promised=True),)  # each case takes the starts of three processes


class Worker:
    """One side: a process that computes steps when it is told to."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def step_ms(self, num_steps: int) -> float:
        """Milliseconds of processor time of a step. RuntimeError if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{num_steps}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} has ended; what it said is above")
        return 1000 * float(line)


@contextmanager
def worker(side: str, tree: Path, lengths: Sequence[int], num_threads: int) -> Iterator[Worker]:
    """Run a side with the kvtier of *tree*."""
    command = [sys.executable, str(WORKER), side, str(num_threads), json.dumps(list(lengths))]
    environment = {**os.environ, "PYTHONPATH": str(tree), "GOMP_SPINCOUNT": "1000"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield Worker(process)
        assert process.stdin is not None
        process.stdin.close()


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """The files of *commit*, in a folder that goes afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvtier-before-") as folder:
        files = subprocess.run(["git", "-C", str(ROOT), "archive", commit], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=files, check=True)
        yield Path(folder)


def rows_of(case: Case, before: Path, num_rounds: int, num_steps: int, num_threads: int) -> list[Row]:
    """Rows of one case: each side's step, and ratios of turns that follow each other."""
    with ExitStack() as ends:
        sides = {
            name: ends.enter_context(worker(side, tree, case.lengths, num_threads))
            for name, side, tree in (
                (NOW, "kvtier", ROOT),
                (BEFORE, "kvtier", before),
                (PLAIN, "transformers", ROOT),
            )
        }
        rounds = [{name: side.step_ms(num_steps) for name, side in sides.items()} for _ in range(1 + num_rounds)]
    times = {name: [one[name] for one in rounds[1:]] for name in sides}  # the first round warms up
    prefix = f"{case.num_requests} requests of {case.shortest} to {case.longest} tokens"
    rows = [Row(f"{prefix}: {name}", statistics.median(took), "ms a step") for name, took in times.items()]
    ratio = ratio_of(times[NOW], times[BEFORE])
    name = f"{prefix}: {NOW} / before"
    rows.append(at_most(name, ratio, "", MAX) if case.is_promised else Row(name, ratio, ""))
    return [*rows, Row(f"{prefix}: {NOW} / transformers", ratio_of(times[NOW], times[PLAIN]), "")]


def main() -> None:
    """Measure both cases."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, help="turns of each side (7)")
    parser.add_argument("--steps", type=int, help="of each turn (3)")
    parser.add_argument("--threads", type=int, default=1, help="of each side (1)")
    parser.add_argument("--before", default="fda9f4a", metavar="COMMIT", help="what is compared (fda9f4a)")
    options = parser.parse_args()
    with checked_out(options.before) as before:
        num_rounds, num_steps = (
            options.rounds or options.effort.of(7, quick=1),
            options.steps or options.effort.of(3, quick=1),
        )
        cases = options.effort.of(CASES, quick=QUICK_CASES)
        rows = [row for case in cases for row in rows_of(case, before, num_rounds, num_steps, options.threads)]
    publish("decoding", rows, options.json)


if __name__ == "__main__":
    main()
