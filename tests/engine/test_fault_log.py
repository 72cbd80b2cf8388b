"""FaultLog: the exact lines of each fault, and few lines for a thousand faults."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from chaos import FakeClock

from kvtier.engine.attached.link import SidecarStanding
from kvtier.engine.fault_log import QUIET_S, FaultLog, flush_fault
from kvtier.engine.stores.reopening_store import StoreStanding, WhyClosed
from kvtier.tiers.lower.breaker import BreakerState
from kvtier.tiers.lower.statistics import DiskStatistics, TierStatistics
from kvtier.tiers.naming.tier import Tier

OPEN = StoreStanding(Path("/kv"), None)


class Engine:
    """What is known of an engine's tiers, one changed figure at a time, shown to a log."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.clock = FakeClock()
        self._log = FaultLog(self.clock)
        self._caplog = caplog
        self.standing = OPEN
        self.corrupt: dict[Tier, Mapping[str, int]] = {Tier.HOST: {}, Tier.DISK: {}}
        self.breakers = {"read": BreakerState.CLOSED, "write": BreakerState.CLOSED}
        self.num_opened = {"read": 0, "write": 0}
        self.why_failed = {"read": "", "write": ""}
        self.sidecar: SidecarStanding | None = None

    def disk(self) -> DiskStatistics:
        return DiskStatistics(
            0, 0, 0, True, True, dict(self.breakers), dict(self.num_opened), dict(self.why_failed), None, None, {}
        )

    def look(self) -> list[str]:
        """The lines that the log writes for the present snapshot."""
        self._caplog.clear()
        tiers = {tier: TierStatistics(corrupt=dict(counts)) for tier, counts in self.corrupt.items()}
        self._log.look(self.standing, self.disk(), tiers, self.sidecar)
        assert all(record.levelno == logging.WARNING for record in self._caplog.records)
        return self._caplog.messages

    def attach(self, num_times: int = 1) -> None:
        before = 0 if self.sidecar is None else self.sidecar.num_attached
        self.sidecar = SidecarStanding("/s", True, before + num_times, 0.0)

    def detach(self) -> None:
        self.sidecar = SidecarStanding("/s", False, 0 if self.sidecar is None else self.sidecar.num_attached, 0.0)

    def open_breaker(self, side: str, why: str = "") -> None:
        self.breakers[side], self.why_failed[side] = BreakerState.OPEN, why
        self.num_opened[side] += 1

    def close_breaker(self, side: str) -> None:
        self.breakers[side] = BreakerState.CLOSED


@pytest.fixture
def engine(caplog: pytest.LogCaptureFixture) -> Engine:
    return Engine(caplog)


def test_an_engine_in_order_is_not_spoken_of(engine: Engine) -> None:
    engine.corrupt[Tier.DISK] = {"missing": 7}  # evicted meanwhile: no damage

    assert engine.look() == []


def test_a_breaker_tells_of_its_opening_and_closing_and_the_cause(engine: Engine) -> None:
    engine.open_breaker("write", "[Errno 28] No space left on device")
    opened = engine.look()
    engine.breakers["write"] = BreakerState.HALF_OPEN
    still = engine.look()
    engine.clock.now += QUIET_S
    engine.close_breaker("write")

    assert opened == [
        "disk: writing failed and is paused ([Errno 28] No space left on device)",
    ]
    assert still == []
    assert engine.look() == ["disk: writing works again"]
    assert engine.look() == []


def test_a_breaker_without_an_error_has_hung_or_read_nothing(engine: Engine) -> None:
    engine.open_breaker("read")

    assert engine.look() == ["disk: reading failed and is paused (errors, or no answer)"]


def test_a_breaker_that_opens_and_closes_between_two_looks_is_told_of_all_the_same(engine: Engine) -> None:
    for _ in range(3):
        engine.open_breaker("read")
    engine.close_breaker("read")

    assert engine.look() == [
        "disk: reading failed 3 times and is paused (errors, or no answer)",
        "disk: reading works again",
    ]


def test_a_thousand_faults_in_eight_minutes_give_few_lines(engine: Engine) -> None:
    lines = []
    for number in range(1000):
        engine.open_breaker("read")
        lines += engine.look()
        engine.close_breaker("read")
        engine.corrupt[Tier.DISK] = {"corrupt": number + 1}
        engine.standing = replace(OPEN, num_ended=number + 1, num_restarts=number, why_ended="signal SIGSEGV")
        lines += engine.look()
        engine.clock.now += 0.5

    assert len(lines) == 4 * 9  # four things, once a minute
    assert "disk: the store's process ended 120 times (signal SIGSEGV)" in lines
    assert "disk: corrupt blocks were found (120 corrupt); they will be recomputed" in lines
    engine.clock.now += QUIET_S
    assert engine.look()[-1] == "disk: corrupt blocks were found (40 corrupt); they will be recomputed"
    assert engine.look() == []


