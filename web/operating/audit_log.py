"""The audit log, which has one line for each operator's request."""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from kvtier.store.folder import open_private
from kvtier.web.request_ids import current_ids

LOGGER = "kvtier.audit"
NUM_KEPT = 5  # number of full log files to keep in addition to the current one

log = logging.getLogger(LOGGER)


class _OwnFile(RotatingFileHandler):
    """A rotating log file that only its owner can access. Links and files of other users are refused."""

    def _open(self) -> TextIOWrapper:
        file = open_private(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        return open(file, "a", encoding="utf-8")


class AuditLog:
    """A log of the operators' requests: operator, verb, arguments, outcome and request ids, but no prompt or salt.

    The lines go to the logger `kvtier.audit`, even if the level of `kvtier` is above INFO, and to a file if one is
    configured. Owned by one event loop.
    """

    def __init__(
        self, path: str | None = None, max_bytes: int = 16 << 20, clock: Callable[[], float] = time.time
    ) -> None:
        """Open the log. Raise OSError if the file at *path* cannot be written to.

        The file is rotated at *max_bytes*, and `NUM_KEPT` rotated files are kept.
        """
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
        """Write a line about a request. *who* is the operator's name, or None for requests with a wrong token."""
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
