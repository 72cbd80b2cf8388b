"""Saving of the dashboard's history to a file, in threads, so that a slow disk does not delay the server."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, TypeVar

from kvtier.engine.config import DashboardConfig, DiskConfig
from kvtier.engine.thread_work import coroutine_safe
from kvtier.web.dashboard.history import RESOLUTIONS, History, Place
from kvtier.web.dashboard.ring_file import BadFile, RingFile, Shape

log = logging.getLogger(__name__)

CLOSE_S = 2.0  # max time to wait for the last rows when the server stops
_LOOK_S = 0.01  # polling interval while waiting

_T = TypeVar("_T")


class Keeper(Protocol):
    """Storage for a history: a file (`HistoryKeeper`), or none (`NoKeeper`). Owned by the event loop."""

    async def read(self) -> History | None:
        """Return the dashboard's history that an earlier process saved, empty if the file is new.

        Returns None if no file is configured, or if the file cannot be read.
        """

    def save(self, history: History) -> None:
        """Start saving the new rows of the history. Return at once."""

    async def close(self, history: History) -> None:
        """Save the new rows, and close the file."""


def history_path(dashboard: DashboardConfig, disk: DiskConfig | None) -> Path | None:
    """Return the path of the history's file: the configured path, or else one next to the disk store's folder.

    Returns None if neither is configured. Then the history is not saved.
    """
    if dashboard.path is not None:
        return Path(dashboard.path)
    if disk is None:
        return None
    store = Path(disk.path)
    return store.with_name(f"{store.name}-history")


def keeper_of(columns: Sequence[str], path: Path | None) -> Keeper:
    """Return the keeper that saves the dashboard's history to the file *path*, or nowhere if *path* is None.

    *columns* are the names of the values in each row of the history.
    """
    return NoKeeper() if path is None else HistoryKeeper(path, Shape(columns, RESOLUTIONS))


class NoKeeper:
    """A keeper that saves nothing, so the history ends with the process."""

    async def read(self) -> History | None:
        return None

    def save(self, history: History) -> None:
        """Do nothing."""

    async def close(self, history: History) -> None:
        """Do nothing."""


class HistoryKeeper:
    """A keeper that saves the dashboard's history to a file (`RingFile`).

    Threads read and write the file, so that the server never waits for the disk. If the file cannot be written, the
    history is not saved, and one line in the log says why.
    """

    def __init__(self, path: Path, shape: Shape, open_file: Callable[[Path, Shape], RingFile] = RingFile) -> None:
        """Create a keeper. *open_file* is called in a thread."""
        self._path = path
        self._open_file = open_file
        self._shape = shape
        self._file: RingFile | None = None
        self._reading: Future[History | None] | None = None
        self._writing: Future[None] | None = None
        self._unsaved: set[Place] = set()
        self._has_failed = False

    async def read(self) -> History | None:
        """Return the dashboard's history in the file; None if the file is unreadable or another process uses it."""
        self._reading = in_daemon(self._open)
        try:
            return await asyncio.wrap_future(self._reading)
        except BadFile as error:
            log.warning("dashboard: cannot read the history %s (%s); starting a new one", self._path, error)
        except BlockingIOError:
            self._fail("another process uses the file; give [dashboard] another path")
        except (OSError, ValueError, MemoryError) as error:
            self._fail(str(error))
        return None

    def save(self, history: History) -> None:
        """Start writing the new rows. If an earlier write is in progress, the new rows wait for the next call."""
        if self._has_failed:
            return
        self._unsaved |= history.take_unsaved()
        file = self._file
        if file is None or self._is_busy or not self._unsaved:
            return
        if self._writing is not None and (error := self._writing.exception()) is not None:
            self._fail(str(error))
            return
        places, self._unsaved = sorted(self._unsaved), set()
        rows = [(self._shape.offset(place), self._shape.encoded(history, place)) for place in places]
        self._writing = in_daemon(lambda: file.write(rows))

    async def close(self, history: History) -> None:
        """Write the new rows and close the file.

        Waits at most `CLOSE_S` for a read or write in progress, and as long again for the write of the new rows.
        """
        await self._wait()
        self.save(history)
        await self._wait()
        if self._file is not None and not self._is_busy:
            self._file.close()

    @property
    def _is_busy(self) -> bool:
        return any(each is not None and not each.done() for each in (self._reading, self._writing))

    async def _wait(self) -> None:
        """Wait at most `CLOSE_S` for the read or write in progress."""
        give_up_at = time.monotonic() + CLOSE_S
        while self._is_busy and time.monotonic() < give_up_at:
            await asyncio.sleep(_LOOK_S)

    def _open(self) -> History | None:
        file = self._open_file(self._path, self._shape)
        self._file = file
        found, num_damaged = file.read()
        if num_damaged:
            log.warning("dashboard: skipped %d damaged rows of the history %s", num_damaged, self._path)
        return found

    def _fail(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            log.warning("dashboard: the history is not saved to %s: %s", self._path, why)


def in_daemon(work: Callable[[], _T]) -> "Future[_T]":
    """Run *work* in a daemon thread, which does not delay the end of the process. Return a future of the result."""
    result: Future[_T] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # top of the thread, so the future gets all errors
            result.set_exception(coroutine_safe(error))

    threading.Thread(target=run, name="kvtier-history", daemon=True).start()
    return result
