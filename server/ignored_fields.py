"""Log lines for fields of messages that the server does not know, one for each name."""

import logging
from collections.abc import Iterable

MAX_NAMES = 100  # per process, because clients may make up any number of names
MAX_CHARACTERS = 40

log = logging.getLogger(__name__)
_told: set[str] = set()


def log_unknown_fields(names: Iterable[str]) -> None:
    """Log those *names* that are new to this process."""
    for name in sorted(set(names) - _told)[: MAX_NAMES - len(_told)]:
        _told.add(name)
        log.info("messages: ignoring the unknown field %r", name[:MAX_CHARACTERS])
