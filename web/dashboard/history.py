"""The dashboard's history: ring buffers with rows of numbers over time, one buffer for each resolution."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.web.dashboard.sample import Row


class Resolution(NamedTuple):
    """A resolution of the history: the seconds that each row covers, and the number of rows."""

    step_s: int
    num_rows: int

    @property
    def span_s(self) -> int:
        """Length of the history at this resolution, in seconds."""
        return self.step_s * self.num_rows


# Ten minutes, two hours, 25 hours and two weeks, finest first.
RESOLUTIONS = (Resolution(1, 600), Resolution(10, 720), Resolution(60, 1500), Resolution(600, 2016))
NEVER = -1

Rows = npt.NDArray[np.float32]  # [num_rows, num_columns]


class Place(NamedTuple):
    """The position of a row in a history: the index of the row's ring buffer, and the row's index in that buffer."""

    ring: int
    line: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """A copy of the history's rows for a period, with one row for every time step. Unknown values are NaN."""

    step_s: int
    start: int  # start of the first row, in seconds since the Unix epoch
    columns: tuple[str, ...]
    rows: Rows

    @property
    def times(self) -> range:
        """Start time of each row of `rows`, in seconds since the Unix epoch."""
        return range(self.start, self.start + self.step_s * len(self.rows), self.step_s)


class Ring:
    """A ring buffer with one row of numbers for each of the last time steps, which all have the same length.

    A row stays at its index until it is overwritten.
    """

    def __init__(self, resolution: Resolution, num_columns: int) -> None:
        self.resolution = resolution
        self.stamps = np.full(resolution.num_rows, NEVER, np.int64)  # time step of each row, counted from the epoch
        self.rows = np.full((resolution.num_rows, num_columns), np.nan, np.float32)

    def stamp(self, at: float) -> int:
        """Return the number of the time step that contains *at*, counted from the Unix epoch."""
        return int(at // self.resolution.step_s)

    def put(self, stamp: int, row: Row) -> int:
        """Store *row*, the dashboard's values for the time step with number *stamp*. Return its index in the buffer."""
        index = stamp % self.resolution.num_rows
        self.stamps[index] = stamp
        self.rows[index] = row
        return index

    def last(self, num_steps: int, until: int) -> Rows:
        """Return the rows of the last *num_steps* time steps up to *until*, oldest first. Missing rows are NaN."""
        wanted = np.arange(until - num_steps + 1, until + 1)
        places = wanted % self.resolution.num_rows
        found: Rows = self.rows[places].copy()
        found[self.stamps[places] != wanted] = np.nan
        return found


class _Mean:
    """The mean of the rows of values that were added within one time step. NaN values do not count."""

    def __init__(self, num_columns: int) -> None:
        self.stamp = NEVER
        self._sums, self._counts = np.zeros(num_columns), np.zeros(num_columns)

    def with_row(self, stamp: int, row: Row) -> Row:
        """Add a row and return the mean. A row of another time step starts a new mean."""
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
    """A dashboard's history, with a ring buffer of rows for each resolution. Owned by the event loop.

    It also records which rows have not been saved to a file yet.
    """

    def __init__(self, columns: Sequence[str], resolutions: Sequence[Resolution] = RESOLUTIONS) -> None:
        self.columns = tuple(columns)
        self.rings = tuple(Ring(resolution, len(self.columns)) for resolution in resolutions)
        self._means = tuple(_Mean(len(self.columns)) for _ in self.rings)
        self.num_changes = 0  # a cached response is valid until this changes
        self._unsaved: set[Place] = set()

    def add(self, at: float, row: Row) -> None:
        """Add *row*, the dashboard's values at the Unix time *at*, to the ring buffer of each time resolution."""
        self.num_changes += 1
        for number, (ring, mean) in enumerate(zip(self.rings, self._means, strict=True)):
            stamp = ring.stamp(at)
            self._unsaved.add(Place(number, ring.put(stamp, mean.with_row(stamp, row))))

    def take_in(self, earlier: "History", now: float) -> int:
        """Copy the rows of an *earlier* history for the times that this history has no rows for.

        Columns are matched by name. Rows later than *now* are not copied, because the clock was wrong then. Returns
        approximately how many seconds the copied rows cover.
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
            if earlier.columns != self.columns:  # the file was recreated for the new columns and lacks these rows
                self._unsaved |= {Place(number, int(line)) for line in np.flatnonzero(takes)}
        return taken_s

    def stretch(self, seconds: float, now: float) -> Stretch:
        """Return the rows of the last *seconds*, in the finest resolution that reaches back so far.

        If no resolution reaches back so far, return all rows of the coarsest one.
        """
        ring = next((each for each in self.rings if each.resolution.span_s >= seconds), self.rings[-1])
        step_s, until = ring.resolution.step_s, ring.stamp(now)
        num_steps = min(ring.resolution.num_rows, max(1, int(seconds // step_s)))
        return Stretch(step_s, (until - num_steps + 1) * step_s, self.columns, ring.last(num_steps, until))

    def take_unsaved(self) -> set[Place]:
        """Return the positions of the rows that were written since the last call."""
        unsaved, self._unsaved = self._unsaved, set()
        return unsaved
