"""Does a second machine find what a first one has computed, and how soon?"""

from pathlib import Path

from redis_servers import running_server

from bench.cluster.replicas import Replicas, asked, documents, median_ttft
from bench.report import Effort, Row
from bench.rounds import at_least, at_most
from bench.server.cache_control import NUM_TOKENS

LONG_TOKENS = 8192
NUM_ROUNDS = 2  # of questions to the first: what is used a second time is shared


def engine_rows(effort: Effort, python: str, folder: Path) -> list[Row]:
    """Documents of 8,000 tokens, and short ones: of these an answer's own time, 12 ms, is a large part, since the model
    computes 27,000 tokens a second."""
    num_documents = effort.of(20, quick=2)
    return [
        *length_rows(folder / "long", num_documents, LONG_TOKENS, 0.25),
        *length_rows(folder / "short", num_documents, NUM_TOKENS),
    ]


def length_rows(folder: Path, num_documents: int, num_tokens: int, max_of_cold: float | None = None) -> list[Row]:
    """Two servers without a disk, which share a Redis only. The second is asked about each document once. None: the
    TTFT is no promise."""
    replicas = Replicas(folder, device_documents=2.2, host_documents=num_documents + 2, document_tokens=num_tokens)
    about = documents(num_documents, num_tokens)
    with running_server(folder / "redis", "--maxmemory", "4gb") as redis:
        where = f"redis://{redis.address}"
        with replicas.started(where) as first, replicas.started(where) as second:
            cold, *_ = [asked(first, about, number, number) for number in range(NUM_ROUNDS)]
            first.wait_put()
            warm = asked(second, about, 5, 5)
            right = all(seen.is_right for seen in (*cold, *warm))
            num_put, num_read = first.metric("kvtier_remote_blocks"), second.metric("kvtier_remote_bytes")
    from_remote = sum(seen.by_tier["remote"] for seen in warm) / sum(sum(seen.by_tier.values()) for seen in warm)
    name, of_cold = f"engines, {num_tokens:,} tokens", median_ttft(warm) / median_ttft(cold)
    ttft = f"{name}: TTFT of the second / cold"
    return [
        Row(f"{name}: blocks that the first has put", num_put, "blocks"),
        Row(f"{name}: bytes that the second has read", num_read / 2**20, "MiB"),
        at_least(f"{name}: tokens of the second from remote, of all", from_remote, 0.95),
        Row(f"{name}: cold TTFT, median", 1e3 * median_ttft(cold), "ms"),
        Row(ttft, of_cold, "") if max_of_cold is None else at_most(ttft, of_cold, "", max_of_cold),
        Row(f"{name}: right answers", right, "", "1", right),
    ]
