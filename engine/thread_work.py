"""Conversion of thread errors into exceptions that are safe to raise in a waiting coroutine."""

from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import TypeVar

_T = TypeVar("_T")


def coroutine_safe(error: BaseException) -> Exception:
    """Return *error* if it is safe to raise in a coroutine, otherwise a RuntimeError that names it.

    StopIteration would make the coroutine wait for ever. A CancelledError would look as if the coroutine itself were
    cancelled. A BaseException such as SystemExit would end the event loop.
    """
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, CancelledError)):
        return error
    named = RuntimeError(f"{type(error).__name__}: {error}")
    named.__cause__ = error
    return named


def guarded(work: Callable[[], _T]) -> Callable[[], _T]:
    """Wrap *work* so that it raises only errors that are safe to raise in a coroutine."""

    def guarded_work() -> _T:
        try:
            return work()
        except BaseException as error:  # top of the thread: the pool's thread must survive
            if (named := coroutine_safe(error)) is error:
                raise
            raise named from error

    return guarded_work
