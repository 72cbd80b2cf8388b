"""Metrics, as Prometheus scrapes them over HTTP."""

import asyncio
import random
import socket
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from small_models import VOCAB, byte_tokenizer
from transformers import PreTrainedModel

from kvtier import LLM, AsyncLLM, Completion, SamplingParams
from kvtier.engine.observability.metrics.names import CATALOGUE
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS
from kvtier.tiers.naming.tier import Tier

BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * 1024  # of every small model
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
HTTP_TIMEOUT_S = 60.0

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def configuration(folder: Path, port: int | None, num_slots: int = 24) -> dict[str, object]:
    tables: dict[str, object] = {
        "device": {"capacity": num_slots * BLOCK_BYTES, "block_size": BLOCK_SIZE},
        "host": {"capacity": num_slots * BLOCK_BYTES},
        "disk": {"path": str(folder / "store"), "capacity": "64MiB"},
        "scheduler": {"prefill_chunk": 64, "token_budget": 128, "load": "always"},
    }
    return tables if port is None else {**tables, "metrics_port": port}


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


def scrape(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=HTTP_TIMEOUT_S) as reply:
        text = reply.read().decode()
    families = list(text_string_to_metric_families(text))
    catalogue = {(each.name, each.kind.value, each.help) for each in CATALOGUE}
    assert {(each.name, each.type, each.documentation) for each in families} <= catalogue
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def by_label(samples: Samples, name: str, label: str) -> dict[str, float]:
    """The samples of that name that are not 0, by the value of their label."""
    return {dict(labels)[label]: value for (found, labels), value in samples.items() if found == name and value != 0}


def not_zero(counts: Mapping[str, int]) -> dict[str, int]:
    return {str(name): count for name, count in counts.items() if count != 0}


def ask_around(llm: LLM) -> list[Completion]:
    """Send so many prompts with common beginnings that every tier answers some."""
    rng = random.Random(3)
    stems = [prompt_of(stem, 150) for stem in range(4)]
    prompts = [[*rng.choice(stems)[: rng.randrange(30, 150)], *prompt_of(seed, 10)] for seed in range(25)]
    return [llm.generate(prompt, GREEDY)[0] for prompt in prompts]


def flip_a_byte_of_a_block(folder: Path, name: bytes) -> None:
    with LmdbStore(folder) as store:
        places = [store.place(key) for key in store.keys() if key[16:-4] == name]  # noqa: SIM118  # no dict
    for place in places:
        assert place is not None
        with place[0].open("r+b") as file:
            file.seek(place[1] + 7)
            (byte,) = file.read(1)
            file.seek(place[1] + 7)
            file.write(bytes([byte ^ 1]))


def test_token_counters_equal_the_sums_over_all_completions(model: PreTrainedModel, tmp_path: Path, port: int) -> None:
    total = TokenBalance()
    with LLM(model, configuration(tmp_path, port), byte_tokenizer()) as llm:
        for done in ask_around(llm):
            total = total.plus(done.tokens)

        samples = scrape(port)

    hits = {"device": total.device, "host": total.host, "disk": total.disk}
    assert min(hits.values()) > 0
    assert samples["kvtier_prompt_tokens_total", frozenset()] == total.num_tokens
    assert by_label(samples, "kvtier_hit_tokens_total", "tier") == hits
    assert by_label(samples, "kvtier_recomputed_tokens_total", "reason") == not_zero(total.reasons)


def test_residency_moved_bytes_and_evictions_are_those_of_the_statistics(
    model: PreTrainedModel, tmp_path: Path, port: int
) -> None:
    with LLM(model, configuration(tmp_path, port), byte_tokenizer()) as llm:
        ask_around(llm)
        cache = llm.statistics().cache

        samples = scrape(port)

    for name, counts in {
        "kvtier_resident_blocks": {tier: found.num_blocks for tier, found in cache.tiers.items()},
        "kvtier_resident_bytes": {tier: found.num_bytes for tier, found in cache.tiers.items()},
        "kvtier_capacity_bytes": {tier: found.capacity_bytes for tier, found in cache.tiers.items()},
        "kvtier_dropped_spills_total": {tier: found.dropped_spills for tier, found in cache.tiers.items()},
    }.items():
        assert by_label(samples, name, "tier") == not_zero(counts), name
    evicted = {(tier, cause): n for tier, found in cache.tiers.items() for cause, n in found.evicted.items()}
    assert {
        (dict(labels)["tier"], dict(labels)["cause"]): value
        for (name, labels), value in samples.items()
        if name == "kvtier_evicted_blocks_total"
    } == evicted
    moved = {route: totals.num_bytes for route, totals in cache.routes.items()}
    assert by_label(samples, "kvtier_moved_bytes_total", "route") == moved
    assert min(moved.values()) > 0
    assert set(by_label(samples, "kvtier_moved_seconds_total", "route")) == set(moved)
    assert by_label(samples, "kvtier_failed_transfers_total", "route") == {}
    assert cache.tiers[Tier.DEVICE].num_evicted > 0
    assert by_label(samples, "kvtier_capacity_bytes", "tier")["device"] == 24 * BLOCK_BYTES
    assert samples["kvtier_clean_ahead_blocks", frozenset()] > 0


