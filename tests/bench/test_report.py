"""The commit that a benchmark's result names: marked where the tree has changes that may have changed the result."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RESULT, MEASURED, NEW = "bench/results/store.json", "measured.py", "bench/results/new.json"
TEST, USED = "tests/store/test_store.py", "tests/support/blocks.py"  # no benchmark imports a test


def output_of(folder: Path, command: Sequence[str]) -> str:
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with a benchmark's report, a result, and a file that is measured, all committed."""
    (tmp_path / "bench" / "results").mkdir(parents=True)
    for name in ("__init__.py", "report.py"):
        shutil.copy(REPOSITORY / "bench" / name, tmp_path / "bench")
    for name in (RESULT, MEASURED, TEST, USED):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    author = ("-c", "user.name=A", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false")
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "one"]):
        output_of(tmp_path, ["git", *command])
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "mark"),
    [([], ""), ([RESULT], ""), ([NEW], ""), ([MEASURED], "-dirty"), ([RESULT, MEASURED], "-dirty")],
    ids=["nothing", "a result", "a new result", "what is measured", "both"],
)
def test_a_commit_is_marked_when_anything_but_results_was_changed(tree: Path, changed: list[str], mark: str) -> None:
    for name in changed:
        (tree / name).write_text("2\n")

    told = output_of(tree, [sys.executable, "-c", "from bench.report import commit; print(commit())"])

    assert told == output_of(tree, ["git", "rev-parse", "--short", "HEAD"]) + mark


MEASURED_HERE = "import sys; from bench.report import is_measured_here; print(is_measured_here(sys.argv[1]))"


def commit_all(tree: Path) -> None:
    author = ("-c", "user.name=A", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false")
    output_of(tree, ["git", "add", "."])
    output_of(tree, ["git", *author, "commit", "-q", "-m", "another"])


@pytest.mark.parametrize(
    ("changed", "is_valid"),
    [([], True), ([RESULT], True), ([NEW], True), ([MEASURED], False), ([RESULT, MEASURED], False)],
    ids=["nothing", "a result", "a new result", "what is measured", "both"],
)
@pytest.mark.parametrize("is_committed", [True, False], ids=["committed", "uncommitted"])
def test_a_result_stays_valid_while_nothing_that_decides_it_changes(
    tree: Path, changed: list[str], is_valid: bool, is_committed: bool
) -> None:
    measured = output_of(tree, ["git", "rev-parse", "--short", "HEAD"])
    for name in changed:
        (tree / name).write_text("2\n")
    if changed and is_committed:
        commit_all(tree)

    assert output_of(tree, [sys.executable, "-c", MEASURED_HERE, measured]) == str(is_valid)


@pytest.mark.parametrize(
    ("changed", "is_valid"), [([TEST, "docs/faq.md", "README.md"], True), ([USED], False), ([TEST, USED], False)]
)
def test_a_commit_of_tests_and_pages_leaves_results_valid(tree: Path, changed: list[str], is_valid: bool) -> None:
    measured = output_of(tree, ["git", "rev-parse", "--short", "HEAD"])
    (tree / "docs").mkdir()
    for name in changed:
        (tree / name).write_text("2\n")
    commit_all(tree)

    assert output_of(tree, [sys.executable, "-c", MEASURED_HERE, measured]) == str(is_valid)


@pytest.mark.parametrize("measured", ["", "unknown", "0123456", "HEAD-dirty"])
def test_a_result_of_a_commit_that_is_not_known_is_not_valid(tree: Path, measured: str) -> None:
    assert output_of(tree, [sys.executable, "-c", MEASURED_HERE, measured]) == "False"


def test_without_a_repository_the_commit_is_unknown(tree: Path) -> None:
    shutil.rmtree(tree / ".git")

    assert output_of(tree, [sys.executable, "-c", "from bench.report import commit; print(commit())"]) == "unknown"


PUBLISH = "from bench.report import Row, publish; publish('it', [Row('a', 1.0, '')], as_json=True)"


@pytest.mark.parametrize(("file", "is_refused"), [(NEW, True), ("elsewhere.json", False)])
def test_a_dirty_tree_writes_no_result(tree: Path, file: str, is_refused: bool) -> None:
    (tree / MEASURED).write_text("2\n")

    with (tree / file).open("w") as target:
        done = subprocess.run(
            [sys.executable, "-c", PUBLISH], cwd=tree, stdout=target, stderr=subprocess.PIPE, text=True, check=False
        )

    assert (done.returncode, (tree / file).read_text() == "") == (int(is_refused), is_refused)
    assert ("-dirty; commit its changes" in done.stderr) == is_refused


def test_a_clean_tree_writes_a_result_with_commit_processor_and_cores(tree: Path) -> None:
    with (tree / NEW).open("w") as target:
        subprocess.run([sys.executable, "-c", PUBLISH], cwd=tree, stdout=target, check=True)

    result = json.loads((tree / NEW).read_text())
    assert result["commit"] == output_of(tree, ["git", "rev-parse", "--short", "HEAD"])
    assert f", {len(os.sched_getaffinity(0))} cores, " in result["machine"]
