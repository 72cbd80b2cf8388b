"""Measures every result anew and writes `bench/results/`: `make results`, at a clean commit.

A result that was measured at this commit on this machine is kept, so that a run that was interrupted goes on. Results
whose needs are not here are left as they are, and named. With --quick each benchmark that has a quick form runs in it,
nothing is written, and the rows are compared with the committed result: the same names, and the same promises kept.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.catalogue import RESULTS, ROOT, Result
from bench.report import DIRTY, FOLDER, commit, machine

_TRACES = "mooncake"
_Content = Mapping[str, Any]


def main() -> int:
    """Measure; 1 if a benchmark failed, or its quick form differs from the committed result."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [result.name for result in RESULTS]
    parser.add_argument("names", nargs="*", metavar="RESULT", help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--quick", action="store_true", help="run the quick forms, and compare their rows")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(names)):
        parser.error(f"no result {', '.join(unknown)}; use {', '.join(names)}")
    if not options.quick and DIRTY in commit():
        parser.error(f"the tree is {commit()}: commit its changes, or measure in a clean clone")
    asked = [result for result in RESULTS if not options.names or result.name in options.names]
    failed = [result.name for result in asked if not (_compare(result) if options.quick else _measure(result))]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return min(len(failed), 1)


def run(result: Result, arguments: Sequence[str]) -> _Content | None:
    """Run the benchmark; what it prints as JSON, None if it failed."""
    command = [sys.executable, "-m", result.module, *arguments, "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(f"{result.name}: {' '.join(command)} ended with {done.returncode}", flush=True)
        return None
    content: _Content = json.loads(done.stdout)
    return content


def differences(quick: _Content, committed: _Content) -> list[str]:
    """What the rows of a *quick* run have other than the *committed* result: names, and promises that were kept.

    Rows of traces are there with --trace only, and not compared.
    """
    names = [
        [row["name"] for row in content["rows"] if not row["name"].startswith(_TRACES)]
        for content in (quick, committed)
    ]
    gone, new = sorted(set(names[1]) - set(names[0])), sorted(set(names[0]) - set(names[1]))
    promised = {row["name"] for row in committed["rows"] if row["ok"] is not None}
    unpromised = sorted(row["name"] for row in quick["rows"] if row["ok"] is None and row["name"] in promised)
    told = {"no longer has": gone, "newly has": new, "promises nothing for": unpromised}
    return [f"{what} {', '.join(rows)}" for what, rows in told.items() if rows]


def _file(result: Result) -> Path:
    return FOLDER / f"{result.name}.json"


def _is_here(result: Result) -> bool:
    for need in result.missing:
        print(f"{result.name}: left out, needs {need}", flush=True)
    return not result.missing


def _measure(result: Result) -> bool:
    file = _file(result)
    old = json.loads(file.read_text()) if file.exists() else {}
    if (old.get("commit"), old.get("machine")) == (commit(), machine()):
        print(f"{result.name}: measured at {commit()} already", flush=True)
        return True
    if not _is_here(result):
        return True
    began_at = time.monotonic()
    content = run(result, result.arguments)
    took = f"{time.monotonic() - began_at:.0f} s"
    if content is None:
        return False
    if DIRTY in content["commit"]:
        print(f"{result.name}: not written, as files were changed while it ran", flush=True)
        return False
    unwritten = file.with_suffix(".new")
    unwritten.write_text(json.dumps(content, indent=1) + "\n")
    unwritten.rename(file)
    missed = [row["name"] for row in content["rows"] if row["ok"] is False]
    print(f"{result.name}: {took}{f'; missed: {missed}' if missed else ''}", flush=True)
    return True


def _compare(result: Result) -> bool:
    if result.quick is None:
        print(f"{result.name}: has no quick form", flush=True)
        return True
    if not _is_here(result):
        return True
    began_at = time.monotonic()
    content = run(result, result.quick)
    if content is None:
        return False
    file = _file(result)
    told = differences(content, json.loads(file.read_text())) if file.exists() else []
    print(f"{result.name}: {time.monotonic() - began_at:.0f} s{''.join(f'; {each}' for each in told)}", flush=True)
    return not told


if __name__ == "__main__":
    sys.exit(main())
