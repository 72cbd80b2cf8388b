"""Benchmarks as tests run them: as commands, from the repository's top, as docs/promises.md says."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 600.0  # for what takes seconds: reached only when a test fails


def run_benchmark(module: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """What `python -m module arguments` said, and its status."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
