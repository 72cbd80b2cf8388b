"""A sample of a server's state at one moment: numbers for the history, and other data for the viewers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

# The column that is 1 in the first row after a start of the server, else 0. `Dashboard` fills it.
START = "process.start"

Row = npt.NDArray[np.float64]  # [num_columns], NaN for unknown values


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of a server at one moment.

    *totals* (counts since the start) and *levels* (current values) map columns of the history to numbers. *facts* are
    other data for the viewers, as JSON values.
    """

    at: float  # in seconds since the Unix epoch
    monotonic_s: float  # the same moment by a monotonic clock
    totals: Mapping[str, float] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, object] = field(default_factory=dict)

    def values(self, columns: Sequence[str]) -> Row:
        """Return the totals and levels in the order of *columns*, and NaN for columns without a value."""
        both = {**self.totals, **self.levels}
        return np.array([both.get(column, np.nan) for column in columns], np.float64)


class Rates:
    """A converter of samples to rows of the history. Totals become rates per second, and levels stay unchanged."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = tuple(columns)
        self._before: Sample | None = None

    @property
    def is_rate(self) -> npt.NDArray[np.bool_]:
        """Mask of the columns that hold rates, not levels, `[num_columns]`. All False before the first sample."""
        totals = {} if self._before is None else self._before.totals
        return np.array([column in totals for column in self._columns], np.bool_)

    def row(self, sample: Sample) -> Row:
        """Return the history's row for *sample*: its levels, and the rates of its totals since the last sample.

        A rate is NaN in the first row, and after a reset of its counter. The time since the last sample is rounded to
        whole seconds. So the sum of a rate over all seconds is the growth of the total.
        """
        before, self._before = self._before, sample
        row = np.array([sample.levels.get(column, np.nan) for column in self._columns], np.float64)
        if before is None:
            return row
        seconds = max(1, round(sample.monotonic_s - before.monotonic_s))
        for number, column in enumerate(self._columns):
            if column in sample.totals and column in before.totals:
                grown = sample.totals[column] - before.totals[column]
                row[number] = grown / seconds if grown >= 0 else np.nan
        return row
