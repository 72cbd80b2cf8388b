"""The history of the page: rows over time, in several resolutions, in memory and on disk."""

import math
from pathlib import Path

import numpy as np
import pytest

from kvtier.web.dashboard.history import NEVER, RESOLUTIONS, History, Resolution
from kvtier.web.dashboard.ring_file import BadFile, RingFile, Shape
from kvtier.web.dashboard.sample import Rates, Sample

COLUMNS = ("tokens", "level")
SMALL = (Resolution(1, 10), Resolution(5, 8))
T0 = 1_700_000_000.0  # divisible by 100


def row(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


def shown(history: History, seconds: float, now: float, column: str = "tokens") -> list[float | None]:
    stretch = history.stretch(seconds, now)
    values = stretch.rows[:, stretch.columns.index(column)].tolist()
    return [None if math.isnan(value) else value for value in values]


def num_rows(history: History) -> int:
    return sum(np.count_nonzero(ring.stamps != NEVER) for ring in history.rings)


def test_a_rate_is_what_a_total_has_grown_by_and_a_level_is_as_it_is() -> None:
    rates = Rates(COLUMNS)

    first = rates.row(Sample(T0, 10.0, {"tokens": 100}, {"level": 7}))
    second = rates.row(Sample(T0 + 2, 12.0, {"tokens": 150}, {"level": 8}))

    assert np.isnan(first[0])
    assert (first[1], second.tolist()) == (7, [25.0, 8.0])


def test_rates_of_seconds_that_are_not_quite_seconds_add_up_to_what_was_counted() -> None:
    rates = Rates(COLUMNS)
    moments = [(0, 0.0), (30, 0.4), (130, 1.37), (240, 2.41), (540, 5.38)]

    rows = [rates.row(Sample(T0 + at, at, {"tokens": total}))[0] for total, at in moments]

    assert rows[1:] == [30, 100, 110, 100]  # the last one for three seconds


def test_a_total_that_was_counted_anew_has_no_rate() -> None:
    rates = Rates(COLUMNS)
    rates.row(Sample(T0, 10.0, {"tokens": 100}))

    assert np.isnan(rates.row(Sample(T0 + 1, 11.0, {"tokens": 5}))[0])
    assert rates.row(Sample(T0 + 2, 12.0, {"tokens": 9}))[0] == 4


def test_time_that_was_set_back_makes_no_rate_wrong() -> None:
    rates = Rates(COLUMNS)
    rates.row(Sample(T0, 10.0, {"tokens": 100}))

    assert rates.row(Sample(T0 - 3600, 11.0, {"tokens": 104}))[0] == 4


def test_seconds_without_a_sample_are_gaps() -> None:
    history = History(COLUMNS, SMALL)
    for second in (0, 1, 4):
        history.add(T0 + second, row(second, 1))

    assert shown(history, 5, T0 + 4) == [0, 1, None, None, 4]


def test_a_gap_does_not_show_what_was_there_a_round_before() -> None:
    history = History(COLUMNS, SMALL)
    for second in (*range(10), 14):
        history.add(T0 + second, row(second, 1))

    assert shown(history, 10, T0 + 14) == [5, 6, 7, 8, 9, None, None, None, None, 14]


def test_coarse_rows_are_the_means_of_fine_ones() -> None:
    history = History(COLUMNS, SMALL)
    for second in range(10):
        history.add(T0 + second, row(second, np.nan))

    assert shown(history, 40, T0 + 9)[-2:] == [2, 7]
    assert shown(history, 40, T0 + 9, "level")[-2:] == [None, None]


def test_what_is_older_than_the_ring_is_gone_and_the_rest_is_in_order() -> None:
    history = History(COLUMNS, SMALL)
    for second in range(25):
        history.add(T0 + second, row(second, 0))

    assert shown(history, 10, T0 + 24) == list(range(15, 25))
    assert shown(history, 40, T0 + 24) == [None, None, None, 2, 7, 12, 17, 22]


def test_a_range_is_shown_in_the_finest_resolution_that_has_all_of_it() -> None:
    history = History(COLUMNS)

    steps = {seconds: history.stretch(seconds, T0).step_s for seconds in (600, 601, 7200, 86_400, 1_209_600, 9e9)}

    assert steps == {600: 1, 601: 10, 7200: 10, 86_400: 60, 1_209_600: 600, 9e9: 600}


def test_a_stretch_ends_with_now() -> None:
    history = History(COLUMNS)
    for seconds in (600, 7200, 86_400, 1_209_600):
        stretch = history.stretch(seconds, T0 + 3)

        assert stretch.times[-1] <= T0 + 3 < stretch.times[-1] + stretch.step_s
        assert len(stretch.times) * stretch.step_s == seconds


def filled(num_seconds: int) -> History:
    history = History(COLUMNS, SMALL)
    for second in range(num_seconds):
        history.add(T0 + second, row(second, -second))
    return history


def saved(path: Path, history: History) -> Shape:
    shape = Shape(history.columns, SMALL)
    with RingFile(path, shape) as file:
        file.read()
        file.write((shape.offset(place), shape.encoded(history, place)) for place in history.take_unsaved())
    return shape


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    history = filled(25)
    shape = saved(tmp_path / "history", history)

    with RingFile(tmp_path / "history", shape) as file:
        found, num_damaged = file.read()

    assert num_damaged == 0
    assert (tmp_path / "history").stat().st_size == shape.num_bytes
    for seconds in (10, 40):
        assert shown(found, seconds, T0 + 24) == shown(history, seconds, T0 + 24)


def test_only_rows_that_are_new_are_to_be_written() -> None:
    history = filled(25)
    history.take_unsaved()
    history.add(T0 + 25, row(1, 1))

    assert len(history.take_unsaved()) == len(SMALL)
    assert history.take_unsaved() == set()


@pytest.mark.parametrize("offset", [4096, 4100, 4108, 4112])
def test_a_damaged_row_is_left_out_and_no_other(tmp_path: Path, offset: int) -> None:
    path, history = tmp_path / "history", filled(10)
    shape = saved(path, history)
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x40
    path.write_bytes(content)

    with RingFile(path, shape) as file:
        found, num_damaged = file.read()

    index = int(T0) % 10  # the row at the beginning of the first ring
    assert num_damaged == 1
    assert shown(found, 10, T0 + 9) == [None if second == -index % 10 else second for second in range(10)]


@pytest.mark.parametrize("content", [b"x", b"something else" * 1000, b"kvtier history 1" + b"\xff" * 5000])
def test_a_file_that_is_no_history_is_a_new_one_afterwards(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "history"
    path.write_bytes(content)
    shape = Shape(COLUMNS, SMALL)

    with RingFile(path, shape) as file, pytest.raises(BadFile):
        file.read()
    with RingFile(path, shape) as file:
        found, num_damaged = file.read()

    assert (num_rows(found), num_damaged) == (0, 0)


@pytest.mark.parametrize("num_bytes", [1, 20, 4000, 4096, 4200, 4300])
def test_a_file_that_was_cut_off_gives_what_is_whole(tmp_path: Path, num_bytes: int) -> None:
    path, history = tmp_path / "history", filled(25)
    shape = saved(path, history)
    path.write_bytes(path.read_bytes()[:num_bytes])

    with RingFile(path, shape) as file:
        try:
            found, _ = file.read()
        except BadFile:
            assert num_bytes < 4096
            return

    whole = max(0, num_bytes - 4096) // shape.record.itemsize
    assert num_rows(found) == whole


def test_a_file_with_other_columns_is_read_by_their_names(tmp_path: Path) -> None:
    path = tmp_path / "history"
    saved(path, filled(10))
    newer = History(("level", "new"), SMALL)

    with RingFile(path, Shape(newer.columns, SMALL)) as file:
        found, _ = file.read()
    newer.take_in(found, T0 + 9)
    saved(path, newer)
    with RingFile(path, Shape(newer.columns, SMALL)) as file:
        again, _ = file.read()

    for history in (newer, again):
        assert shown(history, 3, T0 + 9, "level") == [-7, -8, -9]
        assert shown(history, 3, T0 + 9, "new") == [None, None, None]


def test_what_a_new_history_has_already_is_not_replaced_by_an_earlier_one() -> None:
    newer = History(COLUMNS, SMALL)
    newer.add(T0 + 9, row(100, 0))

    newer.take_in(filled(10), T0 + 9)

    assert shown(newer, 3, T0 + 9) == [7, 8, 100]


def test_rows_of_the_future_are_left_out() -> None:
    newer = History(COLUMNS, SMALL)

    newer.take_in(filled(10), T0 + 4)

    assert shown(newer, 10, T0 + 9) == [0, 1, 2, 3, 4, None, None, None, None, None]


def test_a_second_process_does_not_get_the_file(tmp_path: Path) -> None:
    shape = Shape(COLUMNS, SMALL)

    with RingFile(tmp_path / "history", shape), pytest.raises(BlockingIOError):
        RingFile(tmp_path / "history", shape)


def test_the_resolutions_reach_over_two_weeks_in_two_and_a_half_megabytes() -> None:
    shape = Shape([f"column {number}" for number in range(125)], RESOLUTIONS)  # a server has 123 to 125

    assert RESOLUTIONS[-1].span_s == 14 * 86_400
    assert shape.num_bytes < 2_500_000
