"""The dashboard: a sample a second, told to all that watch, and kept over restarts."""

import asyncio
import json
import logging
import math
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from chaos import FakeClock
from starlette.applications import Starlette
from waiting import DEADLINE_S

from kvtier.tiers.histogram import Histogram
from kvtier.web.dashboard.dashboard import Dashboard, NoSample, plain, span_text
from kvtier.web.dashboard.history import RESOLUTIONS, History
from kvtier.web.dashboard.keeper import HistoryKeeper
from kvtier.web.dashboard.recent_values import RecentValues, quantile
from kvtier.web.dashboard.ring_file import RingFile, Shape
from kvtier.web.dashboard.routes import DashboardRoutes
from kvtier.web.dashboard.sample import START, Sample
from kvtier.web.dashboard.stream import Stream, TooManyViewers, event
from kvtier.web.paths import HISTORY

T0 = 1_700_000_000.0


def play(story: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine."""
    asyncio.run(asyncio.wait_for(story, DEADLINE_S))


async def settled() -> None:
    """Every task has gone as far as it can."""
    for _ in range(10):
        await asyncio.sleep(0)


class Traffic:
    """A source whose total grows by ten a second."""

    columns = ("tokens", "level")
    about: Mapping[str, object] = {"kind": "serve"}

    def __init__(self) -> None:
        self.why_silent = ""
        self.owns: list[str | None] = []

    async def sample(self, at: float, monotonic_s: float) -> Sample:
        if self.why_silent:
            raise NoSample(self.why_silent)
        return Sample(at, monotonic_s, {"tokens": 10 * monotonic_s}, {"level": 3}, {"fact": 1})

    async def own(self, group: str | None) -> Mapping[str, object]:
        self.owns.append(group)
        return {"of": group}


def content(sent: bytes, name: str) -> Any:
    """What the newest event of that name in *sent* says."""
    found = [part for part in sent.split(b"\n\n") if part.startswith(b"event: " + name.encode() + b"\n")]
    return json.loads(found[-1].partition(b"\ndata: ")[2])


class Reader:
    """A viewer that reads when it is told to."""

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        self._events = events

    async def read(self) -> bytes:
        return await anext(self._events)


def test_each_viewer_gets_the_same_bytes() -> None:
    async def story() -> None:
        stream = Stream(10)
        stream.begin_with(b"hello")
        with stream.viewer(None) as one, stream.viewer(None) as other:
            stream.publish(b"tick")
            read = [[await anext(events), await anext(events)] for events in (one, other)]

        assert read == [[b"hello", b"tick"]] * 2
        assert read[0][1] is read[1][1]  # made once

    play(story())


def test_a_slow_viewer_gets_the_newest_and_misses_those_in_between() -> None:
    async def story() -> None:
        stream = Stream(10)
        with stream.viewer(None) as slow:
            await anext(slow)
            stream.publish(b"1")
            assert await anext(slow) == b"1"
            for number in range(2, 1000):
                stream.publish(str(number).encode())

            assert await anext(slow) == b"999"

    play(story())


def test_a_viewer_waits_for_what_is_new() -> None:
    async def story() -> None:
        stream = Stream(10)
        with stream.viewer(None) as events:
            await anext(events)
            reading = asyncio.create_task(Reader(events).read())
            await settled()
            assert not reading.done()
            stream.publish(b"tick")

            assert await reading == b"tick"

    play(story())


def test_one_viewer_too_many_is_refused_until_another_leaves() -> None:
    async def story() -> None:
        stream = Stream(1)
        with stream.viewer(None), pytest.raises(TooManyViewers), stream.viewer(None):
            pass
        with stream.viewer(None):
            assert stream.num_viewers == 1
        assert stream.num_viewers == 0

    play(story())


def test_what_is_a_groups_own_goes_to_that_group_alone() -> None:
    async def story() -> None:
        stream = Stream(10)
        with stream.viewer("ann") as ann, stream.viewer("bob") as bob:
            for events in (ann, bob):
                await anext(events)
            stream.publish(b"tick;")
            stream.publish_to("ann", b"ann's")
            stream.publish_to("nobody", b"lost")

            assert await anext(ann) == b"tick;ann's"
            assert await anext(bob) == b"tick;"
        assert stream.groups == ()

    play(story())


def test_what_is_a_groups_own_is_sent_again_only_if_it_has_changed() -> None:
    async def story() -> None:
        stream = Stream(10)
        with stream.viewer(None) as events:
            await anext(events)
            sent = []
            for own, tick in ((b"a", b"1"), (b"a", b"2"), (b"b", b"3")):
                stream.publish_to(None, own)
                stream.publish(tick)
                sent.append(await anext(events))

            assert sent == [b"1a", b"2", b"3b"]

    play(story())


def test_the_end_of_a_stream_ends_those_that_wait() -> None:
    async def story() -> None:
        stream = Stream(10)
        with stream.viewer(None) as events:
            await anext(events)
            reading = asyncio.create_task(Reader(events).read())
            await settled()
            stream.end()

            assert (await reading).startswith(b":")
            with pytest.raises(StopAsyncIteration):
                await anext(events)

    play(story())


def test_who_comes_late_does_not_get_what_was_last_told_long_ago() -> None:
    async def story() -> None:
        stream = Stream(10)
        with stream.viewer(None):
            stream.publish(b"old")
        with stream.viewer(None) as events:
            await anext(events)
            reading = asyncio.create_task(Reader(events).read())
            await settled()
            assert not reading.done()
            stream.publish(b"new")

            assert await reading == b"new"

    play(story())


def made(source: Traffic, clock: FakeClock, keeper: HistoryKeeper | None = None) -> Dashboard:
    return Dashboard(source, keeper, 10, lambda: T0 + clock.now, clock)


def test_a_tick_tells_rates_numbers_and_facts() -> None:
    async def story() -> None:
        clock = FakeClock()
        dashboard = made(Traffic(), clock)
        with dashboard.stream.viewer(None) as events:
            hello = content(await anext(events), "hello")
            await dashboard.tick()
            await anext(events)
            clock.now += 2
            await dashboard.tick()
            tick = content(await anext(events), "tick")

        assert (hello["kind"], hello["columns"]) == ("serve", ["tokens", "level"])
        assert (tick["at"], tick["row"], tick["now"], tick["facts"]) == (T0 + 2, [10, 3], [20, 3], {"fact": 1})

    play(story())


def test_without_viewers_the_history_goes_on_and_nothing_is_made_for_them() -> None:
    async def story() -> None:
        clock, source = FakeClock(), Traffic()
        dashboard = made(source, clock)
        for _ in range(30):
            await dashboard.tick()
            clock.now += 1

        assert source.owns == []
        assert dashboard.history.stretch(30, T0 + 29).rows[1:, 0].tolist() == [10] * 29

    play(story())


def test_a_source_that_is_silent_is_told_of_and_its_rates_are_known_afterwards() -> None:
    async def story() -> None:
        clock, source = FakeClock(), Traffic()
        dashboard = made(source, clock)
        with dashboard.stream.viewer(None) as events:
            await anext(events)
            for why in ("", "", "stuck", ""):
                source.why_silent = why
                await dashboard.tick()
                clock.now += 1
                if why:
                    assert content(await anext(events), "silent")["why"] == "stuck"
                else:
                    told = content(await anext(events), "tick")

        assert (told["missed_s"], told["missed_row"]) == (1, [10, None])
        rates, levels = dashboard.history.stretch(4, T0 + 3).rows.T.tolist()
        assert [None if math.isnan(value) else value for value in rates] == [None, 10, 10, 10]
        assert [None if math.isnan(value) else value for value in levels] == [3, 3, None, 3]

    play(story())


def test_a_long_silence_is_a_gap() -> None:
    async def story() -> None:
        clock = FakeClock()
        dashboard = made(Traffic(), clock)
        for seconds in (1, 1, 100):
            await dashboard.tick()
            clock.now += seconds
        await dashboard.tick()

        assert np.isnan(dashboard.history.stretch(100, T0 + 101).rows).all(axis=1).sum() == 99

    play(story())


def test_the_history_goes_on_in_the_next_process(tmp_path: Path) -> None:
    async def life(num_seconds: int) -> Dashboard:
        keeper = HistoryKeeper(tmp_path / "history", Shape(Traffic.columns, RESOLUTIONS))
        dashboard = made(Traffic(), clock, keeper)
        earlier = await keeper.read()
        if earlier is not None:
            dashboard.history.take_in(earlier, T0 + clock.now)
        for _ in range(num_seconds):
            await dashboard.tick()
            clock.now += 1
        await keeper.close(dashboard.history)
        return dashboard

    async def story() -> None:
        await life(20)
        clock.now += 5
        dashboard = await life(10)
        values = dashboard.history.stretch(35, T0 + 34).rows[:, 0].tolist()

        assert [None if math.isnan(value) else value for value in values] == [
            *[None, *[10] * 19],
            *[None] * 5,
            *[None, *[10] * 9],
        ]

    clock = FakeClock()
    play(story())


class Restarted(Traffic):
    """A source whose history marks the starts of the server."""

    columns = ("tokens", START)


def test_the_history_marks_the_first_second_of_each_process(tmp_path: Path) -> None:
    async def life(num_seconds: int) -> Dashboard:
        keeper = HistoryKeeper(tmp_path / "history", Shape(Restarted.columns, RESOLUTIONS))
        dashboard = made(Restarted(), clock, keeper)
        earlier = await keeper.read()
        if earlier is not None:
            dashboard.history.take_in(earlier, T0 + clock.now)
        for _ in range(num_seconds):
            await dashboard.tick()
            clock.now += 1
        await keeper.close(dashboard.history)
        return dashboard

    async def story() -> None:
        await life(20)
        dashboard = await life(25)

        assert dashboard.history.stretch(45, T0 + 44).rows[:, 1].tolist() == [1, *[0] * 19, 1, *[0] * 24]
        coarse = dashboard.history.stretch(700, T0 + 44).rows[:, 1]  # steps of ten seconds
        assert (coarse[-5:] > 0).tolist() == [True, False, True, False, False]

    clock = FakeClock()
    play(story())


@pytest.mark.parametrize(
    ("seconds", "text"), [(20, "1 min"), (8040, "2 h 14 min"), (7200, "2 h"), (90_060, "1 d 1 h 1 min")]
)
def test_a_span_is_said_in_days_hours_and_minutes(seconds: float, text: str) -> None:
    assert span_text(seconds) == text


def test_run_reads_samples_and_keeps(tmp_path: Path) -> None:
    shape = Shape(Traffic.columns, RESOLUTIONS)

    async def story() -> None:
        clock = FakeClock()
        dashboard = made(Traffic(), clock, HistoryKeeper(tmp_path / "history", shape))
        running = asyncio.create_task(dashboard.run())
        with dashboard.stream.viewer(None) as events:
            await anext(events)
            await anext(events)
        dashboard.end()
        await running

    play(story())
    with RingFile(tmp_path / "history", shape) as file:
        found, _ = file.read()

    assert found.stretch(1, T0).rows[0, 1] == 3


def test_a_page_that_asks_for_the_history_gets_what_came_last() -> None:
    async def story() -> None:
        clock = FakeClock()
        dashboard = made(Traffic(), clock)
        app = Starlette(routes=DashboardRoutes(dashboard, lambda request: None).routes())

        async def levels() -> Any:
            return (await client.get(f"{HISTORY}?range=3")).json()["columns"]["level"]

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            await dashboard.tick()
            clock.now += 1.25
            assert await levels() == [None, 3, None]
            clock.now += 0.5
            await dashboard.tick()
            assert await levels() == [None, 3, 3]
            dashboard.history.take_in(earlier, T0 + clock.now)
            assert await levels() == [5, 3, 3]

    earlier = History(Traffic.columns)
    earlier.add(T0 - 1, np.array([10, 5]))
    play(story())


class WatchedKeeper(HistoryKeeper):
    """Knows when what was kept before has been handed over."""

    has_been_read = False

    async def read(self) -> History | None:
        found = await super().read()
        asyncio.get_running_loop().call_soon(setattr, self, "has_been_read", True)
        return found


def test_only_a_start_with_a_history_says_that_it_is_restored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shape = Shape(Traffic.columns, RESOLUTIONS)

    async def life() -> list[str]:
        keeper = WatchedKeeper(tmp_path / "history", shape)
        dashboard = made(Traffic(), FakeClock(), keeper)
        running = asyncio.create_task(dashboard.run())
        with dashboard.stream.viewer(None) as events:
            await anext(events)
            await anext(events)
        while not keeper.has_been_read:
            await asyncio.sleep(0.001)
        dashboard.end()
        await running
        return [record.getMessage() for record in caplog.records if "restored" in record.getMessage()]

    with caplog.at_level(logging.INFO, "kvtier.web.dashboard"):
        first, second = asyncio.run(life()), asyncio.run(life())

    assert first == []
    assert second == ["dashboard: restored 1 min of history of an earlier process"]


@pytest.mark.parametrize("what", ["bad", "folder", "locked", "forbidden"])
def test_a_file_that_cannot_be_used_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    path, shape = tmp_path / "history", Shape(Traffic.columns, RESOLUTIONS)
    if what == "bad":
        path.write_bytes(b"nothing of ours")
    if what == "folder":
        path.mkdir()
    if what == "forbidden":
        path.parent.joinpath("file").write_text("")
        path = path.parent / "file" / "history"
    other = RingFile(path, shape) if what == "locked" else None

    async def story() -> None:
        clock = FakeClock()
        keeper = HistoryKeeper(path, shape)
        dashboard = made(Traffic(), clock, keeper)
        assert await keeper.read() is None
        for _ in range(40):
            await dashboard.tick()
            clock.now += 1
        await keeper.close(dashboard.history)

    with caplog.at_level(logging.INFO, "kvtier.web.dashboard"):
        play(story())
    if other is not None:
        other.close()

    assert len(caplog.messages) == 1
    assert str(path) in caplog.messages[0]


class HangingFile(RingFile):
    """A history on a disk that does not answer until it is let go."""

    let_go = threading.Event()

    def read(self) -> tuple[History, int]:
        self.let_go.wait()
        return super().read()


def test_a_disk_that_hangs_holds_nothing_up_and_is_used_once_it_answers(tmp_path: Path) -> None:
    path, shape = tmp_path / "history", Shape(Traffic.columns, RESOLUTIONS)

    async def story() -> None:
        clock, keeper = FakeClock(), HistoryKeeper(path, shape, HangingFile)
        dashboard = made(Traffic(), clock, keeper)
        reading = asyncio.create_task(keeper.read())
        for _ in range(40):
            await dashboard.tick()
            clock.now += 1

        assert not reading.done()
        assert dashboard.history.stretch(30, T0 + 39).rows[:, 1].tolist() == [3] * 30
        HangingFile.let_go.set()
        assert await reading is not None
        await keeper.close(dashboard.history)

    play(story())
    with RingFile(path, shape) as file:
        assert file.read()[0].stretch(40, T0 + 39).rows[:, 1].tolist() == [3] * 40


def test_numbers_are_told_in_six_digits_and_what_is_not_known_is_null() -> None:
    exact = np.array([0.1 + 0.2, math.nan, 0, -1234567.89, 1e-9 / 3, 12])

    assert plain(exact) == [0.3, None, 0, -1234570, 3.33333e-10, 12]
    assert event("tick", {"a": None}) == b'event: tick\ndata: {"a":null}\n\n'


def test_recent_values_are_those_of_the_window() -> None:
    histogram, recent = Histogram((1, 10, 100)), RecentValues(60)
    histogram.add(5, 100)
    assert recent.since(0, histogram.statistics()).num_values == 0

    histogram.add(50, 10)
    assert recent.since(30, histogram.statistics()).num_values == 10
    histogram.add(0.5, 2)
    assert recent.since(59, histogram.statistics()).num_values == 12
    assert recent.since(91, histogram.statistics()).num_values == 2
    assert recent.since(200, histogram.statistics()).num_values == 0


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 0.5, None), ([5] * 10, 0.5, 5.5), ([0.5, 5, 50], 0.5, 5.5), ([5000], 0.5, 100), ([0.5] * 9 + [50], 0.9, 1)],
)
def test_a_quantile_is_what_buckets_tell(values: list[float], share: float, expected: float | None) -> None:
    histogram = Histogram((1, 10, 100))
    for value in values:
        histogram.add(value)

    found = quantile(histogram.statistics(), share)

    assert found == expected or found == pytest.approx(expected)
