"""What does all that is seen cost a server, and an engine's step?

Three servers run, asked in turns: one whose metrics are scraped each second, with the page open, a log of requests
and a sampled trace, and two that keep no books of their requests and are not looked at; how far these two differ is
what the machine's noise makes of nothing. The same prompts for all: new ones, and questions about documents, by eight
clients. The share of one step needs no server.
"""

import random
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

from bench.report import Effort, Row
from bench.rounds import at_least, at_most
from bench.server.serving import QUICK, Bed, Size
from bench.server.serving_bed import kvtier_server
from bench.server.serving_load import tokens_per_s
from kvtier.engine import build_core as engine_build
from kvtier.engine.config import as_config
from kvtier.engine.llm import load_model
from kvtier.engine.model.sampling import SamplingParams
from kvtier.engine.observability.records.request_accounts import RequestAccounts, RequestStatistics
from kvtier.engine.scheduling.request import Request
from kvtier.engine.scheduling.timeline import Timeline
from kvtier.tiers.lower.statistics import TierStatistics
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS
from kvtier.tiers.naming.tier import Tier

SEEN, BLIND, CONTROL = "seen", "blind", "control"
NEW_TOKENS = 512
NUM_CLIENTS = 8
MIN_KEPT = 0.98
MAX_OF_A_STEP = 0.01
TRACING = {"endpoint": "http://127.0.0.1:9/v1/traces", "sample": 0.01}  # where no collector is


def cost_rows(effort: Effort, folder: Path) -> list[Row]:
    """Throughput that is kept, and the share of a step that the books take."""
    bed = Bed(folder, effort.of(Size(), QUICK))
    return [*_throughput_rows(bed, effort), *_step_rows(bed, effort)]


def _throughput_rows(bed: Bed, effort: Effort) -> list[Row]:
    # Many short turns of each server in a round, and one to warm up, as the machine's speed changes with the minutes.
    num_rounds, num_turns, num_each, answer_tokens = effort.of((2, 10, 6, 32), quick=(1, 2, 1, 2))
    rng = random.Random(7)
    speeds: dict[str, list[float]] = {SEEN: [], BLIND: [], CONTROL: []}
    for number in range(num_rounds):
        with ExitStack() as servers:
            order = rng.sample(sorted(speeds), k=len(speeds))
            urls = {kind: servers.enter_context(_server(bed, kind, number)) for kind in order}
            for turn in range(1 + num_turns):
                prompts = _prompts(bed, num_each, rng)
                for kind in rng.sample(order, k=len(order)):
                    with _watched(urls[kind]) if kind == SEEN else ExitStack():
                        speed = tokens_per_s(urls[kind], prompts, answer_tokens, NUM_CLIENTS)
                    if turn:
                        speeds[kind].append(speed)
    unseen = list(map(statistics.mean, zip(speeds[BLIND], speeds[CONTROL], strict=True)))
    kept, same = _ratios(speeds[SEEN], unseen), _ratios(speeds[CONTROL], speeds[BLIND])
    return [
        Row("tokens a second, all is seen", statistics.median(speeds[SEEN]), "tokens/s"),
        Row("tokens a second, nothing is", statistics.median(unseen), "tokens/s"),
        *_quartile_rows("nothing seen / nothing seen", same),
        *_quartile_rows("all seen / nothing seen", kept),
        Row("nothing seen / nothing seen, median of turns", statistics.median(same), "x"),
        at_least("all seen / nothing seen, median of turns", statistics.median(kept), MIN_KEPT),
    ]


def _quartile_rows(what: str, ratios: Sequence[float]) -> list[Row]:
    low, _, high = statistics.quantiles(ratios, n=4)
    return [Row(f"{what}, lower quartile of turns", low, "x"), Row(f"{what}, upper quartile of turns", high, "x")]


def _ratios(speeds: Sequence[float], others: Sequence[float]) -> list[float]:
    return [speed / other for speed, other in zip(speeds, others, strict=True)]


