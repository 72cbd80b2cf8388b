"""File systems of their own, for tests that fill them or make them read-only."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

Mount = Callable[..., Path]


@contextmanager
def mounting(point: Path) -> Iterator[Mount]:
    """Mounts a file system at *point* with `mount(*arguments)`, and takes it away in the end. Skips where that is
    forbidden."""

    def mounted(*arguments: str) -> Path:
        if os.geteuid() != 0:
            pytest.skip("only root may mount")
        done = subprocess.run(["mount", *arguments, str(point)], check=False, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"may not mount here: {done.stderr.strip()}")
        return point

    yield mounted
    while point.is_mount():
        subprocess.run(["umount", str(point)], check=True)
