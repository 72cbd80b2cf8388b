"""The two formats of the log: text for people, and one JSON object per line.

Each line ends with its fields: the ids of the request, if there is one, and `fields` of the call's `extra` argument.
"""

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Literal

from kvtier.web.request_ids import current_ids

_LIBRARIES = frozenset({"huggingface_hub", "peft", "torch", "transformers", "uvicorn"})


class JsonLines(logging.Formatter):
    """A formatter for lines of JSON: time in UTC, level, logger, message and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as a line of JSON."""
        seconds, milliseconds = divmod(round(record.created * 1000), 1000)
        line: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{milliseconds:03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": " ".join(record.getMessage().split()),
            **_fields(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class PlainLines(logging.Formatter):
    """A formatter for lines of text: time, level, message, and `name=value` for each field."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the record as one line of text."""
        message = " ".join(super().formatMessage(record).split())  # a Python warning has a second line, source code
        return " ".join([message, *(f"{key}={value}" for key, value in _fields(record).items())])


def write_log(kind: Literal["human", "json"]) -> None:
    """Send the log of the process to stderr, in the format *kind*."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if kind == "json" else PlainLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("kvtier").setLevel(logging.INFO)
    logging.captureWarnings(True)
    redirect_libraries()


def redirect_libraries() -> None:
    """Send the log of libraries that have their own log handlers to the log of the process.

    Call this function again after such libraries have been imported, because the import adds the handlers.
    """
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if not isinstance(logger, logging.Logger) or name.partition(".")[0] not in _LIBRARIES:
            continue
        for handler in [each for each in logger.handlers if type(each) is not logging.NullHandler]:
            logger.removeHandler(handler)
            logger.propagate = True


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    ids = current_ids()
    return {**({} if ids is None else ids.fields()), **getattr(record, "fields", {})}
