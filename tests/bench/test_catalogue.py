"""Every benchmark is in the catalogue, so that `make results` measures it, and runs in its quick form in the tests."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Commands of one process each, which the others start, or which measure a GPU (make gpu-bench).
NO_RESULT = {
    "bench.measure_all",
    "bench.gpu_bench",
    "bench.gpu_plots",
    "bench.engine.decoding_worker",
    "bench.engine.gpu_serving",
    "bench.transfer.gpu_copies",
    "bench.observability.blind_server",
    "bench.attached.crowd",
    "bench.attached.engine_process",
}
LIST = """import json; from bench.catalogue import RESULTS
print(json.dumps([
    [each.name, each.module, [need.name for need in each.needs], [str(need) for need in each.missing]]
    for each in RESULTS
]))
"""
# Each question of the benchmarks that have several, and those that the catalogue asks.
QUESTIONS = """import importlib, json; from bench.catalogue import RESULTS
rooms = ["bench.attached", "bench.cluster", "bench.connectors", "bench.observability", "bench.sidecar"]
there = [[room, name] for room in rooms for name in importlib.import_module(room + ".__main__").QUESTIONS]
asked = [
    [room, name] for each in RESULTS if (room := each.module) in rooms
    for name in [word for word in each.arguments if word.isidentifier()] or
    [name for place, name in there if place == room]
]
print(json.dumps([there, asked]))
"""


def told_by(program: str) -> list[Any]:
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


RESULTS = told_by(LIST)


def is_command(path: Path) -> bool:
    """Whether the module does something when it is run."""
    tests = (node.test for node in ast.parse(path.read_text()).body if isinstance(node, ast.If))
    return any(isinstance(test, ast.Compare) and ast.unparse(test) == "__name__ == '__main__'" for test in tests)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")


def test_each_benchmark_is_in_the_catalogue() -> None:
    commands = {module_of(path) for path in (ROOT / "bench").rglob("*.py") if is_command(path)}

    assert commands == NO_RESULT | {module for _, module, *_ in RESULTS}


def test_each_result_is_in_the_catalogue_once() -> None:
    names = [name for name, *_ in RESULTS]

    assert len(names) == len(set(names))
    assert {path.stem for path in (ROOT / "bench" / "results").glob("*.json")} <= set(names)


@pytest.mark.long
def test_each_question_is_asked_by_one_result() -> None:
    there, asked = told_by(QUESTIONS)

    assert sorted(asked) == sorted(there)


# Even the quick runs of these take a quarter of a minute to a minute.
SLOW = {
    "attached",
    "cache_control",
    "chosen_keys",
    "decoding",
    "demo_ttft",
    "exactness",
    "hybrid_documents",
    "images",
    "latent",
    "load_or_recompute",
    "miss_cost",
    "model_coverage",
    "observability_cardinality",
    "observability_cost",
    "observability_page",
    "observability_remembering",
    "observability_tokens",
    "owner_thread",
    "prefix_core",
    "remote_faults",
    "slow_disk",
    "store",
    "structured_output",
}


def quick_runs(with_engines: bool) -> list[Any]:
    """A parameter for each result that needs foreign engines, or for each that needs none."""
    return [
        pytest.param(name, missing, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name, _, needs, missing in RESULTS
        if ("ENGINES" in needs) is with_engines
    ]


def compare(name: str, missing: list[str]) -> None:
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    command = [sys.executable, "-m", "bench.measure_all", "--quick", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize(("name", "missing"), quick_runs(with_engines=False))
def test_a_quick_run_has_the_rows_and_promises_of_the_committed_result(name: str, missing: list[str]) -> None:
    compare(name, missing)


@pytest.mark.engines
@pytest.mark.skipif("KVTIER_LMCACHE_PYTHON" not in os.environ, reason="needs real engines: make test-engines")
@pytest.mark.parametrize(("name", "missing"), quick_runs(with_engines=True))
def test_a_quick_run_with_real_engines_has_the_rows_of_the_committed_result(name: str, missing: list[str]) -> None:
    compare(name, missing)
