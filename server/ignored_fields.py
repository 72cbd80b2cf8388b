"""Tells the operator which fields of messages the server does not know: a line in the log for each name, once."""

import logging
from collections.abc import Iterable

MAX_NAMES = 100  # of a process: clients may make up any number of them
MAX_CHARACTERS = 40

log = logging.getLogger(__name__)
_told: set[str] = set()


def tell_ignored(names: Iterable[str]) -> None:
    """Tell of those *names* that are new to this process."""
    for name in sorted(set(names) - _told)[: MAX_NAMES - len(_told)]:
        _told.add(name)
        log.info("messages: the field %r is not known here and ignored", name[:MAX_CHARACTERS])
