"""Benchmarks, one question a file, run from the repository's top: `python -m bench.engine.demo_ttft`.

Each folder measures one room; benchmarks of several rooms, and the report, are at the top. Models, stores and engines
that tests use too are in tests/support and tests/torture. No test imports a benchmark.
"""

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1] / "tests"

sys.path += [str(_TESTS / "support"), str(_TESTS / "torture")]
