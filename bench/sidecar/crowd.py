"""Eight clients at once, that store and load: how much do all of them get, how long does a lookup take, is one left
behind?"""

import statistics
from pathlib import Path

from foreign.running import LmcacheClients, Sidecar, free_endpoint

from bench.report import Row
from bench.rounds import at_least, at_most

NUM_CLIENTS = 8
NUM_ROUNDS = 5
ROUND_S = 4.0


def crowd_rows(python: str, folder: Path) -> list[Row]:
    """LMCache's own clients, each in a process of its own: one of them alone and all at once, in turns."""
    alone, together, fair, lookups, lone_lookups = [], [], [], [], []
    num_bad = 0
    with Sidecar(free_endpoint(), "--host", "3GiB") as sidecar, LmcacheClients(python, sidecar.endpoint) as clients:
        for number in range(NUM_CLIENTS):
            clients.start(number)
            clients.ask(number, "mixed", 0.5)
        for round_id in range(NUM_ROUNDS):
            one = clients.ask(round_id % NUM_CLIENTS, "mixed", ROUND_S)
            alone.append(one["num_bytes"] / one["seconds"])
            lone_lookups += one["lookup_s"]
            for number in range(NUM_CLIENTS):
                clients.tell(number, "mixed", ROUND_S)
            all_of_them = [clients.answer(number) for number in range(NUM_CLIENTS)]
            speeds = [each["num_bytes"] / each["seconds"] for each in all_of_them]
            together.append(sum(speeds))
            fair.append(min(speeds) / max(speeds))
            lookups += [took for each in all_of_them for took in each["lookup_s"]]
            num_bad += sum(each["num_wrong"] + each["num_refused"] for each in (one, *all_of_them))
    ratio = statistics.median(all_ / one for all_, one in zip(together, alone, strict=True))
    return [
        Row("one client: stored and loaded", statistics.median(alone) / 1e9, "GB/s"),
        Row(f"{NUM_CLIENTS} clients: stored and loaded", statistics.median(together) / 1e9, "GB/s"),
        at_least(f"{NUM_CLIENTS} clients: of one client's speed", ratio, 0.9),
        Row("one client: lookup of 4,096 tokens, p50", 1e3 * statistics.median(lone_lookups), "ms"),
        Row(f"{NUM_CLIENTS} clients: lookup of 4,096 tokens, p50", 1e3 * statistics.median(lookups), "ms"),
        at_most(f"{NUM_CLIENTS} clients: lookup of 4,096 tokens, p99", 1e3 * percentile(lookups, 99), "ms", 20),
        at_least(f"{NUM_CLIENTS} clients: slowest of fastest", statistics.median(fair), 0.5),
        Row(f"{NUM_CLIENTS} clients: loads that were wrong, stores refused", num_bad, "", "0", num_bad == 0),
    ]


def percentile(values: list[float], percent: int) -> float:
    """The value that so many per cent are below."""
    return statistics.quantiles(values, n=100)[percent - 1]
