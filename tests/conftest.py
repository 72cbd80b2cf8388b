"""What tests of several rooms start from."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # a worker per core: threads of torch beyond one only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import mounts
import pytest
import torch
from mounts import Mount, mounting
from open_files import open_files

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, which any module of models does

MAX_LEFT = 16  # descriptors that a module leaves: what its last test is still given, and what a process opens once


@pytest.fixture(autouse=True, scope="module")
def files_as_found() -> Iterator[None]:
    """Tests close what they open. With a thousand files open, descriptors that a test takes for free are not, and where
    two objects have one number, the first to be garbage closes what is the other's."""
    before = open_files()
    yield
    if open_files().total() > before.total() + MAX_LEFT:
        gc.collect()
        left = open_files() - before
        assert left.total() <= MAX_LEFT, f"the tests of this module leave open: {left.most_common(5)}"


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
