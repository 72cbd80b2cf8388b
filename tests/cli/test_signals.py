"""Signals that end a server."""

import asyncio
import io
import logging
import signal
import sys

import pytest

from kvtier.cli.signals import draining_on_signals

FAR_S = 60.0


class InterruptedFile(io.RawIOBase):
    """A file during whose first write a signal arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]  # any buffer
        if not self.written:
            signal.raise_signal(signal.SIGTERM)
        self.written += bytes(data)
        return len(data)


def test_a_signal_that_interrupts_a_log_line_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    file = InterruptedFile()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(file), write_through=True))
    log = logging.getLogger("kvtier")
    monkeypatch.setattr(log, "handlers", [logging.StreamHandler(sys.stderr)])
    monkeypatch.setattr(log, "level", logging.INFO)

    async def serve() -> None:
        stopped = asyncio.Event()
        with draining_on_signals(stopped.set):
            log.info("a line that takes a while")
            await asyncio.wait_for(stopped.wait(), FAR_S)

    asyncio.run(serve())

    assert file.written.decode().splitlines() == [
        "a line that takes a while",
        "signal SIGTERM: draining; a second signal stops at once",
    ]


def test_the_handlers_of_before_are_back_after_the_block() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    async def serve() -> None:
        with draining_on_signals(lambda: None):
            assert signal.getsignal(signal.SIGTERM) != before[0]

    asyncio.run(serve())

    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
