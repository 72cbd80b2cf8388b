"""Asking before something is deleted: on a real terminal."""

import os
import pty
import sys

import pytest

from kvtier.cli.user_input import confirm


def typed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have somebody type *text* at the terminal that is asked on."""
    keyboard, terminal = pty.openpty()
    os.write(keyboard, text.encode())
    monkeypatch.setattr(sys, "stdin", os.fdopen(terminal))


@pytest.mark.parametrize("answer", ["y\n", "Yes\n"])
def test_yes_goes_on_and_shows_what_it_is_about(
    answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(answer, monkeypatch)

    confirm("delete all?", "three records")

    assert capsys.readouterr().err == "three records\ndelete all? [y/N] "


@pytest.mark.parametrize("answer", ["n\n", "\n", "yes please\n"])
def test_anything_else_deletes_nothing(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    typed(answer, monkeypatch)

    with pytest.raises(RuntimeError, match="nothing was deleted"):
        confirm("delete all?")
