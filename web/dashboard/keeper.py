"""HistoryKeeper: keeps a history in a file, by a thread that nobody waits for long. NoKeeper: its double."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, TypeVar

from kvtier.engine.config import DashboardConfig, DiskConfig
from kvtier.engine.thread_work import as_exception
from kvtier.web.dashboard.history import RESOLUTIONS, History, Place
from kvtier.web.dashboard.ring_file import BadFile, RingFile, Shape

log = logging.getLogger(__name__)

CLOSE_S = 2.0  # that the end of a server waits for the last rows …
_LOOK_S = 0.01  # … and how often it looks meanwhile

_T = TypeVar("_T")


class Keeper(Protocol):
    """Keeps a history beyond the process (`HistoryKeeper`), or does not (`NoKeeper`). Owned by the event loop."""

    async def read(self) -> History | None:
        """What was kept before; None if there is nothing that can be read."""

    def save(self, history: History) -> None:
        """Have what is new in the history kept. Returns at once."""

    async def close(self, history: History) -> None:
        """Have what is new kept, and end."""


def history_path(dashboard: DashboardConfig, disk: DiskConfig | None) -> Path | None:
    """The file of the history: as configured, else beside the store's folder; None without a [disk]."""
    if dashboard.path is not None:
        return Path(dashboard.path)
    if disk is None:
        return None
    store = Path(disk.path)
    return store.with_name(f"{store.name}-history")


def keeper_of(columns: Sequence[str], path: Path | None) -> Keeper:
    """A keeper of histories of these columns in that file, or one that keeps nothing."""
    return NoKeeper() if path is None else HistoryKeeper(path, Shape(columns, RESOLUTIONS))


class NoKeeper:
    """Keeps nothing: the history ends with the process."""

    async def read(self) -> History | None:
        """Nothing."""
        return None

    def save(self, history: History) -> None:
        """Keep nothing."""

    async def close(self, history: History) -> None:
        """There is nothing to end."""


class HistoryKeeper:
    """Reads and writes a `RingFile`, one call at a time. A disk that hangs, is full or cannot be written costs the
    history that is kept, one line in the log, and nothing else: a call that has not ended is not waited for."""

    def __init__(self, path: Path, shape: Shape, open_file: Callable[[Path, Shape], RingFile] = RingFile) -> None:
        """*open_file* is called in a thread."""
        self._path = path
        self._open_file = open_file
        self._shape = shape
        self._file: RingFile | None = None
        self._reading: Future[History | None] | None = None
        self._writing: Future[None] | None = None
        self._unsaved: set[Place] = set()
        self._has_failed = False

    async def read(self) -> History | None:
        """What the file has; None for a file that is new, bad, or another process's."""
        self._reading = in_daemon(self._open)
        try:
            return await asyncio.wrap_future(self._reading)
        except BadFile as error:
            log.warning("dashboard: the history %s is not read: %s; it begins anew", self._path, error)
        except BlockingIOError:
            self._fail("another process keeps its own there; give [dashboard] another path")
        except (OSError, ValueError, MemoryError) as error:
            self._fail(str(error))
        return None

    def save(self, history: History) -> None:
        """Have the rows that are new written. While a call before is not done they wait."""
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
        """Write what is new and close the file, if that takes no longer than `CLOSE_S`."""
        await self._wait()
        self.save(history)
        await self._wait()
        if self._file is not None and not self._is_busy:
            self._file.close()

    @property
    def _is_busy(self) -> bool:
        return any(each is not None and not each.done() for each in (self._reading, self._writing))

    async def _wait(self) -> None:
        """Wait for what is being read or written, `CLOSE_S` at most."""
        give_up_at = time.monotonic() + CLOSE_S
        while self._is_busy and time.monotonic() < give_up_at:
            await asyncio.sleep(_LOOK_S)

    def _open(self) -> History | None:
        file = self._open_file(self._path, self._shape)
        self._file = file
        found, num_damaged = file.read()
        if num_damaged:
            log.warning("dashboard: %d rows of the history %s are damaged and left out", num_damaged, self._path)
        return found

    def _fail(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            log.warning("dashboard: the history is not kept in %s: %s", self._path, why)


def in_daemon(work: Callable[[], _T]) -> "Future[_T]":
    """What *work* comes to in a thread of its own, which the end of the process does not wait for."""
    result: Future[_T] = Future()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # the thread's top: whoever asked is told
            result.set_exception(as_exception(error))

    threading.Thread(target=run, name="kvtier-history", daemon=True).start()
    return result
