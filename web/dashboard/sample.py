"""Sample: what a server is at one moment, in numbers that are kept and facts that are only shown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float64]  # [num_columns], NaN for what is not known


@dataclass(frozen=True, slots=True)
class Sample:
    """*totals* count since the start, *levels* are as they are now; both by column. *facts* are for people, as JSON has
    them, and are not kept."""

    at: float  # in seconds since the Unix epoch
    monotonic_s: float  # by a clock that nobody sets
    totals: Mapping[str, float] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, object] = field(default_factory=dict)

    def values(self, columns: Sequence[str]) -> Row:
        """The numbers as they are, in the order of the *columns*."""
        both = {**self.totals, **self.levels}
        return np.array([both.get(column, np.nan) for column in columns], np.float64)

    def plus(self, other: "Sample") -> "Sample":
        """This sample with the other's numbers and facts beside its own."""
        return Sample(
            self.at,
            self.monotonic_s,
            {**self.totals, **other.totals},
            {**self.levels, **other.levels},
            {**self.facts, **other.facts},
        )


class Rates:
    """Turns samples into rows of a history: levels as they are, totals as how fast they grow, per second."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = tuple(columns)
        self._before: Sample | None = None

    @property
    def is_rate(self) -> npt.NDArray[np.bool_]:
        """Which columns were totals in the last sample, `[num_columns]`."""
        totals = {} if self._before is None else self._before.totals
        return np.array([column in totals for column in self._columns], np.bool_)

    def row(self, sample: Sample) -> Row:
        """The row of the *sample*. A rate is not known at first, and after a total has become smaller: who counted it
        has started anew. Rates are by whole seconds, so that those of all seconds add up to what was counted."""
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
