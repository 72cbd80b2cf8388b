"""What a sidecar tells of its one disk, which each layout meets by itself."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sidecars import RunningSidecar, running_sidecar, small_config
from waiting import wait_for

from kvtier.sidecar.sidecar import Sidecar
from kvtier.sidecar.statistics import SidecarStatistics
from kvtier.tiers.lower.breaker import MAX_FAILURES, BreakerState
from kvtier.tiers.naming.tier import Tier


@pytest.fixture
def running(tmp_path: Path) -> Iterator[RunningSidecar]:
    with running_sidecar(small_config(tmp_path / "store")) as made:
        wait_for(lambda: made.get("/v1/kvtier/stats").json()["store"]["not_open"] is None)
        yield made


def statistics(running: RunningSidecar) -> SidecarStatistics:
    return running.ask(running.sidecar.statistics)


def test_the_disk_is_known_before_any_layout(running: RunningSidecar) -> None:
    found = statistics(running)

    assert 0 < found.tiers[Tier.DISK].capacity_bytes <= 64 << 20
    assert found.disk is None


def test_what_the_layout_that_was_opened_first_writes_is_counted_beside_a_later_one(running: RunningSidecar) -> None:
    running.store(1, 4, "first")
    running.store(1, 4, "second")
    running.post("/v1/kvtier/spill")
    running.store(2, 4, "first")
    running.post("/v1/kvtier/spill")

    found = statistics(running)

    assert found.tiers[Tier.DISK].num_blocks == 12
    assert found.disk is not None
    assert found.disk.known_blocks == 12


def test_a_breaker_that_one_layout_has_opened_is_open(running: RunningSidecar) -> None:
    running.store(1, 4, "first")
    running.store(1, 4, "second")
    running.post("/v1/kvtier/spill")

    def fail(sidecar: Sidecar) -> None:
        disk = next(iter(sidecar.layouts)).tiers.index.disk
        disk.why_failed["write"] = "[Errno 28] No space left on device"
        for _ in range(MAX_FAILURES):
            disk.writing.on_failed(disk.writing.begin())

    running.ask(lambda: fail(running.sidecar))
    found = running.get("/v1/kvtier/stats").json()["disk"]
    seen = statistics(running).disk

    assert found["breakers"] == {"read": BreakerState.CLOSED, "write": BreakerState.OPEN}
    assert seen is not None
    assert (seen.num_opened, seen.why_failed["write"]) == (
        {"read": 0, "write": 1},
        "[Errno 28] No space left on device",
    )


def test_the_drives_life_goes_by_what_all_layouts_have_written(tmp_path: Path) -> None:
    disk = {"path": str(tmp_path / "store"), "capacity": "64MiB", "endurance": "1TB"}
    with running_sidecar(small_config(disk=disk)) as made:
        wait_for(lambda: made.get("/v1/kvtier/stats").json()["store"]["not_open"] is None)
        for model in ("first", "second"):
            made.store(1, 20, model)
            made.post("/v1/kvtier/spill?timeout_s=60")

        found = made.get("/v1/kvtier/stats").json()["disk"]

        assert found["written_bytes_total"] >= 40 * 4096
        assert found["life"]["used"] == found["written_bytes_total"] / 1e12
        assert found["life"]["years_left"] > 0
        assert "kvtier_ssd_life" in made.get("/metrics").text
