"""Every benchmark is in the catalogue, so that `make results` measures it, and runs in its quick form in the tests."""

import ast
import json
import subprocess
import sys
from pathlib import Path

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
# Benchmarks without a form of seconds; a new one must have it.
NOT_QUICK = {
    *("exactness", "paged_attention", "cache_control", "prefix_core", "what_if", "store", "store_peers"),
    *("remote_faults", "attached", "observability_tokens", "observability_cardinality", "observability_page"),
    *("observability_cost",),
}
# Those whose quick form takes seconds wherever the tests run, and is compared here; make results has the others.
QUICK_IN_TESTS = ["last_copies"]
LIST = """import json; from bench.catalogue import RESULTS
print(json.dumps([
    [each.name, each.module, each.quick is not None, [need.name for need in each.needs], len(each.missing)]
    for each in RESULTS
]))
"""


def results() -> list[list[object]]:
    done = subprocess.run([sys.executable, "-c", LIST], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


RESULTS = results()


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


def test_each_benchmark_without_foreign_engines_has_a_quick_form() -> None:
    slow = {name for name, _, is_quick, needs, _ in RESULTS if not is_quick and "ENGINES" not in needs}

    assert slow == NOT_QUICK


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK_IN_TESTS)
def test_a_quick_run_has_the_rows_and_promises_of_the_committed_result(name: str) -> None:
    command = [sys.executable, "-m", "bench.measure_all", "--quick", name]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