def test_processes_of_the_store_that_end_and_are_started_again(engine: Engine) -> None:
    engine.standing = replace(OPEN, num_ended=1, why_ended="signal SIGSEGV")
    ended = engine.look()
    engine.standing = replace(engine.standing, num_restarts=1)

    assert ended == ["disk: the store's process ended (signal SIGSEGV)"]
    assert engine.look() == ["disk: the store's process was started again"]


def test_a_store_that_is_not_open_and_opens_later(engine: Engine) -> None:
    why = "folder /kv is open in process 7; stop it, or give this one a folder of its own"
    engine.standing = StoreStanding(Path("/kv"), WhyClosed.IN_USE, why)
    at_first = engine.look()
    engine.clock.now += QUIET_S
    engine.standing = OPEN

    assert at_first == [f"disk: /kv is not open ({why}); serving without it, trying again"]
    assert engine.look() == ["disk: /kv is open; it is used from now on"]


def test_a_folder_that_is_gone_is_told_of_once(engine: Engine) -> None:
    engine.standing = replace(OPEN, num_gone=1, not_open=WhyClosed.GONE, why="its folder was removed or replaced")
    gone = engine.look()
    engine.standing = replace(OPEN, num_gone=1)

    assert gone == ["disk: /kv was removed or replaced while it was open; its blocks are lost, and it is reopened"]
    assert engine.look() == []


def test_damage_is_told_of_by_tier_and_cause(engine: Engine) -> None:
    engine.corrupt = {Tier.HOST: {"corrupt": 1}, Tier.DISK: {"corrupt": 2, "torn": 1, "missing": 5, "io_error": 3}}

    assert engine.look() == [
        "host: corrupt blocks were found (1 corrupt); they will be recomputed",
        "disk: corrupt blocks were found (2 corrupt, 1 torn); they will be recomputed",
    ]


def test_a_flush_that_is_not_complete_has_its_true_cause(engine: Engine) -> None:
    late = flush_fault(engine.standing, engine.disk(), 120.0)
    engine.open_breaker("write", "[Errno 28] No space left on device")
    full = flush_fault(engine.standing, engine.disk(), 120.0)
    engine.standing = StoreStanding(Path("/kv"), WhyClosed.READ_ONLY, "[Errno 30] Read-only file system: '/kv'")

    assert late == "not all were written within 120 s, or there is no room for them"
    assert full == "[Errno 28] No space left on device"
    assert (
        flush_fault(engine.standing, engine.disk(), 120.0) == "/kv is not open: [Errno 30] Read-only file system: '/kv'"
    )


def test_a_sidecar_that_goes_and_comes_back_is_a_line_each(engine: Engine) -> None:
    engine.attach()
    assert engine.look() == []  # the start has told of it

    engine.detach()
    assert engine.look() == ["sidecar: /s has gone or does not answer; serving without it, trying again"]
    assert engine.look() == []
    engine.clock.now += QUIET_S
    engine.attach()

    assert engine.look() == ["sidecar: /s is attached; it is used from now on"]


def test_a_sidecar_that_comes_after_the_engine_is_a_line(engine: Engine) -> None:
    engine.detach()
    assert engine.look() == []  # the start has told of it

    engine.attach()

    assert engine.look() == ["sidecar: /s is attached; it is used from now on"]


def test_a_sidecar_that_goes_and_comes_between_two_looks_is_one_line_with_how_often(engine: Engine) -> None:
    engine.attach()
    engine.look()

    engine.attach()
    assert engine.look() == ["sidecar: /s was lost and is attached; it is used from now on"]
    engine.attach(3)
    assert engine.look() == []
    engine.clock.now += QUIET_S

    assert engine.look() == ["sidecar: /s was lost 3 times and is attached; it is used from now on"]


def test_a_flush_that_did_not_reach_the_sidecar_says_why() -> None:
    gone = SidecarStanding("/s", False, 1, 0.0)
    there = SidecarStanding("/s", True, 1, 5.0)

    assert flush_fault(None, None, 120.0, gone) == "/s has gone or does not answer"
    assert flush_fault(None, None, 120.0, there) == "it did not accept all of them within 120 s"
