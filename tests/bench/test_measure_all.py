"""A quick run is compared with the committed result: by rows, by promises, and by the promises that it has to keep."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPARE = """import json, sys; from bench.measure_all import broken, differences
quick, committed = ({"rows": rows} for rows in json.loads(sys.argv[1]))
print(json.dumps(broken(quick) + differences(quick, committed, is_sampled=sys.argv[2] == "True")))
"""


def row(name: str, ok: bool | None = None, **others: Any) -> dict[str, Any]:
    return {"name": name, "value": 1.0, "unit": "", "target": "" if ok is None else "0", "ok": ok, **others}


def quick_row(name: str, ok: bool | None = None, varies: bool = False) -> dict[str, Any]:
    return row(name, ok, varies=varies)


def told(quick: list[dict[str, Any]], committed: list[dict[str, Any]], is_sampled: bool = False) -> list[str]:
    command = [sys.executable, "-c", COMPARE, json.dumps([quick, committed]), str(is_sampled)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines: list[str] = json.loads(done.stdout)
    return lines


@pytest.mark.parametrize(
    ("quick", "committed"),
    [
        (quick_row("wrong bytes", ok=True), row("wrong bytes", ok=True)),
        (quick_row("slots: 4 KiB, 2 times", ok=True), row("slots: 1 MiB, 1,024 times", ok=True)),
        (quick_row("TTFT", ok=False, varies=True), row("TTFT", ok=True)),
        (quick_row("TTFT", ok=True), row("TTFT", ok=False)),
        (quick_row("TTFT", ok=True), row("TTFT")),
    ],
    ids=["equal", "other sizes", "a timed promise is broken", "a promise is kept again", "a new promise"],
)
def test_nothing_is_said_of_a_run_that_is_as_good(quick: dict[str, Any], committed: dict[str, Any]) -> None:
    assert told([quick], [committed]) == []


@pytest.mark.parametrize(
    ("quick", "committed", "line"),
    [
        ([], [row("wrong bytes")], "no longer has wrong bytes"),
        ([quick_row("wrong bytes")], [], "newly has wrong bytes"),
        ([quick_row("hits")], [row("hits", ok=True)], "promises nothing for hits"),
        ([quick_row("hits", ok=False)], [row("hits", ok=True)], "breaks hits: 1 , promised 0"),
        ([quick_row("8 hits")], [row("8 hits"), row("8 misses")], "no longer has N misses"),
    ],
    ids=["a row is gone", "a new row", "a promise is gone", "a promise is broken", "one of two rows is gone"],
)
def test_what_a_run_lacks_is_said(quick: list[dict[str, Any]], committed: list[dict[str, Any]], line: str) -> None:
    assert told(quick, committed) == [line]


def test_a_sampled_run_may_lack_rows_and_no_promise() -> None:
    committed = [row("hits", ok=True), row("misses", ok=True)]

    assert told([quick_row("hits", ok=True)], committed, is_sampled=True) == []
    assert told([quick_row("hits")], committed, is_sampled=True) == ["promises nothing for hits"]


def test_rows_of_traces_are_not_compared() -> None:
    assert told([], [row("mooncake, 8 blocks: hits", ok=True)]) == []