def test_no_requests_are_left_when_all_have_answered(model: PreTrainedModel, tmp_path: Path, port: int) -> None:
    with LLM(model, configuration(tmp_path, port), byte_tokenizer()) as llm:
        llm.generate(prompt_of(1, 50), GREEDY)

        samples = scrape(port)

    states = {dict(labels)["state"]: value for (name, labels), value in samples.items() if name == "kvtier_requests"}
    assert states == {"waiting": 0, "promoting": 0, "running": 0}


def test_a_flipped_byte_on_disk_is_counted_as_corrupt(model: PreTrainedModel, tmp_path: Path, port: int) -> None:
    prompt = prompt_of(1, 100)
    with LLM(model, configuration(tmp_path, None), byte_tokenizer()) as llm:
        llm.generate(prompt, GREEDY)
        fourth = llm.core.chain(prompt, NO_EXTRA_KEYS).names[3]
    flip_a_byte_of_a_block(tmp_path / "store", fourth)

    with LLM(model, configuration(tmp_path, port), byte_tokenizer()) as llm:
        before = scrape(port)
        llm.generate(prompt, GREEDY)
        after = scrape(port)

    corrupt = ("kvtier_corrupt_blocks_total", frozenset({("tier", "disk"), ("cause", "corrupt")}))
    assert (before.get(corrupt, 0), after[corrupt]) == (0, 1)
    assert by_label(after, "kvtier_hit_tokens_total", "tier") == {"disk": 48}
    assert by_label(after, "kvtier_recomputed_tokens_total", "reason") == {"corrupt": 48, "last_block": 4}


def test_metrics_are_served_on_the_loopback_only(model: PreTrainedModel, tmp_path: Path, port: int) -> None:
    with LLM(model, configuration(tmp_path, port), byte_tokenizer()):
        with socket.socket() as neighbour:  # a server on all addresses would have this one, too
            neighbour.bind(("127.0.0.2", port))

        assert scrape(port)


def test_an_async_llm_serves_the_same_metrics(model: PreTrainedModel, tmp_path: Path, port: int) -> None:
    async def story() -> tuple[Completion | None, Samples]:
        async with AsyncLLM(model, configuration(tmp_path, port), byte_tokenizer()) as llm:
            async for piece in llm.generate(prompt_of(1, 50), GREEDY):
                done = piece.completion
            return done, await asyncio.to_thread(scrape, port)

    done, samples = asyncio.run(story())

    assert done is not None
    assert samples["kvtier_prompt_tokens_total", frozenset()] == done.tokens.num_tokens == 50


def test_the_port_is_free_again_after_the_end(model: PreTrainedModel, tmp_path: Path, port: int) -> None:
    for _ in range(2):
        with LLM(model, configuration(tmp_path, port), byte_tokenizer()):
            assert scrape(port)

    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))


def test_a_taken_port_is_one_clear_error(model: PreTrainedModel, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(OSError, match=str(port)) as no:
            LLM(model, configuration(tmp_path, port), byte_tokenizer())

    assert "metrics_port" in str(no.value)
    assert "\n" not in str(no.value)


def test_an_llm_that_found_its_port_taken_leaves_the_store_to_the_next(model: PreTrainedModel, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="metrics_port"):
        LLM(model, configuration(tmp_path, taken.getsockname()[1]), byte_tokenizer())

    with LLM(model, configuration(tmp_path, None), byte_tokenizer()) as llm:
        assert llm.generate(prompt_of(1, 50), GREEDY)


def test_an_async_llm_that_found_its_port_taken_leaves_the_store_to_the_next(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    async def start(port: int) -> None:
        async with AsyncLLM(model, configuration(tmp_path, port), byte_tokenizer()):
            pass

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="metrics_port"):
        asyncio.run(start(taken.getsockname()[1]))

    with LLM(model, configuration(tmp_path, None), byte_tokenizer()) as llm:
        assert llm.generate(prompt_of(1, 50), GREEDY)
