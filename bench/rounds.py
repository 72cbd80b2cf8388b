"""Measures several ways to do the same in rounds, in random order, and makes rows of the results."""

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.report import Row

Work = Callable[[], object]
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def nothing() -> None:
    """Do nothing: the default end of a `Side`."""


@dataclass(frozen=True)
class Side:
    """One way to move the same bytes: *prepare* makes the next work, *after* follows it; neither is timed."""

    name: str
    prepare: Callable[[], Work]
    after: Callable[[], None] = nothing


def ready(work: Work) -> Callable[[], Work]:
    """For a `Side` that has nothing to prepare: the same *work* in every round."""
    return lambda: work


def seconds(work: Work) -> float:
    """Seconds that *work* takes, with garbage collection off."""
    gc.disable()
    started = time.perf_counter()
    work()
    took = time.perf_counter() - started
    gc.enable()
    return took


def alternate(sides: Sequence[Side], num_rounds: int, num_batches: int = 1) -> dict[str, list[float]]:
    """Seconds that each side takes in each round. A first round is left out."""
    rng = random.Random(0)
    times: dict[str, list[float]] = {side.name: [] for side in sides}
    for round_id in range(num_rounds + 1):
        sums = dict.fromkeys(times, 0.0)
        for _ in range(num_batches):
            for side in rng.sample(list(sides), len(sides)):
                work = side.prepare()
                sums[side.name] += seconds(work)
                side.after()
        if round_id:
            for name, took in sums.items():
                times[name].append(took)
    return times


def compared(
    name: str,
    ours: Sequence[float],
    others: tuple[str, Sequence[float]],
    num_bytes: int,
    minimum: float | None,
) -> list[Row]:
    """Rows that compare two sides which moved *num_bytes* in each round: speeds, median ratio, and its spread.

    *others* are the baseline's name and seconds; *minimum* is the promised ratio, None without a promise.
    """
    label, baseline = others
    ratios = [theirs / mine for theirs, mine in zip(baseline, ours, strict=True)]
    return [
        Row(f"{name}: {label}", gb_per_s(num_bytes, baseline), "GB/s"),
        Row(f"{name}: kvtier", gb_per_s(num_bytes, ours), "GB/s"),
        at_least(f"{name}: kvtier / {label}", statistics.median(ratios), minimum),
        Row(f"{name}: spread of that", spread(ratios), "%"),
    ]


def ratio_of(ours: Sequence[float], others: Sequence[float]) -> float:
    """Median over the rounds of the seconds of *ours* over those of *others*."""
    return statistics.median(mine / theirs for mine, theirs in zip(ours, others, strict=True))


def gb_per_s(num_bytes: int, times: Sequence[float]) -> float:
    """Speed at the median of *times*, in 10^9 bytes a second."""
    return num_bytes / statistics.median(times) / 1e9


def at_least(name: str, ratio: float, minimum: float | None, varies: bool = True) -> Row:
    """The row of a ratio that was promised to be at least *minimum*, or of one without a promise (None).

    It is a ratio of speeds unless *varies* is false; see `Row`.
    """
    if minimum is None:
        return Row(name, ratio, "")
    return Row(name, ratio, "", f">= {minimum:g}", ratio >= minimum, varies)


def at_most(name: str, value: float, unit: str, limit: float, varies: bool = True) -> Row:
    """The row of a value that was promised to be at most *limit*.

    It is a time, or a ratio of times, unless *varies* is false; see `Row`.
    """
    return Row(name, value, unit, f"<= {limit:g}", value <= limit, varies)


def never(name: str, count: int, unit: str = "") -> Row:
    """The row of the count of a fault that may not happen on any machine."""
    return Row(name, count, unit, "0", count == 0)


def spread(values: Sequence[float]) -> float:
    """Distance from the first quartile to the third, in per cent of the median."""
    quartiles = statistics.quantiles(values, n=4)
    return 100 * (quartiles[2] - quartiles[0]) / quartiles[1]


def in_words(num_bytes: int) -> str:
    """A block's size in words: "64 KiB"."""
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


@dataclass(frozen=True)
class Choice:
    """The rows that --only asks for: those whose names begin with *only*."""

    only: str

    def has(self, beginning: str) -> bool:
        """Whether rows whose names begin with *beginning* may be asked for."""
        return beginning.startswith(self.only) or self.only.startswith(beginning)

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """Those of *rows* that are asked for."""
        return [row for row in rows if row.name.startswith(self.only)]
