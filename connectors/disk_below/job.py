"""Job: rows that are stored or loaded together, and what became of each."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvtier.connectors.disk_below.row_index import Row

Outcomes = Future[list[bool]]
"""For each row of a job whether it went well. It never has an error, and is never cancelled from within."""


@dataclass(eq=False, slots=True)
class Job:
    """Rows of one call, whose parts end in any order. When the last has, the caller is told of all of them, once."""

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
        """Take in what became of the rows at *places*, each of which ends once."""
        for place, good in zip(places, is_good, strict=True):
            self.outcomes[place] = good
        self.num_left -= len(places)

    def tell(self) -> None:
        """Tell the caller. What it has asked to be called with the outcomes runs in here."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(self.outcomes)
