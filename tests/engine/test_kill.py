"""Killed at any moment, an engine leaves a store that opens at once and holds only whole records, and nothing else."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import killed_engine
import pytest
import small_models

from kvtier.store.lmdb.lmdb_store import LmdbStore

NUM_KILLS = 20


@pytest.fixture
def engines() -> Iterator[subprocess.Popen[str]]:
    """A process that forks an engine for each folder that it reads."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(small_models.__file__).parent)}
    with subprocess.Popen(
        [sys.executable, killed_engine.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        yield process
        process.kill()


def read_until(process: subprocess.Popen[str], word: str) -> str:
    """Read lines until one says *word*; the line before it."""
    before = ""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == word:
            return before
        if line.strip() == "gone":
            break
        before = line.strip()
    raise AssertionError(f"the engine ended before it said {word!r}")


@pytest.mark.long
def test_twenty_kills_during_spills_lose_no_record_and_leave_nothing_in_shared_memory(
    engines: subprocess.Popen[str], tmp_path: Path
) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    folder = tmp_path / "store"
    assert engines.stdin is not None
    num_verified = 0
    killed: set[str] = set()

    for _ in range(NUM_KILLS):
        engines.stdin.write(f"{folder}\n")
        engines.stdin.flush()
        pid = int(read_until(engines, "ready"))
        read_until(engines, "spilling")
        time.sleep(random.random() * 0.1)
        os.kill(pid, signal.SIGKILL)
        killed.add(str(pid))
        read_until(engines, "gone")

        with LmdbStore(folder) as store:
            store.check()
            faults = {key: fault for key, fault in store.verify() if fault is not None}
            num_verified += store.statistics().num_records
        assert faults == {}

    assert num_verified > NUM_KILLS
    left = set(os.listdir("/dev/shm")) - shared_memory
    of_others = {name for name in left if name.startswith("sem.mp-")}  # of multiprocessing, which kvtier does not use
    of_others |= {name for name in left if name.startswith("kvtier-") and not killed & set(name.split("-"))}
    assert left == of_others
