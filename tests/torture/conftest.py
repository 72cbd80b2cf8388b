"""Seeds, printed and settable, and servers of processes to torture: `make torture SEED=1 KILLS=200`."""

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import ForkServer, fork_server


@pytest.fixture
def seed() -> int:
    """The seed of everything random in a test; `TORTURE_SEED` sets it."""
    value = int(os.environ.get("TORTURE_SEED") or random.randrange(1 << 32))
    print(f"TORTURE_SEED={value}", flush=True)
    return value


@pytest.fixture(scope="session")
def num_kills() -> int:
    """Number of kills in the long form."""
    return int(os.environ.get("TORTURE_KILLS") or 200)


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    with fork_server("killed_store", "cramped_store", "torn_store", "churned_store") as server:
        yield server


@pytest.fixture(scope="session")
def shimmed_forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A server whose children have `io_shim.c` between them and the kernel."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("shim") / "io_shim.so"
    source = Path(__file__).with_name("io_shim.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    with fork_server("faulty_store", environment={"LD_PRELOAD": str(library)}) as server:
        yield server
