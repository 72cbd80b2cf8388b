"""Does a second machine find what a first one has computed, and how soon?"""

from pathlib import Path

from redis_servers import running_server

from bench.cluster.replicas import Replicas, asked, documents, median_ttft
from bench.report import Row
from bench.rounds import at_least, at_most

NUM_DOCUMENTS = 20
NUM_ROUNDS = 2  # of questions to the first: what is used a second time is shared


def engine_rows(python: str, folder: Path) -> list[Row]:
    """Two servers without a disk, which share a Redis only. The second is asked about each document once."""
    replicas, about = Replicas(folder, device_documents=2.2, host_documents=22), documents(NUM_DOCUMENTS)
    with running_server(folder / "redis", "--maxmemory", "4gb") as redis:
        where = f"redis://{redis.address}"
        with replicas.started(where) as first, replicas.started(where) as second:
            cold, *_ = [asked(first, about, number, number) for number in range(NUM_ROUNDS)]
            first.wait_put()
            warm = asked(second, about, 5, 5)
            right = all(seen.is_right for seen in (*cold, *warm))
            num_put, num_read = first.metric("kvtier_remote_blocks"), second.metric("kvtier_remote_bytes")
    of_documents = [sum(seen.by_tier.values()) for seen in warm]
    from_remote = sum(seen.by_tier["remote"] for seen in warm) / sum(of_documents)
    return [
        Row("engines: blocks that the first has put", num_put, "blocks"),
        Row("engines: bytes that the second has read", num_read / 2**20, "MiB"),
        at_least("engines: tokens of the second from remote, of all", from_remote, 0.95),
        Row("engines: cold TTFT, median", 1e3 * median_ttft(cold), "ms"),
        at_most("engines: TTFT of the second / cold", median_ttft(warm) / median_ttft(cold), "", 0.25),
        Row("engines: right answers", right, "", "1", right),
    ]
