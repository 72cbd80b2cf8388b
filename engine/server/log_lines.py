"""How the log looks: for people, or one JSON object a line. What a record has as *fields* comes with it."""

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Literal

_LIBRARIES = frozenset({"huggingface_hub", "peft", "torch", "transformers", "uvicorn"})


class JsonLines(logging.Formatter):
    """`{"time", "level", "logger", "message", …fields}`; the time is UTC."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
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
    """The message, then `name=value` of each field."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One line."""
        message = " ".join(super().formatMessage(record).split())  # warnings come with a line of source
        return " ".join([message, *(f"{key}={value}" for key, value in _fields(record).items())])


def write_log(kind: Literal["human", "json"]) -> None:
    """Let the process's log go to stderr in that form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if kind == "json" else PlainLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("kvtier").setLevel(logging.INFO)
    logging.captureWarnings(True)
    take_in_libraries()


def take_in_libraries() -> None:
    """Let the libraries that write to a stream by themselves write into the process's log instead. To be called again
    once they have been imported."""
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if not isinstance(logger, logging.Logger) or name.partition(".")[0] not in _LIBRARIES:
            continue
        for handler in [each for each in logger.handlers if type(each) is not logging.NullHandler]:
            logger.removeHandler(handler)
            logger.propagate = True


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, "fields", {})
    return fields
