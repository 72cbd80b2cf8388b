"""What a newcomer opens to follow one block: the tracer that says so sees the whole way."""

import sys
from pathlib import Path

import pytest
from block_trip import functions, main, trip
from trip_page import PAGE, generated_page, named_functions


def test_a_block_is_followed_down_and_up_again(tmp_path: Path) -> None:
    legs = trip(tmp_path / "store")

    assert "tiers/lower/disk_spill.py" in legs["spill to host and disk"].files
    assert "store/lmdb/reader.py" in legs["look up, promote, release"].files
    assert "store/lmdb/reader.py" not in legs["compute, commit, release"].files


def test_its_functions_come_in_the_order_of_the_trip_with_their_lines_of_code(tmp_path: Path) -> None:
    passed = functions(trip(tmp_path / "store"))

    names = [function.name for function in passed]
    deeds = ["allocate", "commit", "release", "lookup", "promote"]
    places = [names.index(f"TieredCache.{deed}") for deed in deeds]
    assert places == sorted(places)
    assert len(passed) == len({(function.file, function.name) for function in passed})
    (poll,) = [function for function in passed if function.name == "TieredCache.poll"]
    assert (poll.file, poll.num_lines) == ("tiers/cache.py", 2)  # its docstring is no code


def test_the_sums_of_the_functions_are_those_of_the_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["block_trip.py", "--functions"])

    main()

    *rows, above, below = capsys.readouterr().out.splitlines()
    is_below = [row.split()[1].startswith(("tiers/lower/", "store/")) for row in rows]
    for line, side in ((above, False), (below, True)):
        own = [int(row.split()[0]) for row, is_there in zip(rows, is_below, strict=True) if is_there == side]
        num_functions, num_lines = (int(word) for word in line.split() if word.isdecimal())
        assert num_functions == len(own) > 20
        assert num_lines == sum(own)


def test_the_page_of_the_trip_is_as_its_generator_writes_it_now() -> None:
    assert PAGE.read_text() == generated_page(), "run python tests/support/trip_page.py"


def test_the_trip_passes_each_function_that_its_page_quotes(tmp_path: Path) -> None:
    passed = [f"{function.file}: {function.name}" for function in functions(trip(tmp_path / "store"))]

    assert [function for function in named_functions() if function not in passed] == []
