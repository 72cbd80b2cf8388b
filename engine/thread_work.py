"""Errors of threads, in a form in which a coroutine that waits for the thread's work can be given them."""

from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import TypeVar

_T = TypeVar("_T")


def as_exception(error: BaseException) -> Exception:
    """The error that a coroutine is given for *error* of a thread: itself, or a RuntimeError that names it.

    A coroutine that is given StopIteration waits for ever, takes any CancelledError for its own, and what is no
    Exception, such as SystemExit, would end the event loop.
    """
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, CancelledError)):
        return error
    named = RuntimeError(f"{type(error).__name__}: {error}")
    named.__cause__ = error
    return named


def guarded(work: Callable[[], _T]) -> Callable[[], _T]:
    """*work*, made to raise only what a coroutine can be given."""

    def guarded_work() -> _T:
        try:
            return work()
        except BaseException as error:  # the thread's top: its pool keeps the thread
            if (named := as_exception(error)) is error:
                raise
            raise named from error

    return guarded_work
