"""The list of planted bugs keeps up with the source. `make planted-bugs` itself takes too long for each change."""

import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BUGS = runpy.run_path(str(ROOT / "tests" / "planted_bugs.py"))["BUGS"]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_a_planted_bug_has_its_place_in_the_source_and_a_test_that_exists(bug: Any) -> None:
    source = ROOT / "kvtier" / bug.file
    test, _, name = bug.tests.partition("::")

    assert source.read_text().count(bug.right) == 1, f"mend the entry: {bug.file} has changed"
    assert bug.wrong != bug.right
    assert (ROOT / test).exists(), f"mend the entry: there is no {test}"
    assert not name or f"def {name.partition('[')[0]}(" in (ROOT / test).read_text()


def test_no_planted_bug_is_there_twice() -> None:
    assert [what for what, count in Counter(bug.what for bug in BUGS).items() if count > 1] == []
