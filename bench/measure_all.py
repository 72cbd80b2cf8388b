"""Measures every result anew and writes `bench/results/`: `make results`, at a clean commit.

A result that was measured on this machine is kept if only results, tests and pages have changed since its commit: a run
that was interrupted goes on, and what it has measured so far can be committed meanwhile. Results whose needs are not
here are left as they are, and named. With --quick each benchmark runs for seconds, nothing is written, and the rows are
compared with the committed result: the same names, the same promises, and those kept that no machine may break.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.catalogue import RESULTS, ROOT, Result
from bench.report import DIRTY, FOLDER, commit, is_measured_here, machine

_TRACES = "mooncake"
_NUMBER = re.compile(r"\d[\d,.]*(?: [KMG]iB)?")
_Content = Mapping[str, Any]


def main() -> int:
    """Measure; return 1 if a benchmark failed, or its quick run differs from the committed result."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [result.name for result in RESULTS]
    parser.add_argument("names", nargs="*", metavar="RESULT", help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--quick", action="store_true", help="run for seconds, write nothing, and compare the rows")
    parser.add_argument(
        "--trace", type=Path, help="a file of prompts in Mooncake's format, for results that have its rows"
    )
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(names)):
        parser.error(f"no result {', '.join(unknown)}; use {', '.join(names)}")
    if options.trace is not None and not options.trace.is_file():
        parser.error(f"--trace {options.trace}: there is no such file")
    if not options.quick and DIRTY in commit():
        parser.error(f"the tree is {commit()}: commit its changes, or measure in a clean clone")
    asked = [result for result in RESULTS if not options.names or result.name in options.names]
    failed = [
        result.name for result in asked if not (_compare(result) if options.quick else _measure(result, options.trace))
    ]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return min(len(failed), 1)


def run(result: Result, arguments: Sequence[str], environment: Mapping[str, str]) -> _Content | None:
    """Run the benchmark; return what it prints as JSON, None if it failed."""
    command = [sys.executable, "-m", result.module, *arguments, "--json"]
    print(f"{result.name}: begins at {time.strftime('%H:%M:%S')}", flush=True)
    began_at = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    print(f"{result.name}: took {time.monotonic() - began_at:.0f} s", flush=True)
    if done.returncode:
        print(f"{result.name}: {' '.join(command)} ended with {done.returncode}", flush=True)
        return None
    content: _Content = json.loads(done.stdout)
    return content


def differences(quick: _Content, committed: _Content, is_sampled: bool) -> list[str]:
    """Return what a *quick* run lacks of the *committed* result: rows, promises, and promises that are kept.

    Names are compared without their numbers and units of bytes, as sizes are smaller in a quick run. Rows of traces
    are there with --trace only, and not compared; those that a run lacks are not told of if *is_sampled*.
    """
    names, known = ({_numberless(row) for row in _rows(content)} for content in (quick, committed))
    promises, known_promises = (
        {_numberless(row) for row in _rows(content) if row["ok"] is not None} for content in (quick, committed)
    )
    told = {
        "no longer has": [] if is_sampled else sorted(known - names),
        "newly has": sorted(names - known),
        "promises nothing for": sorted((known_promises & names) - promises),
    }
    return [f"{what} {'; '.join(rows)}" for what, rows in told.items() if rows]


def broken(quick: _Content) -> list[str]:
    """Return the promises of a *quick* run that are broken although they vary with no machine and size."""
    return [
        f"breaks {row['name']}: {row['value']:g} {row['unit']}, promised {row['target']}"
        for row in _rows(quick)
        if row["ok"] is False and not row["varies"]
    ]


def _rows(content: _Content) -> list[Mapping[str, Any]]:
    return [row for row in content["rows"] if not row["name"].startswith(_TRACES)]


def _numberless(row: Mapping[str, Any]) -> str:
    return _NUMBER.sub("N", row["name"])


def _committed(result: Result) -> _Content | None:
    file = FOLDER / f"{result.name}.json"
    if not file.exists():
        return None
    content: _Content = json.loads(file.read_text())
    return content


def _is_here(result: Result) -> bool:
    for need in result.missing:
        print(f"{result.name}: left out, needs {need}", flush=True)
    return not result.missing


def _measure(result: Result, trace: Path | None) -> bool:
    old = _committed(result)
    if old is not None and old["machine"] == machine() and is_measured_here(old["commit"]):
        print(f"{result.name}: measured at {old['commit']} already", flush=True)
        return True
    if not _is_here(result):
        return True
    traced = ["--trace", str(trace.absolute())] if trace is not None and result.reads_trace else []
    content = run(result, [*result.arguments, *traced], os.environ)
    if content is None:
        return False
    if DIRTY in content["commit"]:
        print(f"{result.name}: not written, as files were changed while it ran", flush=True)
        return False
    file = FOLDER / f"{result.name}.json"
    unwritten = file.with_suffix(".new")
    unwritten.write_text(json.dumps(content, indent=1) + "\n")
    unwritten.rename(file)
    for row in content["rows"]:
        if row["ok"] is False:
            print(f"{result.name}: missed {row['name']}: {row['value']:g} {row['unit']}", flush=True)
    return True


def _compare(result: Result) -> bool:
    if not _is_here(result):
        return True
    # One thread: those of other benchmarks run beside this one, and threads that wait for each other take seconds.
    content = run(result, [*result.arguments, "--quick"], {**os.environ, "OMP_NUM_THREADS": "1"})
    if content is None:
        return False
    committed = _committed(result)
    told = broken(content)
    if committed is not None:
        told += differences(content, committed, result.is_sampled)
    for each in told:
        print(f"{result.name}: {each}", flush=True)
    return not told


if __name__ == "__main__":
    sys.exit(main())
