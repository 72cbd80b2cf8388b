"""How much sooner does a question's first token come if its document is in a tier? Runs the demo several times."""

import json
import statistics
import subprocess
import sys

from bench.report import Row, arguments, publish

TARGETS = {"device": 20, "host": 15, "disk": 8, "restart": 8}  # at most 1/N of the cold TTFT


def main() -> None:
    """Run `kvtier demo --json`, each time in new processes on a new store; gives medians of the ratios in a run."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--runs", type=int, help="how often (5)")
    options = parser.parse_args()
    runs, shorter = [], options.effort.of((), quick=("--tokens", "1500"))
    for _ in range(options.runs or options.effort.of(5, quick=1)):
        command = [sys.executable, "-m", "kvtier.cli.main", "demo", "--json", *shorter]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        runs.append({step["name"]: step for step in json.loads(done.stdout)["steps"]})
    rows = []
    for name, at_least in TARGETS.items():
        times_faster = [run["cold"]["ttft_s"] / run[name]["ttft_s"] for run in runs]
        median = statistics.median(times_faster)
        rows.append(
            Row(f"cold TTFT / {name} TTFT, median", median, "x", f">= {at_least}", median >= at_least, varies=True)
        )
        rows.append(Row("  least of all runs", min(times_faster), "x"))
        rows.append(Row(f"  {name} TTFT", 1000 * statistics.median(run[name]["ttft_s"] for run in runs), "ms"))
    rows.append(Row("cold TTFT", 1000 * statistics.median(run["cold"]["ttft_s"] for run in runs), "ms"))
    steps = [step for run in runs for step in run.values()]
    right = sum(step["answers_correct"] for step in steps) / sum(step["questions"] for step in steps)
    rows.append(Row("right answers, the corrupt block's included", 100 * right, "%", "100 %", right == 1))
    found = sum(run["corrupt"]["corrupt_blocks"] for run in runs)
    rows.append(Row("flipped bytes reported", found / len(runs), "a run", "1", found == len(runs)))
    publish("demo_ttft", rows, options.json)


if __name__ == "__main__":
    main()
