"""What do requests notice when a primary of the cluster fails, a node hangs, or slots move?"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from redis_servers import ClusterOfSix, running_cluster

from bench.cluster.replicas import Replica, Replicas, asked, documents
from bench.report import Effort, Row
from bench.rounds import at_most, never
from bench.server.cache_control import Seen
from kvtier.cli.demo.document import Document
from kvtier.engine.build_core import LOAD_TIMEOUT_S

NUM_DOCUMENTS = 10
NUM_CLIENTS = 2
BEFORE_S, AFTER_S = 4.0, 12.0
QUICK_BEFORE_S, QUICK_AFTER_S = 1.0, 6.0
PAUSED_S = 4.0
NUM_MOVED = 200  # slots
HIT_SHARE = 0.7  # of a prompt's tokens; the front may be computed while the rest comes
BACK_S = 5.0


@dataclass
class Load:
    """Clients that ask about documents as fast as they are answered, until they are told to stop."""

    replica: Replica
    about: Sequence[Document]
    seen: list[tuple[float, Seen]] = field(default_factory=list)  # with when it was answered
    errors: list[Exception] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def run(self, seed: int) -> None:
        """One client."""
        rng = random.Random(seed)
        while not self.is_over.is_set():
            try:
                answer = self.replica.ask(rng.choice(self.about), rng.randrange(5))
            except Exception as error:  # a request that failed, in whatever way
                self.errors.append(error)
            else:
                self.seen.append((time.monotonic(), answer))


def fault_rows(effort: Effort, python: str, folder: Path) -> list[Row]:
    """A server whose device and host memory hold three of ten documents; the others come from the cluster.

    All that is found is loaded: this model computes 27,000 tokens a second, and beside eight other processes on two
    cores the planner would find that sooner for most prompts, which is no miss of the cluster's.
    """
    replicas = Replicas(folder, device_documents=1.3, host_documents=2.2, load="always")
    about = documents(NUM_DOCUMENTS)
    with running_cluster(folder / "cluster") as cluster:
        where = "redis+cluster://" + ",".join(str(node.address) for node in cluster.nodes)
        with replicas.started(where, timeout_s=1.0) as replica:
            for number in range(2):
                asked(replica, about, number, number)
            replica.wait_put()
            events: dict[str, Callable[[ClusterOfSix], None]] = {
                "slots move": move_slots,
                "a node hangs": pause_primary,
                "a primary fails": kill_primary,
            }
            waits = effort.of((BEFORE_S, AFTER_S), quick=(QUICK_BEFORE_S, QUICK_AFTER_S))
            return [
                row for name, event in events.items() for row in event_rows(name, event, cluster, replica, about, waits)
            ]


def event_rows(
    name: str,
    event: Callable[[ClusterOfSix], None],
    cluster: ClusterOfSix,
    replica: Replica,
    about: Sequence[Document],
    waits: tuple[float, float],
) -> list[Row]:
    """Ask before, during and after the event. *waits* are the seconds before and after it."""
    load = Load(replica, about)
    clients = [threading.Thread(target=load.run, args=(seed,)) for seed in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    time.sleep(waits[0])
    began_at = time.monotonic()
    event(cluster)
    ended_at = time.monotonic()
    time.sleep(waits[1])
    load.is_over.set()
    for client in clients:
        client.join()
    before = [seen for at, seen in load.seen if at < began_at]
    after = [(at, seen) for at, seen in load.seen if at >= began_at]
    missed_at = max((at for at, seen in after if not is_hit(seen)), default=began_at)
    longest = max(seen.ttft_s for _, seen in after)
    is_right = all(seen.is_right for _, seen in load.seen)
    num_hits = sum(is_hit(seen) for _, seen in after[-10:])
    return [
        Row(f"{name}: hits before, of all", sum(map(is_hit, before)) / max(1, len(before)), ""),
        Row(f"{name}: requests, during and after", len(after), ""),
        never(f"{name}: requests that failed", len(load.errors)),
        at_most(f"{name}: the longest TTFT", longest, "s", LOAD_TIMEOUT_S),
        Row(f"{name}: the event took", ended_at - began_at, "s"),
        Row(f"{name}: the last miss, after it began", missed_at - began_at, "s"),
        at_most(f"{name}: the last miss, after it ended", max(0.0, missed_at - ended_at), "s", BACK_S),
        Row(f"{name}: hits of the last ten", num_hits, "", ">= 9", num_hits >= 9, varies=True),
        Row(f"{name}: right answers", is_right, "", "1", is_right),
    ]


def is_hit(seen: Seen) -> bool:
    """Whether most of the prompt came from some tier."""
    return seen.by_tier["recomputed"] < (1 - HIT_SHARE) * sum(seen.by_tier.values())


def move_slots(cluster: ClusterOfSix) -> None:
    """Some slots of one primary go to another, with all that is in them, as `redis-cli --cluster reshard` does."""
    source, to, *_ = cluster.primaries()
    for slot in sorted(source.own_slots())[:NUM_MOVED]:
        cluster.move_slot(slot, to)


def pause_primary(cluster: ClusterOfSix) -> None:
    """A primary says nothing for a while; its replica takes over meanwhile."""
    primary = cluster.primaries()[0]
    primary.pause()
    time.sleep(PAUSED_S)
    primary.resume()


def kill_primary(cluster: ClusterOfSix) -> None:
    """A primary ends at once, as its machine would."""
    cluster.primaries()[0].kill()
