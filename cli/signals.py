"""Signals that end a server: the first one drains it, a second one ends the process at once."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)


@contextmanager
def draining_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call *stop* on the running event loop when the first SIGTERM or SIGINT arrives within the block.

    A second signal ends the process at once, without flushing. Everything written before is intact. Must be called by
    the main thread.
    """
    loop, signals = asyncio.get_running_loop(), list[int]()

    def drain(number: int) -> None:
        log.info("signal %s: draining; a second signal stops at once", signal.Signals(number).name)
        stop()

    def end(number: int, _: FrameType | None) -> None:
        signals.append(number)
        if len(signals) > 1:
            os._exit(128 + number)
        # Log nothing here: if the signal has interrupted the writing of a log line, a second write to stderr raises.
        loop.call_soon_threadsafe(drain, number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