@contextmanager
def _server(bed: Bed, kind: str, number: int) -> Iterator[str]:
    tables = bed.tables(with_tiers=True)
    tables["disk"]["path"] = str(bed.folder / f"store-{kind}-{number}")
    options: list[str] = []
    module = "bench.observability.blind_server"
    if kind == SEEN:
        module = "kvtier.cli.main"
        options = ["--request-log", str(bed.folder / f"requests-{number}.jsonl")]
        tables["tracing"] = TRACING
    with kvtier_server(bed.model, bed.folder, tables, options, module) as url:
        yield url


def _prompts(bed: Bed, num_each: int, rng: random.Random) -> list[list[int]]:
    """The number of new prompts, and of questions about documents."""
    documents = rng.choices(range(len(bed.texts.documents)), k=num_each)
    prompts = [bed.texts.new(NEW_TOKENS) for _ in range(num_each)] + [bed.texts.question(each) for each in documents]
    rng.shuffle(prompts)
    return prompts


@contextmanager
def _watched(url: str) -> Iterator[None]:
    """Scrape the metrics each second, and have the page open."""
    done = threading.Event()
    page = urllib.request.urlopen(url + "/dashboard/stream", timeout=60)

    def scrape() -> None:
        while not done.wait(1.0):
            urllib.request.urlopen(url + "/metrics", timeout=60).read()

    def read() -> None:
        while not done.is_set() and page.readline():
            pass

    threads = [threading.Thread(target=each, daemon=True) for each in (scrape, read)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
        page.close()


class TimedAccounts(RequestAccounts):
    """Adds up the seconds that they take."""

    seconds = 0.0

    def on_added(self, request: Request) -> None:
        """Timed."""
        began_at = time.perf_counter()
        super().on_added(request)
        TimedAccounts.seconds += time.perf_counter() - began_at

    def trace_spills(self) -> None:
        """Timed."""
        began_at = time.perf_counter()
        super().trace_spills()
        TimedAccounts.seconds += time.perf_counter() - began_at

    def on_token(self, timeline: Timeline) -> None:
        """Timed."""
        began_at = time.perf_counter()
        super().on_token(timeline)
        TimedAccounts.seconds += time.perf_counter() - began_at

    def on_ended(self, request: Request) -> None:
        """Timed."""
        began_at = time.perf_counter()
        super().on_ended(request)
        TimedAccounts.seconds += time.perf_counter() - began_at

    def statistics(self, tiers: Mapping[Tier, TierStatistics]) -> RequestStatistics:
        """Timed."""
        began_at = time.perf_counter()
        found = super().statistics(tiers)
        TimedAccounts.seconds += time.perf_counter() - began_at
        return found


def _step_rows(bed: Bed, effort: Effort) -> list[Row]:
    """The books' seconds in those of the steps."""
    num_each, answer_tokens = effort.of((6, 32), quick=(2, 8))
    tables = bed.tables(with_tiers=True)
    tables["disk"]["path"] = str(bed.folder / "store-step")
    tables["tracing"] = TRACING
    config, rng = as_config(tables), random.Random(8)
    model, tokenizer = load_model(bed.model, config.model, None)
    sampling = SamplingParams(max_tokens=answer_tokens, ignore_eos=True)
    with (
        patch.object(engine_build, "RequestAccounts", TimedAccounts),
        engine_build.build_core(model, tokenizer, config) as core,
    ):
        seconds, num_steps = 0.0, 0
        for turn in range(3):
            prompts = _prompts(bed, num_each, rng)
            if turn == 1:  # the first warms up
                TimedAccounts.seconds, seconds, num_steps = 0.0, 0.0, 0
            while prompts or core.has_work:
                while prompts and core.num_waiting < NUM_CLIENTS // 2:
                    core.add(prompts.pop(), sampling, NO_EXTRA_KEYS, time.monotonic())
                began_at = time.perf_counter()
                core.step()
                seconds += time.perf_counter() - began_at
                num_steps += 1
    share = TimedAccounts.seconds / seconds
    return [
        Row("an engine's step, mean", 1000 * seconds / num_steps, "ms"),
        at_most("of it the books, what-if lines among them", share, "x", MAX_OF_A_STEP),
    ]
