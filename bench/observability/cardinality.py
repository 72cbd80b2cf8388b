"""What does `/metrics` cost with 10,000 tenants and a million salts, next to one tenant?

An engine serves requests of every tenant, each with a salt of its own; then prompts with other salts are looked up, and
records of requests with them are made, until a million salts have been there.
"""

import os
import socket
import statistics
import time
import urllib.request
from pathlib import Path

from small_models import VOCAB, build, byte_tokenizer

from bench.report import Effort, Row
from bench.rounds import at_most
from kvtier import LLM, SamplingParams
from kvtier.engine.core import EngineCore
from kvtier.engine.scheduling.request import RequestOptions
from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.engine.scheduling.timeline import Caller
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.block_hash import ExtraKeys

BLOCK_SIZE = 16
PROMPT_TOKENS = 3 * BLOCK_SIZE + 1
NUM_SCRAPES = 21
MAX_SERIES = 1000  # more than with one tenant
MAX_MS = 50.0
MAX_GROWN_MIB = 8.0  # over the second half of the salts
MIB = 1 << 20


def cardinality_rows(effort: Effort, folder: Path) -> list[Row]:
    """Series, seconds of a scrape and memory, with one tenant, with all of them, and after all salts."""
    num_tenants, num_salts = effort.of((10_000, 1_000_000), quick=(50, 1_000))
    port = _free_port()
    tables = {
        "device": {"capacity": "8MiB", "block_size": BLOCK_SIZE},
        "host": {"capacity": "8MiB"},
        "disk": {"path": str(folder / "store"), "capacity": "64MiB"},
        "metrics_port": port,
    }
    with LLM(build("llama"), tables, byte_tokenizer()) as llm:
        _serve(llm.core, range(1))
        num_one, ms_one = _scrape(port)
        _serve(llm.core, range(1, num_tenants))
        series_of_tenants, ms_tenants = _scrape(port)
        half = (num_tenants + num_salts) // 2
        _come_by(llm.core, range(num_tenants, half), num_tenants)
        resident_bytes = _resident_bytes()
        _come_by(llm.core, range(half, num_salts), num_tenants)
        grown_mib = (_resident_bytes() - resident_bytes) / MIB
        series_of_salts, ms_salts = _scrape(port)
    more = max(series_of_tenants, series_of_salts) - num_one
    slowest_ms = max(ms_tenants, ms_salts)
    return [
        Row("series of /metrics with one tenant", num_one, ""),
        Row(f"more with {num_tenants:,} tenants", series_of_tenants - num_one, ""),
        Row(f"more after {num_salts:,} salts", series_of_salts - num_one, ""),
        at_most("more, the worse of both", more, "", MAX_SERIES, varies=False),
        Row("one scrape over HTTP, one tenant", ms_one, "ms"),
        at_most("one scrape over HTTP, the slower of both", slowest_ms, "ms", MAX_MS),
        at_most("memory grown over the second half of the salts", grown_mib, "MiB", MAX_GROWN_MIB, varies=False),
    ]


def _serve(core: EngineCore, tenants: range) -> None:
    """Serve a request of each tenant, with a salt of its own."""
    one_token = SamplingParams(max_tokens=1)
    for number in tenants:
        caller = Caller(f"request {number}", f"tenant {number}")
        extra = ExtraKeys(cache_salt=f"salt {number}")
        core.add(_prompt(number), one_token, extra, time.monotonic(), RequestOptions(), caller)
        if core.num_waiting >= core.config.scheduler.max_running:
            _finish(core)
    _finish(core)
    core.idle()


def _finish(core: EngineCore) -> None:
    while core.has_work:
        core.step()


def _come_by(core: EngineCore, salts: range, num_tenants: int) -> None:
    """Look a prompt up with each salt, and take in the record of a request as the engine makes it."""
    for number in salts:
        extra = ExtraKeys(cache_salt=f"salt {number}")
        core.where(_prompt(number), extra)
        tokens = TokenBalance(recomputed=PROMPT_TOKENS)
        core.records.add(
            RequestRecord(f"request {number}", f"tenant {number % num_tenants}", None, time.time(), tokens)
        )
        if number % 1000 == 0:
            core.idle()


def _prompt(number: int) -> list[int]:
    return [(number * 31 + place * 7) % VOCAB for place in range(PROMPT_TOKENS)]


def _scrape(port: int) -> tuple[int, float]:
    """How many series there are, and how many milliseconds a scrape takes, the median of many."""
    seconds, text = [], ""
    for _ in range(NUM_SCRAPES):
        began_at = time.perf_counter()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        seconds.append(time.perf_counter() - began_at)
    num_series = sum(not line.startswith("#") for line in text.splitlines())
    return num_series, 1000 * statistics.median(seconds)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
