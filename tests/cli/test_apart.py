"""Work in a process of its own that fails there; `test_store_commands` tests the rest."""

import errno
from pathlib import Path

import pytest

from kvtier.cli.subprocess_call import call_in_process


class Unsendable(Exception):
    """A class whose objects can be pickled and not unpickled."""

    def __init__(self, what: str, when: str) -> None:
        super().__init__(f"{what} {when}")


def fail(error: str) -> None:
    raise eval(error)


pytestmark = pytest.mark.usefixtures("for_children")


@pytest.mark.parametrize("error", ["ConnectionAbortedError(103, 'oh')", "EOFError('oh')"])
def test_an_error_of_the_functions_is_no_crash(error: str) -> None:
    with pytest.raises(type(eval(error)), match="oh"):
        call_in_process(fail, error)


def test_an_error_that_cannot_be_sent_arrives_as_an_os_error_with_its_text() -> None:
    with pytest.raises(OSError, match="Unsendable: too much at noon") as raised:
        call_in_process(fail, "Unsendable('too much', 'at noon')")

    assert raised.value.errno == errno.EIO


def test_a_file_in_the_working_directory_is_no_module_of_its(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tempfile.py").write_text("raise SystemExit('not the tempfile you wanted')")
    monkeypatch.chdir(tmp_path)

    assert call_in_process(sorted, [3, 1, 2]) == [1, 2, 3]
