"""Eight clients at once, that store and load: how much do all of them get, how long does a lookup take, is one left
behind?"""

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from foreign.lmcache_server import lmcache_server
from foreign.running import LmcacheClients, Sidecar, free_endpoint

from bench.report import Effort, Row
from bench.rounds import at_least, at_most, never

SHARE = 0.3  # of one processor that all of those have together that have pauses: engines compute between their copies


@dataclass
class Round:
    """What some clients have seen at the same time."""

    speeds: list[float]  # of each client, bytes a second
    lookups_s: list[float]
    num_bad: int

    @classmethod
    def of(cls, clients: LmcacheClients, numbers: Sequence[int], function: str, *arguments: float) -> "Round":
        """Have these clients store and load at once."""
        for number in numbers:
            clients.tell(number, function, *arguments)
        seen = [clients.answer(number) for number in numbers]
        return cls(
            [each["num_bytes"] / each["seconds"] for each in seen],
            [took for each in seen for took in each["lookup_s"]],
            sum(each["num_wrong"] + each["num_refused"] for each in seen),
        )


def crowd_rows(effort: Effort, python: str, folder: Path) -> list[Row]:
    """LMCache's own clients, each a process of its own: one of them alone and all at once, in turns; then all at once
    with pauses; then all at once at LMCache's own server."""
    num_clients, num_rounds, round_s = effort.of((8, 5, 4.0), quick=(2, 1, 0.5))
    alone, together, everyone = [], [], range(num_clients)
    with (
        Sidecar(free_endpoint(), "--host", "3GiB") as sidecar,
        started(python, sidecar.endpoint, num_clients) as clients,
    ):
        for round_id in range(num_rounds):
            alone.append(Round.of(clients, [round_id % num_clients], "mixed", round_s))
            together.append(Round.of(clients, everyone, "mixed", round_s))
        paced = [Round.of(clients, everyone, "mixed", round_s, SHARE / num_clients) for _ in range(num_rounds)]
    with lmcache_server(python) as url, started(python, url, num_clients) as clients:
        theirs = [Round.of(clients, everyone, "mixed", round_s) for _ in range(num_rounds)]
    ratio = statistics.median(sum(all_.speeds) / sum(one.speeds) for all_, one in zip(together, alone, strict=True))
    fair = statistics.median(min(each.speeds) / max(each.speeds) for each in together)
    num_bad = sum(each.num_bad for each in (*alone, *together, *paced))
    all_, lookup = f"{num_clients} clients", "lookup of 4,096 tokens"
    return [
        Row("one client: stored and loaded", median_speed(alone), "GB/s"),
        Row(f"{all_}: stored and loaded", median_speed(together), "GB/s"),
        at_least(f"{all_}: of one client's speed", ratio, 0.9),
        at_least(f"{all_}: slowest of fastest", fair, 0.5),
        never(f"{all_}: loads that were wrong, stores refused", num_bad),
        Row(f"one client: {lookup}, p99", latency(alone, 99), "ms"),
        at_most(f"{all_}: {lookup}, p99", latency(together, 99), "ms", 20),
        Row(f"{all_}: {lookup}, p50", latency(together, 50), "ms"),
        at_most(f"{all_} with pauses: {lookup}, p99", latency(paced, 99), "ms", 20),
        Row(f"{all_} with pauses: {lookup}, p50", latency(paced, 50), "ms"),
        Row(f"{all_}, LMCache's server: stored and loaded", median_speed(theirs), "GB/s"),
        Row(f"{all_}, LMCache's server: {lookup}, p99", latency(theirs, 99), "ms"),
    ]


@contextmanager
def started(python: str, url: str, num_clients: int) -> Iterator[LmcacheClients]:
    """All clients, which have documents already."""
    with LmcacheClients(python, url) as clients:
        for number in range(num_clients):
            clients.start(number)
            clients.ask(number, "mixed", 0.5)
        yield clients


def median_speed(rounds: Sequence[Round]) -> float:
    """Of all clients together, in 10^9 bytes a second."""
    return statistics.median(sum(each.speeds) for each in rounds) / 1e9


def latency(rounds: Sequence[Round], percent: int) -> float:
    """The milliseconds that so many per cent of all lookups took at most."""
    return 1e3 * percentile([took for each in rounds for took in each.lookups_s], percent)


def percentile(values: list[float], percent: int) -> float:
    """The value that so many per cent are at most; nan without any."""
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)] if values else math.nan
