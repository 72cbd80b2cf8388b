"""After days of use in fast-forward nothing leaks, the files do not grow, and the accounting agrees."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fork_server import DEADLINE_S
from forks import ForkServer, fork_server
from held_reader import readers_of

from kvtier.store.durability import Durability
from kvtier.store.lmdb.data_file import max_bytes
from kvtier.store.lmdb.reader import NUM_READERS

WARM_UP_TURNOVERS = 5
HEAP_SLACK_BYTES = 12 << 20  # plus a sixteenth of the capacity: 10 MiB were measured in 400 turnovers, then no more


@pytest.fixture
def other_forks() -> Iterator[ForkServer]:
    """For a second process beside the one with the store."""
    with fork_server("held_reader") as server:
        yield server


def num_slots_of(pid: int, folder: Path) -> int:
    """Slots that LMDB takes to be readers of process *pid*."""
    return sum(line.startswith(f"{pid} ") for line in readers_of(str(folder)))


def assert_nothing_grows(footprints: list[dict[str, Any]], capacity_bytes: int) -> None:
    """After the warm-up, as far as it is not noise."""
    warm, rest = footprints[WARM_UP_TURNOVERS - 1], footprints[WARM_UP_TURNOVERS:]
    assert len(rest) >= WARM_UP_TURNOVERS
    limits = {
        "num_files": max(line["num_files"] for line in footprints[:WARM_UP_TURNOVERS]),
        "num_threads": warm["num_threads"] + NUM_READERS,  # readers start when they are needed
        "num_objects": 1.2 * warm["num_objects"] + 5000,
        "heap_bytes": warm["heap_bytes"] + HEAP_SLACK_BYTES + capacity_bytes // 16,
        "num_slabs": 3 * rest[-1]["num_sizes"],  # through the page cache, past it, and the map
        "file_bytes": max_bytes(capacity_bytes),
    }
    for what, limit in limits.items():
        values = [line[what] for line in rest]
        assert max(values) <= limit, f"{what} grew from {warm[what]} (limit {limit}) to {max(values)}: {values}"


def churn(
    forks: ForkServer, folder: Path, durability: str, seed: int, capacity_bytes: int, num_turnovers: int, opening: int
) -> None:
    """Turn a store over and compare its footprints."""
    child = forks.start(
        "churned_store",
        folder=str(folder),
        capacity_bytes=capacity_bytes,
        durability=durability,
        seed=seed,
        num_turnovers=num_turnovers,
        turnovers_per_opening=opening,
    )
    while child.listen(DEADLINE_S, "turnover"):
        turnover = child.lines[-1].get("turnover", 0)
        if turnover and turnover % 20 == 0:
            print(f"{durability}: {child.lines[-1]}", flush=True)

    ended = child.wait()

    ended.assert_fine(f"TORTURE_SEED={seed} {durability}")
    footprints = [line for line in ended.lines if "turnover" in line]
    assert len(footprints) == num_turnovers
    assert_nothing_grows(footprints, capacity_bytes)
    assert ended.of("closed") == ended.of("unopened")


@pytest.mark.long
@pytest.mark.parametrize("durability", list(Durability))
def test_ten_turnovers_leak_nothing(forks: ForkServer, tmp_path: Path, durability: str, seed: int) -> None:
    churn(forks, tmp_path / "store", durability, seed, capacity_bytes=3 << 20, num_turnovers=12, opening=6)


@pytest.mark.slow
@pytest.mark.parametrize("durability", list(Durability))
@pytest.mark.parametrize("capacity_bytes", [3 << 20, 16 << 20, 64 << 20])
def test_a_hundred_turnovers_leak_nothing(
    forks: ForkServer, tmp_path: Path, durability: str, capacity_bytes: int, seed: int
) -> None:
    churn(forks, tmp_path / "store", durability, seed, capacity_bytes, num_turnovers=110, opening=37)


@pytest.mark.long
@pytest.mark.parametrize("durability", list(Durability))
def test_a_reader_killed_inside_its_transaction_does_not_make_the_file_grow_for_ever(
    forks: ForkServer, other_forks: ForkServer, tmp_path: Path, durability: str, seed: int
) -> None:
    folder, go_on = tmp_path / "store", tmp_path / "go_on"
    pause_at, num_turnovers = WARM_UP_TURNOVERS - 1, 15
    child = forks.start(
        "churned_store",
        folder=str(folder),
        capacity_bytes=2 << 20,
        durability=durability,
        seed=seed,
        num_turnovers=num_turnovers,
        turnovers_per_opening=num_turnovers,
        check_readers_s=0.02,
        with_syncs=True,
        pause_at=pause_at,
        go_on=str(go_on),
    )
    while child.listen(DEADLINE_S, "turnover") and child.lines[-1].get("turnover") != pause_at:
        pass
    reader = other_forks.start("held_reader", folder=str(folder))
    reader.listen(DEADLINE_S, "holding")
    assert num_slots_of(reader.pid, folder) == 1
    reader.kill()
    assert num_slots_of(reader.pid, folder) == 1  # LMDB is not told that the process is dead
    go_on.touch()

    ended = child.wait()

    ended.assert_fine(f"TORTURE_SEED={seed} {durability}")
    used_bytes = [line["used_bytes"] for line in ended.lines if "turnover" in line]
    assert num_slots_of(reader.pid, folder) == 0
    print(f"{durability}: {[used >> 10 for used in used_bytes]} KiB used")
    assert used_bytes[-1] <= used_bytes[pause_at] + 3 * (2 << 20)  # of 10 turnovers that would all be held back
