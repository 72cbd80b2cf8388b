"""What does the page cost: memory over a simulated day at 1 Hz, and processor time with 50 viewers?

The day is simulated time through the real sampling, history, file and stream, beside a real engine that serves a
request a minute. Processor time is that of `kvtier serve` with 50 connections that read the live stream, next to none.
"""

import asyncio
import os
import re
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from serving import chat_tokenizer, serving, tables
from small_models import VOCAB, build

from bench.report import Effort, Row
from bench.rounds import at_most
from kvtier.server.engine_source import EngineSource
from kvtier.web.dashboard.dashboard import Dashboard
from kvtier.web.dashboard.history import RESOLUTIONS
from kvtier.web.dashboard.keeper import HistoryKeeper
from kvtier.web.dashboard.ring_file import Shape
from kvtier.web.paths import STREAM

NUM_VIEWERS = 50
REQUEST_EVERY_S = 60
NUM_PROMPTS = 200
PROMPT_TOKENS = 160
MAX_GROWN_MIB = 8.0
MAX_PERCENT = 2.0
MIB = 1 << 20
START_S = 120.0  # that a server may take


@dataclass(frozen=True)
class Size:
    """Durations of the benchmark, in simulated and in real time."""

    day_s: int = 86_400
    alone_s: int = 3600  # until viewers come
    settled_s: int = 7200  # of simulated time, after which memory is to be flat
    num_rounds: int = 5
    round_s: float = 12.0


QUICK = Size(600, 60, 120, 1, 1.0)


def page_rows(effort: Effort, folder: Path) -> list[Row]:
    """Memory over the day, what a sample costs, and the processor time of viewers."""
    size = effort.of(Size(), QUICK)
    grown_mib, settled_mib, file_mib, sample_ms, watched_ms = _day(folder / "history", size)
    idle, watched, ticks = _percents(folder, size)
    extra = [some - none for some, none in zip(watched, idle, strict=True)]
    page_percent = statistics.median(extra) + sample_ms / 10  # of a second
    hours, settled_hours = size.day_s // 3600, size.settled_s // 3600
    return [
        Row(f"page: memory of engine and page after {settled_hours} simulated hours", settled_mib, "MiB"),
        at_most(f"page: grown from there to {hours} hours", grown_mib, "MiB", MAX_GROWN_MIB),
        Row("page: its history on disk", file_mib, "MiB"),
        Row("page: a second's sample, nobody watches", sample_ms, "ms"),
        Row(f"page: a second's sample, {NUM_VIEWERS} watch in the process", watched_ms, "ms"),
        Row("page: the idle server, nobody watches", statistics.median(idle), "% of a core"),
        Row(f"page: the idle server, {NUM_VIEWERS} watch over HTTP", statistics.median(watched), "% of a core"),
        Row("page: seconds told to the viewer that got fewest", ticks, "of 1"),
        at_most("page: what it costs in all", page_percent, "% of a core", MAX_PERCENT),
    ]


def _day(path: Path, size: Size) -> tuple[float, float, float, float, float]:
    """MiB grown, MiB before, MiB on disk, and milliseconds of a sample without and with viewers."""
    config = {**tables(300), "disk": {"path": str(path.parent / "store"), "capacity": "16MiB"}}
    with serving(build("llama"), config) as server:
        clock = _Clock()

        def serve(number: int) -> None:
            server.complete([(number % NUM_PROMPTS * 31 + place * 7) % VOCAB for place in range(PROMPT_TOKENS)])

        async def live() -> tuple[float, float, float, float, float]:
            source = EngineSource(server.service)
            keeper = HistoryKeeper(path, Shape(source.columns, RESOLUTIONS))
            dashboard = Dashboard(source, keeper, NUM_VIEWERS, clock.wall, clock.monotonic)
            await keeper.read()
            alone_s = await _pass(dashboard, clock, size.alone_s, serve)
            viewers = [asyncio.create_task(_watch(dashboard)) for _ in range(NUM_VIEWERS)]
            await _pass(dashboard, clock, size.settled_s - size.alone_s, serve)
            settled = _resident_bytes()
            watched_s = await _pass(dashboard, clock, size.day_s - size.settled_s, serve)
            grown = _resident_bytes() - settled
            dashboard.end()
            await asyncio.gather(*viewers)
            await keeper.close(dashboard.history)
            file_bytes = path.stat().st_size
            return grown / MIB, settled / MIB, file_bytes / MIB, 1000 * alone_s, 1000 * watched_s

        return asyncio.run(live())


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now

    def monotonic(self) -> float:
        return self.now


