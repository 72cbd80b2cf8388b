"""The real vLLM behind two sidecars that share a remote tier only: is the second one's cold question a hit?"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from foreign.running import Sidecar, Vllm, connector_config, free_endpoint, make_model, transfer_config
from redis_servers import RedisServer, running_server

from bench.connectors.connector_bed import Prompts
from bench.report import Effort, Row
from bench.rounds import at_most

PROMPT_TOKENS = 2050
CHUNK_TOKENS = 256
PUT_S = 60.0
QUIET_S = 1.0  # without another block in the store: all are there

Start = Callable[[str, Path, Path, str, int], tuple[Sidecar, Vllm]]


def vllm_rows(effort: Effort, python: str, folder: Path) -> list[Row]:
    """By LMCache's client, by configuration alone; and by our own connector."""
    model, rows = make_model(python, folder), list[Row]()
    endpoints: dict[str, Start] = {"vLLM by LMCache's client": by_lmcache, "vLLM by our connector": by_connector}
    for name, start in endpoints.items():
        own = folder / start.__name__
        with running_server(own / "redis") as redis:
            where = f"redis://{redis.address}"
            rows += endpoint_rows(
                name, [partial(start, python, model, own, where, number) for number in (1, 2)], redis, effort
            )
    return rows


def endpoint_rows(
    name: str, starts: Sequence[Callable[[], tuple[Sidecar, Vllm]]], redis: RedisServer, effort: Effort
) -> list[Row]:
    """Prompts that the first engine was asked twice, asked of the second for the first time."""
    prompts = Prompts(PROMPT_TOKENS)
    asked = [prompts.next() for _ in range(effort.of(3, quick=1))]
    sidecar, engine = starts[0]()
    with sidecar, engine:
        engine.generate([prompts.next()])  # what comes first takes longer
        cold = [engine.generate([prompt]) for prompt in asked]
        engine.reset()
        for prompt in asked:
            engine.generate([prompt])
        num_put = wait_put(redis)
    sidecar, engine = starts[1]()
    with sidecar, engine:
        engine.generate([prompts.next()])
        there = [engine.generate([prompt]) for prompt in asked]
    limit = CHUNK_TOKENS + PROMPT_TOKENS % CHUNK_TOKENS
    is_equal = all(t["tokens"] == c["tokens"] for t, c in zip(there, cold, strict=True))
    ratio = statistics.median(t["ttft_s"][0] / c["ttft_s"][0] for t, c in zip(there, cold, strict=True))
    return [
        Row(f"{name}: blocks in the store", num_put, "blocks"),
        Row(f"{name}: outputs equal", is_equal, "", "1", is_equal),
        at_most(
            f"{name}: tokens computed by the second", max(t["scheduled"] for t in there), "tokens", limit, varies=False
        ),
        Row(f"{name}: TTFT of the second / cold", ratio, ""),
    ]


def wait_put(redis: RedisServer) -> int:
    """Until nothing more comes to the store; how many blocks are there."""
    give_up_at, num_seen, seen_at = time.monotonic() + PUT_S, 0, time.monotonic()
    while time.monotonic() < give_up_at and (not num_seen or time.monotonic() - seen_at < QUIET_S):
        if (num_now := int(redis.ask("DBSIZE"))) != num_seen:
            num_seen, seen_at = num_now, time.monotonic()
        time.sleep(0.05)
    return num_seen


def by_lmcache(python: str, model: Path, folder: Path, where: str, number: int) -> tuple[Sidecar, Vllm]:
    """An engine that dials the sidecar with LMCache's client."""
    sidecar = Sidecar(endpoint := free_endpoint(), "--host", "512MiB", "--remote", where)
    return sidecar, Vllm(python, model, transfer_config(endpoint, "recompute"))


def by_connector(python: str, model: Path, folder: Path, where: str, number: int) -> tuple[Sidecar, Vllm]:
    """An engine with our connector."""
    socket = str(folder / f"own-{number}.sock")
    sidecar = Sidecar(free_endpoint(), "--host", "1GiB", "--remote", where, "--socket", socket)
    return sidecar, Vllm(python, model, connector_config(socket, "recompute"), disable_hybrid_kv_cache_manager=False)
