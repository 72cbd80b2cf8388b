"""An error of the connector's own: logged and counted once, never raised, and the connector rests."""

import logging

import pytest
from chaos import FakeClock

from kvtier.connectors.guard import REST_S, Guard


def failing() -> int:
    raise ZeroDivisionError("of its own")


def test_an_error_is_the_fallback_and_hooks_rest_for_a_while() -> None:
    clock, given_up = FakeClock(), []
    guard = Guard(lambda: given_up.append(1), clock)

    assert guard.run(lambda: 3, 0) == 3
    assert guard.run(failing, 0) == 0
    assert guard.run(lambda: 3, 0) == 0
    assert guard.run_always(lambda: 3, 0) == 3
    clock.now += REST_S
    assert guard.run(lambda: 3, 0) == 3
    assert (guard.num_errors, given_up) == (1, [1])


def test_an_error_is_logged_once_with_where_it_came_from(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard(lambda: None, FakeClock())

    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            guard.run_always(failing, None)

    (record,) = caplog.records
    assert "in failing" in caplog.text
    assert "ZeroDivisionError: of its own" in caplog.text
    assert record.exc_info is not None
    assert guard.num_errors == 3


def test_what_cannot_even_be_let_go_raises_nothing() -> None:
    guard = Guard(failing, FakeClock())

    assert guard.run_always(failing, "fallback") == "fallback"