async def _pass(dashboard: Dashboard, clock: _Clock, seconds: int, serve: Callable[[int], None]) -> float:
    """Let so many simulated seconds pass; the real seconds that one's sample took of this thread, in the mean."""
    spent = 0.0
    for _ in range(seconds):
        clock.now += 1.0
        if clock.now % REQUEST_EVERY_S == 0:
            serve(int(clock.now) // REQUEST_EVERY_S)
        began = time.thread_time()
        await dashboard.tick()
        await asyncio.sleep(0)
        spent += time.thread_time() - began
    return spent / seconds


async def _watch(dashboard: Dashboard) -> None:
    with dashboard.stream.viewer(None) as events:
        async for _ in events:
            pass


def _percents(folder: Path, size: Size) -> tuple[list[float], list[float], float]:
    """Per cent of a core that an idle server takes without and with viewers, by round, and how many ticks a second the
    viewer got that got fewest."""
    idle, watched, ticks = [], [], []
    with _served(folder) as (pid, port):
        for _ in range(size.num_rounds):
            idle.append(_percent(pid, size.round_s))
            with _viewers(port) as counts:
                time.sleep(2.0)  # until all have the history behind them
                before = list(counts)
                began = time.monotonic()
                watched.append(_percent(pid, size.round_s))
                seconds = time.monotonic() - began
                ticks.append(min(now - then for now, then in zip(counts, before, strict=True)) / seconds)
    return idle, watched, min(ticks)


@contextmanager
def _served(folder: Path) -> Iterator[tuple[int, int]]:
    """`kvtier serve` of a small model; its process and port."""
    model, config, log = folder / "model", folder / "kvtier.toml", folder / "log"
    build("llama").save_pretrained(model)
    chat_tokenizer().save_pretrained(model)
    config.write_text(
        f'[device]\ncapacity = "8MiB"\nblock_size = 16\n[host]\ncapacity = "8MiB"\n'
        f'[disk]\npath = "{folder}/served"\ncapacity = "64MiB"\n'
    )
    command = [sys.executable, "-m", "kvtier.cli.main", "serve", "--model", str(model)]
    command += ["--config", str(config), "--port", "0", "--log-format", "json"]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            give_up_at = time.monotonic() + START_S
            while '"message": "ready"' not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < give_up_at, log.read_text()
                time.sleep(0.2)
            found = re.search(r'"port": (\d+)', log.read_text())
            assert found is not None
            yield process.pid, int(found[1])
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(START_S)


@contextmanager
def _viewers(port: int) -> Iterator[list[int]]:
    """Connections that read the live stream, each told as much as it takes; how many ticks each has got so far."""
    counts, ends = [0] * NUM_VIEWERS, threading.Event()
    selector = selectors.DefaultSelector()
    request = f"GET {STREAM} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(NUM_VIEWERS)]
    for number, each in enumerate(sockets):
        each.sendall(request)
        selector.register(each, selectors.EVENT_READ, number)

    def read() -> None:
        while not ends.is_set():
            for key, _ in selector.select(0.2):
                counts[key.data] += sockets[key.data].recv(1 << 18).count(b"event: tick\n")

    reading = threading.Thread(target=read)
    reading.start()
    try:
        yield counts
    finally:
        ends.set()
        reading.join()
        for each in sockets:
            each.close()
        selector.close()


def _percent(pid: int, seconds: float) -> float:
    """Per cent of a core that the process takes."""
    began, before = time.monotonic(), _cpu_s(pid)
    time.sleep(seconds)
    return 100 * (_cpu_s(pid) - before) / (time.monotonic() - began)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
