"""What tests of several rooms start from."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # a worker per core: threads of torch beyond one only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import logging
from collections.abc import Iterator
from pathlib import Path

import mounts
import pytest
from mounts import Mount, mounting


@pytest.fixture(autouse=True)
def log_as_found() -> Iterator[None]:
    """Takes back where a command that the test ran in this process sent the process's log: its stream is pytest's, and
    closed once the test is over."""
    root, own = logging.getLogger(), logging.getLogger("kvtier")
    found = root.handlers[:], root.level, own.level
    yield
    root.handlers[:] = found[0]
    root.setLevel(found[1])
    own.setLevel(found[2])
    logging.captureWarnings(False)


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
