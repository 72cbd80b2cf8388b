"""Benchmarks, one question a file, run from the repository's top: `python -m bench.engine.demo_ttft`.

The folders are the rooms that they measure; what is measured across them, and the report, stands here. Models, stores
and engines that the tests have too are theirs, in tests/support and tests/torture; no test imports a benchmark.
"""

import sys
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1] / "tests"

sys.path += [str(_TESTS / "support"), str(_TESTS / "torture")]
