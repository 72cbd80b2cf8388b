"""What does a remote tier cost that is away from the start, is silent, or takes 200 ms for each answer?"""

import socket
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from redis_servers import free_port, running_server

from bench.cluster.replicas import Replica, Replicas, documents
from bench.cluster.slow_proxy import slow_proxy
from bench.report import Effort, Row
from bench.rounds import at_most
from bench.server.cache_control import Seen

DELAY_S = 0.2
MAX = 1.02


def away_rows(effort: Effort, python: str, folder: Path) -> list[Row]:
    """The same new documents asked of a server without a remote tier and of three with one, in turn."""
    num_documents = effort.of(48, quick=4)
    replicas = Replicas(folder, device_documents=2.2, host_documents=8)
    with ExitStack() as ends:
        redis = ends.enter_context(running_server(folder / "redis"))
        slow = ends.enter_context(slow_proxy(redis.port, DELAY_S))
        silent = ends.enter_context(listening_and_silent())
        without = ends.enter_context(replicas.started())
        servers = {
            "down": ends.enter_context(replicas.started(f"redis://127.0.0.1:{free_port()}")),
            "silent": ends.enter_context(replicas.started(f"redis://127.0.0.1:{silent}")),
            f"{1e3 * DELAY_S:.0f} ms a call": ends.enter_context(replicas.started(f"redis://127.0.0.1:{slow}")),
        }
        return [row for name, server in servers.items() for row in rows_of(name, server, without, num_documents)]


def rows_of(name: str, server: Replica, without: Replica, num_documents: int) -> list[Row]:
    """Pairs of the same question; a second question about a document comes from host memory.

    Who is asked first is a tenth faster on two cores, so each ratio is of two documents: of one the server is asked
    first, of the other the one without.
    """
    pairs: list[tuple[Seen, Seen]] = []
    for turn, document in enumerate(documents(num_documents)):
        for number in (0, 1):
            order = (server, without) if (turn + number) % 2 else (without, server)
            seen = {each: each.ask(document, number) for each in order}
            pairs.append((seen[server], seen[without]))
    of_two = [pairs[i : i + 3 : 2] for start in range(0, len(pairs), 4) for i in (start, start + 1)]
    ratio = statistics.median(
        sum(one.ttft_s for one, _ in two) / sum(other.ttft_s for _, other in two) for two in of_two
    )
    lines = [line for line in server.log.read_text().splitlines() if "remote:" in line and "WARNING" in line]
    breakers = server.metric("kvtier_remote_breaker_opened")
    is_right = all(seen.is_right for pair in pairs for seen in pair)
    return [
        at_most(f"{name}: TTFT / without a remote tier, median", ratio, "x", MAX),
        Row(f"  {name}: the longest TTFT", 1e3 * max(one.ttft_s for one, _ in pairs), "ms"),
        Row(f"  {name}: warnings", len(lines), "", "1", len(lines) == 1, varies=True),
        Row(f"  {name}: breakers opened, in the metrics", breakers, "", ">= 1", breakers >= 1, varies=True),
        Row(f"  {name}: right answers", is_right, "", "1", is_right),
    ]


@contextmanager
def listening_and_silent() -> Iterator[int]:
    """The port of something that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]
