"""History: rows of numbers over time, in several resolutions, of a size that never changes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.web.dashboard.sample import Row


class Resolution(NamedTuple):
    """So many rows, each for so many seconds."""

    step_s: int
    num_rows: int

    @property
    def span_s(self) -> int:
        """The seconds that all rows are for."""
        return self.step_s * self.num_rows


# Ten minutes, two hours, a day and a bit, two weeks: finest first.
RESOLUTIONS = (Resolution(1, 600), Resolution(10, 720), Resolution(60, 1500), Resolution(600, 2016))
NEVER = -1

Rows = npt.NDArray[np.float32]  # [num_rows, num_columns]


class Place(NamedTuple):
    """Where a row is: in which ring, and which of its rows."""

    ring: int
    line: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """The rows of a stretch of time by value, without gaps: what is not known is NaN."""

    step_s: int
    start: int  # of the first row, in seconds since the Unix epoch
    columns: tuple[str, ...]
    rows: Rows

    @property
    def times(self) -> range:
        """When each row begins."""
        return range(self.start, self.start + self.step_s * len(self.rows), self.step_s)


class Ring:
    """The newest rows of one resolution. The row of a time has one place, so that nothing is ever moved."""

    def __init__(self, resolution: Resolution, num_columns: int) -> None:
        self.resolution = resolution
        self.stamps = np.full(resolution.num_rows, NEVER, np.int64)  # which step of time since the epoch a row is of
        self.rows = np.full((resolution.num_rows, num_columns), np.nan, np.float32)

    def stamp(self, at: float) -> int:
        """The step of time that *at* is in."""
        return int(at // self.resolution.step_s)

    def put(self, stamp: int, row: Row) -> int:
        """Write the row of a step; its index."""
        index = stamp % self.resolution.num_rows
        self.stamps[index] = stamp
        self.rows[index] = row
        return index

    def last(self, num_steps: int, until: int) -> Rows:
        """The rows of the last *num_steps* steps up to *until*, the oldest first."""
        wanted = np.arange(until - num_steps + 1, until + 1)
        places = wanted % self.resolution.num_rows
        found: Rows = self.rows[places].copy()
        found[self.stamps[places] != wanted] = np.nan
        return found


class _Mean:
    """The mean of the rows of one step so far."""

    def __init__(self, num_columns: int) -> None:
        self.stamp = NEVER
        self._sums, self._counts = np.zeros(num_columns), np.zeros(num_columns)

    def with_row(self, stamp: int, row: Row) -> Row:
        """The mean with one row more; a row of another step begins it anew."""
        if stamp != self.stamp:
            self.stamp = stamp
            self._sums[:] = self._counts[:] = 0.0
        is_known = np.isfinite(row)
        self._sums[is_known] += row[is_known]
        self._counts += is_known
        mean = np.full(len(row), np.nan)
        np.divide(self._sums, self._counts, out=mean, where=self._counts > 0)
        return mean


class History:
    """A ring for each resolution. Rows that were written since they were last taken for the disk are known. Owned by
    the event loop."""

    def __init__(self, columns: Sequence[str], resolutions: Sequence[Resolution] = RESOLUTIONS) -> None:
        self.columns = tuple(columns)
        self.rings = tuple(Ring(resolution, len(self.columns)) for resolution in resolutions)
        self._means = tuple(_Mean(len(self.columns)) for _ in self.rings)
        self.num_changes = 0  # an answer made of a history stands until it changes
        self._unsaved: set[Place] = set()

    def add(self, at: float, row: Row) -> None:
        """Take in the row of this moment."""
        self.num_changes += 1
        for number, (ring, mean) in enumerate(zip(self.rings, self._means, strict=True)):
            stamp = ring.stamp(at)
            self._unsaved.add(Place(number, ring.put(stamp, mean.with_row(stamp, row))))

    def take_in(self, earlier: "History", now: float) -> int:
        """Take in the rows of an *earlier* history, by the names of their columns, where this one has none.

        Rows that are later than *now* are left out: a clock was wrong.

        Returns:
            How many seconds the rows that were taken cover, by the finest resolution that is not full of them.
        """
        self.num_changes += 1
        taken_s, is_full = 0, True
        theirs = [column for column in self.columns if column in earlier.columns]
        own_places = [self.columns.index(column) for column in theirs]
        their_places = [earlier.columns.index(column) for column in theirs]
        by_resolution = {ring.resolution: ring for ring in earlier.rings}
        for number, ring in enumerate(self.rings):
            old = by_resolution.get(ring.resolution)
            if old is None:
                continue
            takes = (ring.stamps == NEVER) & (old.stamps != NEVER) & (old.stamps <= ring.stamp(now))
            if is_full:
                taken_s = int(takes.sum()) * ring.resolution.step_s
                is_full = bool(takes.all())
            ring.stamps[takes] = old.stamps[takes]
            ring.rows[np.ix_(takes, own_places)] = old.rows[np.ix_(takes, their_places)]
            if earlier.columns != self.columns:  # on disk there is a file of these columns now, without them
                self._unsaved |= {Place(number, int(line)) for line in np.flatnonzero(takes)}
        return taken_s

    def stretch(self, seconds: float, now: float) -> Stretch:
        """The last *seconds*, in the finest resolution that has them all, or else in the coarsest."""
        ring = next((each for each in self.rings if each.resolution.span_s >= seconds), self.rings[-1])
        step_s, until = ring.resolution.step_s, ring.stamp(now)
        num_steps = min(ring.resolution.num_rows, max(1, int(seconds // step_s)))
        return Stretch(step_s, (until - num_steps + 1) * step_s, self.columns, ring.last(num_steps, until))

    def take_unsaved(self) -> set[Place]:
        """The places of rows that were written since this was last asked."""
        unsaved, self._unsaved = self._unsaved, set()
        return unsaved

    def all_places(self) -> Iterator[Place]:
        """The places of all rows that there are."""
        for number, ring in enumerate(self.rings):
            for index in np.flatnonzero(ring.stamps != NEVER):
                yield Place(number, int(index))
