"""`Job`: rows that are stored or loaded together, with the outcome of each row."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvtier.connectors.disk_below.row_index import Row

Outcomes = Future[list[bool]]
"""A future with a success flag for each row of a job. It never has an error, and kvtier never cancels it."""


@dataclass(eq=False, slots=True)
class Job:
    """The rows of one call, whose parts end in any order. The caller is notified once, after the last part."""

    rows: Sequence[Row]
    future: Outcomes = field(default_factory=Future)
    outcomes: list[bool] = field(init=False)
    num_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.outcomes = [False] * len(self.rows)
        self.num_left = len(self.rows)

    @property
    def has_ended(self) -> bool:
        """Whether every row has an outcome."""
        return self.num_left == 0

    def end(self, places: Sequence[int], is_good: Sequence[bool]) -> None:
        """Record the outcomes of the rows at *places*. Each row ends once."""
        for place, good in zip(places, is_good, strict=True):
            self.outcomes[place] = good
        self.num_left -= len(places)

    def tell(self) -> None:
        """Set the result of the future, which calls the caller's callbacks with the outcomes."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(self.outcomes)
