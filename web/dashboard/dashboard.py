"""The dashboard's loop, which samples the server's state once per second, for the history and for viewers."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.web.dashboard.history import RESOLUTIONS, History
from kvtier.web.dashboard.keeper import Keeper, NoKeeper
from kvtier.web.dashboard.sample import START, Rates, Row, Sample
from kvtier.web.dashboard.stream import Stream, event

log = logging.getLogger(__name__)

SAVE_EVERY_S = 10
OWN_EVERY_S = 5  # interval of the events that go only to the viewers of one group
# Samples are taken in the middle of seconds, so that a slightly early or late one still belongs to its second.
MIDDLE_S = 0.5
MAX_MISSED = 60  # max number of consecutive seconds without a sample to fill in; longer gaps stay
_DIGITS = 6  # significant digits of numbers that are sent


class NoSample(Exception):
    """The error that the server has no data for the dashboard at the moment. The message says why."""


class Source(Protocol):
    """A source of the dashboard's data: the state of one server."""

    columns: tuple[str, ...]  # columns of the history
    about: Mapping[str, object]  # constant facts, for the page

    async def sample(self, at: float, monotonic_s: float) -> Sample:
        """Return the server's current state. Raise `NoSample` if there is none."""

    async def own(self, group: str | None) -> Mapping[str, object]:
        """Return the data that only viewers of *group* may see. A group is, for example, a tenant.

        Raises `NoSample` if there is no data at the moment.
        """


class Dashboard:
    """The history of samples from *source*, and their live stream. Start `run` as a task. Owned by the event loop."""

    def __init__(
        self,
        source: Source,
        keeper: Keeper | None = None,
        max_viewers: int = 64,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.history = History(source.columns, RESOLUTIONS)
        self.stream = Stream(max_viewers)
        self.source = source
        self.wall = wall
        self._monotonic = monotonic
        self._keeper = keeper or NoKeeper()
        self._columns = tuple(source.columns)
        self._rates = Rates(source.columns)
        self._num_ticks = 0
        self._sampled_at: float | None = None
        self._has_ended = asyncio.Event()
        about = {"columns": source.columns, "resolutions": [tuple(each) for each in RESOLUTIONS], **source.about}
        self.stream.begin_with(event("hello", about))

    async def run(self) -> None:
        """Take a sample each second until `end` is called, then save the history."""
        reading = asyncio.create_task(self._read())
        try:
            with suppress(NoSample):  # the base from which the first rates are computed
                self._rates.row(await self.source.sample(self.wall(), self._monotonic()))
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(1.0 - (self.wall() - MIDDLE_S) % 1.0):
                        await self._has_ended.wait()
                if self._has_ended.is_set():
                    break
                await self.tick()
        finally:
            self.stream.end()
            reading.cancel()
        await self._keeper.close(self.history)

    def end(self) -> None:
        """End the streams of all viewers, and make `run` return."""
        self._has_ended.set()
        self.stream.end()

    async def tick(self) -> None:
        """Take one sample, add it to the history, and send it to the viewers."""
        at = self.wall()
        try:
            sample = await self.source.sample(at, self._monotonic())
        except NoSample as error:
            self.stream.publish(event("silent", {"at": at, "why": str(error)}))
            return
        row = self._rates.row(sample)
        if START in self._columns:
            row[self._columns.index(START)] = self._num_ticks == 0
        missed = self._fill_missed(at, row)
        self.history.add(at, row)
        if self.stream.num_viewers:
            self.stream.publish(event("tick", self._told(sample, row) | missed))
            is_due = self._num_ticks % OWN_EVERY_S == 0
            await self._tell_own(self.stream.groups if is_due else self.stream.unsent_groups)
        if self._num_ticks % SAVE_EVERY_S == 0:
            self._keeper.save(self.history)
        self._num_ticks += 1

    def _fill_missed(self, at: float, row: Row) -> dict[str, object]:
        """Add history rows for the seconds before *at* that have no sample.

        They get the rates in *row*, which are means over these seconds. Values that are not rates stay unknown. Returns
        fields for the `tick` event: the number of these seconds, and their row.
        """
        before, self._sampled_at = self._sampled_at, at
        num_missed = 0 if before is None else int(at) - int(before) - 1
        if not 0 < num_missed <= MAX_MISSED:
            return {}
        rates = np.where(self._rates.is_rate, row, np.nan)
        for back in range(num_missed, 0, -1):
            self.history.add(at - back, rates)
        return {"missed_s": num_missed, "missed_row": plain(rates)}

    async def _tell_own(self, groups: Iterable[str | None]) -> None:
        for group in groups:
            with suppress(NoSample):
                self.stream.publish_to(group, event("own", await self.source.own(group)))

    def _told(self, sample: Sample, row: Row) -> dict[str, object]:
        return {
            "at": round(sample.at, 3),
            "row": plain(row),
            "now": [None if math.isnan(value) else value for value in sample.values(self.source.columns).tolist()],
            "facts": sample.facts,
        }

    async def _read(self) -> None:
        earlier = await self._keeper.read()
        if earlier is not None and (taken_s := self.history.take_in(earlier, self.wall())):
            log.info("dashboard: restored %s of history of an earlier process", span_text(taken_s))


def span_text(seconds: float) -> str:
    """Return a duration in words, such as "2 h 14 min", rounded to minutes."""
    minutes = max(1, round(seconds / 60))
    days, hours = minutes // 1440, minutes // 60 % 24
    parts = [(days, "d"), (hours, "h"), (minutes % 60, "min")]
    return " ".join(f"{number} {unit}" for number, unit in parts if number)


def plain(values: npt.NDArray[np.floating]) -> list[float | None]:
    """Return *values* as a list for JSON, rounded, with None in place of NaN."""
    exact = np.asarray(values, np.float64)
    is_known = np.isfinite(exact)
    known = exact[is_known]
    size = np.floor(np.log10(np.abs(known), out=np.zeros_like(known), where=known != 0))
    factor = 10.0 ** (_DIGITS - 1 - size)
    rounded = np.full(len(exact), None, object)
    rounded[is_known] = (np.round(known * factor) / factor).tolist()
    result: list[float | None] = rounded.tolist()
    return result
