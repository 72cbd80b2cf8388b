"""What tests of several rooms start from."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # a worker per core: threads of torch beyond one only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from pathlib import Path

import mounts
import pytest
from mounts import Mount, mounting


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a file system with `mount(*arguments)`; see `mounting`."""
    point = tmp_path / "mounted"
    point.mkdir()
    with mounting(point) as mount:
        yield mount


@pytest.fixture
def for_children(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the test starts can import its module, and what that imports."""
    own, support = request.path.parent, Path(mounts.__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{own}{os.pathsep}{support}", prepend=os.pathsep)
