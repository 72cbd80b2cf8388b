"""AuditLog: a line for everything that an operator has asked for."""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from kvtier.store.folder import open_own
from kvtier.web.request_ids import current_ids

LOGGER = "kvtier.audit"
NUM_KEPT = 5  # files of the size that is configured, beside the one that is written to

log = logging.getLogger(LOGGER)


class _OwnFile(RotatingFileHandler):
    """Files that only their owner may use. Another user's file, and one behind a link, is not written to."""

    def _open(self) -> TextIOWrapper:
        file = open_own(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return open(file, "a", encoding="utf-8")


class AuditLog:
    """Who asked for which verb, with what, and what came of it: names and numbers, no prompt and no salt. With the ids
    of the request that it was asked by.

    The lines go to the logger `kvtier.audit`, whatever level others have, and to a file of their own if there is one.
    Owned by one event loop.
    """

    def __init__(
        self, path: str | None = None, max_bytes: int = 16 << 20, clock: Callable[[], float] = time.time
    ) -> None:
        """*path*: the file; it is renamed when it has *max_bytes*, and `NUM_KEPT` of them are kept. OSError for one
        that cannot be written to."""
        self._clock = clock
        self._file: RotatingFileHandler | None = None
        log.setLevel(logging.INFO)
        if path is not None:
            try:
                self._file = _OwnFile(Path(path).expanduser(), maxBytes=max_bytes, backupCount=NUM_KEPT)
            except OSError as error:
                why = f"operators.audit {path}: {error.strerror}; give a file that can be written to"
                raise OSError(why) from error

    def write(self, who: str | None, verb: str, arguments: Mapping[str, object], outcome: Mapping[str, object]) -> None:
        """Write a line. *who* is None for a token that nobody has."""
        now = self._clock()
        seconds, milliseconds = divmod(round(now * 1000), 1000)
        when = f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{milliseconds:03}Z"
        fields = {"who": who, "verb": verb, "arguments": dict(arguments), "outcome": dict(outcome)}
        log.info("audit", extra={"fields": fields})
        if self._file is not None:
            ids = current_ids()
            line = {"time": when, **({} if ids is None else ids.fields()), **fields}
            self._file.handle(logging.makeLogRecord({"msg": json.dumps(line, default=str)}))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
