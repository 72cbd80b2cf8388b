"""A coroutine that is cancelled wherever it waits, one place after the other."""

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any


async def cancelled_at(work: Coroutine[Any, Any, object], number: int, *, late: bool) -> bool:
    """Have *work* cancelled when it waits for the time of that number; False if it ended before, and was not.

    Cancelled at once, or *late*: when what it waits for has come, and it has not been told yet.
    """
    reached = asyncio.Event()
    task = asyncio.create_task(_watched(work, number, late, reached))
    try:
        await task
    except asyncio.CancelledError:
        assert reached.is_set(), "the test itself was cancelled"
    return reached.is_set()


async def _watched(work: Coroutine[Any, Any, object], number: int, late: bool, reached: asyncio.Event) -> None:
    await _stepped(work, number, late, reached)


@types.coroutine
def _stepped(
    work: Coroutine[Any, Any, object], number: int, late: bool, reached: asyncio.Event
) -> Generator[Any, Any, None]:
    task = asyncio.current_task()
    assert task is not None
    error: BaseException | None = None
    while True:
        try:
            future = work.send(None) if error is None else work.throw(error)
        except StopIteration:
            return
        if number == 0:
            reached.set()
            if late and future is not None:
                future.add_done_callback(lambda _: task.cancel())  # before the task hears of it
            else:
                asyncio.get_running_loop().call_soon(task.cancel)
        number -= 1
        error = None
        try:
            yield future
        except BaseException as thrown:  # what the task throws in is the work's
            error = thrown
