"""The names of vLLM and LMCache, told of an engine of kvtier's: its own numbers, with their labels and endings."""

import random
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from small_models import VOCAB, byte_tokenizer
from transformers import PreTrainedModel

from kvtier import LLM, Completion, SamplingParams
from kvtier.engine.config import ConfigError, as_config
from kvtier.engine.core import EngineStatistics
from kvtier.engine.observability.metrics.collector import EngineCollector
from kvtier.engine.observability.metrics.compat.lmcache_names import LMCACHE_CATALOGUE
from kvtier.engine.observability.metrics.compat.vllm_names import VLLM_CATALOGUE
from kvtier.engine.observability.metrics.metric_name import MetricName
from kvtier.engine.observability.records.served_requests import ServedRequests
from kvtier.engine.scheduling.request_record import RequestRecord
from kvtier.tiers.lower.statistics import TokenBalance
from kvtier.tiers.naming.block_hash import NO_EXTRA_KEYS
from kvtier.tiers.naming.tier import Tier

BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * 1024  # of every small model
NUM_SLOTS = 24
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def configuration(folder: Path) -> dict[str, object]:
    return {
        "device": {"capacity": NUM_SLOTS * BLOCK_BYTES, "block_size": BLOCK_SIZE},
        "host": {"capacity": NUM_SLOTS * BLOCK_BYTES},
        "disk": {"path": str(folder / "store"), "capacity": "64MiB"},
        "scheduler": {"prefill_chunk": 64, "token_budget": 128, "load": "always"},
    }


def ask_around(llm: LLM) -> list[Completion]:
    """Send so many prompts with common beginnings that every tier answers some."""
    rng = random.Random(3)
    stems = [[rng.randrange(VOCAB) for _ in range(150)] for _ in range(4)]
    tails = [[rng.randrange(VOCAB) for _ in range(10)] for _ in range(25)]
    prompts = [[*rng.choice(stems)[: rng.randrange(30, 150)], *tail] for tail in tails]
    return [llm.generate(prompt, GREEDY)[0] for prompt in prompts]


def told(statistics: EngineStatistics, *compat: str) -> Samples:
    """What Prometheus would read, without kvtier's own names."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: statistics, compat, "a model"))
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if not family.name.startswith("kvtier_")
    }


def of_vllm(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"vllm:{name}", frozenset({"model_name": "a model", "engine": "0", **labels}.items())]


def of_lmcache(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"lmcache_mp_{name}", frozenset(labels.items())]


@pytest.fixture(scope="module")
def asked(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> "Asked":
    """The statistics of an engine that has answered from every tier, its completions, and what it told then."""
    with LLM(model, configuration(tmp_path_factory.mktemp("compat")), byte_tokenizer()) as llm:
        completions = ask_around(llm)
        statistics = llm.statistics()
    return statistics, completions, told(statistics, "vllm", "lmcache")


Asked = tuple[EngineStatistics, list[Completion], Samples]


def test_without_compat_no_name_of_another_is_told(asked: Asked) -> None:
    statistics, _, _ = asked

    assert told(statistics) == {}
    assert {re.split("[:_]", name)[0] for name, _ in told(statistics, "vllm")} == {"vllm", "process"}
    assert all(name.startswith("lmcache_mp_") for name, _ in told(statistics, "lmcache"))


def test_vllms_sources_are_the_tiers_and_add_up_to_the_prompts(asked: Asked) -> None:
    _, completions, samples = asked
    total = TokenBalance()
    for done in completions:
        total = total.plus(done.tokens)
    assert min(total.device, total.host, total.disk) > 0

    by_source = {
        source: of_vllm(samples, "prompt_tokens_by_source_total", source=source)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
    }

    assert by_source == {
        "local_compute": total.recomputed,
        "local_cache_hit": total.device,
        "external_kv_transfer": total.host + total.disk,
    }
    assert sum(by_source.values()) == of_vllm(samples, "prompt_tokens_total") == total.num_tokens
    assert of_vllm(samples, "prompt_tokens_cached_total") == total.num_tokens - total.recomputed
    for source, expected in {"device": total.device, "host": total.host, "disk": total.disk, "p2p": 0}.items():
        assert of_vllm(samples, "prompt_tokens_cached_by_source_total", source=source) == expected


def test_vllms_queries_and_hits_count_tokens_and_share_them_between_the_device_and_what_is_below(asked: Asked) -> None:
    statistics, _, samples = asked
    prefix = statistics.prefix

    on_device, below = (of_vllm(samples, f"{which}prefix_cache_hits_total") for which in ("", "external_"))

    assert of_vllm(samples, "prefix_cache_queries_total") == prefix.queries
    assert on_device + below == prefix.hits
    assert of_vllm(samples, "external_prefix_cache_queries_total") == prefix.queries - on_device


def test_vllms_histograms_have_each_token_and_each_request(asked: Asked) -> None:
    _, completions, samples = asked
    num_tokens = sum(len(done.token_ids) for done in completions)
    num_requests = len(completions)

    assert of_vllm(samples, "generation_tokens_total") == num_tokens
    assert of_vllm(samples, "time_to_first_token_seconds_count") == num_requests
    assert of_vllm(samples, "inter_token_latency_seconds_count") == num_tokens - num_requests
    assert of_vllm(samples, "request_success_total", finished_reason="length") == num_requests
    assert of_vllm(samples, "request_generation_tokens_bucket", le="5.0") == num_requests
    assert of_vllm(samples, "request_generation_tokens_bucket", le="2.0") == 0
    assert of_vllm(samples, "e2e_request_latency_seconds_sum") == pytest.approx(
        sum(of_vllm(samples, f"request_{phase}_time_seconds_sum") for phase in ("queue", "prefill", "decode"))
    )
    assert of_vllm(samples, "time_to_first_token_seconds_sum") == pytest.approx(sum(d.ttft_s for d in completions))


def test_a_request_that_runs_leases_a_share_of_vllms_cache_and_one_that_has_ended_none(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    used: list[float] = []
    with LLM(model, {**configuration(tmp_path), "disk": None}, byte_tokenizer()) as llm:
        request = llm.core.add(list(range(100)), GREEDY, NO_EXTRA_KEYS, 0.0)
        while request.finish_reason is None or llm.core.cache.num_in_flight:
            llm.core.step()
            llm.core.idle()
            used.append(of_vllm(told(llm.core.statistics, "vllm"), "kv_cache_usage_perc") * NUM_SLOTS)

    assert used[0] == pytest.approx(4)  # of its 7 blocks those of the first chunk of 64 tokens
    assert used[-1] == 0


def test_lmcaches_lookups_are_what_was_looked_up_below_the_device(asked: Asked) -> None:
    statistics, _, samples = asked
    tokens = statistics.tokens

    requested, hit = (
        of_lmcache(samples, f"lookup_{what}_tokens_total", model_name="a model") for what in ("requested", "hit")
    )

    assert (requested, hit) == (tokens.num_tokens - tokens.device, tokens.host + tokens.disk)
    assert hit > 0


def test_lmcaches_chunks_are_the_blocks_that_were_copied(asked: Asked) -> None:
    statistics, _, samples = asked
    cache = statistics.cache
    moved = {route: totals.num_bytes / BLOCK_BYTES for route, totals in cache.routes.items()}

    assert of_lmcache(samples, "l1_read_chunks_total") == moved["host_to_device"] + moved["host_to_disk"]
    assert of_lmcache(samples, "l1_write_chunks_total") == moved["device_to_host"] + moved["disk_to_host"]
    assert of_lmcache(samples, "num_chunks_loaded_total", model_name="a model") == moved["host_to_device"] > 0
    assert of_lmcache(samples, "l2_store_completed_objects_chunks_total") == moved["host_to_disk"] > 0
    assert of_lmcache(samples, "l2_prefetch_load_completed_chunks_total") == moved["disk_to_host"] > 0
    assert of_lmcache(samples, "l1_evicted_chunks_total") == cache.tiers[Tier.HOST].num_evicted > 0


def test_lmcaches_gauges_are_what_is_in_the_tiers(asked: Asked) -> None:
    statistics, _, samples = asked
    host, disk = (statistics.cache.tiers[tier] for tier in (Tier.HOST, Tier.DISK))

    assert of_lmcache(samples, "l1_memory_usage_bytes") == host.num_bytes > 0
    assert of_lmcache(samples, "l1_usage_ratio") == host.num_bytes / host.capacity_bytes
    assert of_lmcache(samples, "l2_usage_bytes", l2_name="disk") == disk.num_bytes > 0


@pytest.mark.parametrize("catalogue", [VLLM_CATALOGUE, LMCACHE_CATALOGUE], ids=["vllm", "lmcache"])
def test_what_is_told_is_what_the_catalogue_of_the_other_has(asked: Asked, catalogue: tuple[MetricName, ...]) -> None:
    statistics, _, _ = asked
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: statistics, ("vllm", "lmcache"), "a model"))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    prefix = catalogue[0].name[:5]

    found = {(each.name, each.type, each.documentation) for each in families if each.name.startswith(prefix)}

    assert found == {(each.name, each.kind.value, each.help) for each in catalogue}


def test_an_unknown_name_of_another_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"\$\.metrics\.compat\[1\]"):
        as_config({"metrics": {"compat": ["vllm", "sglang"]}})


def test_a_request_that_got_no_token_counts_as_ended_and_in_no_time() -> None:
    served = ServedRequests()

    served.on_record(_aborted())

    found = served.statistics()
    assert found.finished == {"abort": 1}
    assert (found.ttft.num_values, found.decode.num_values, found.per_token.num_values) == (0, 0, 0)
    assert (found.prompt_tokens.num_values, found.prompt_tokens.total) == (1, 7.0)


def _aborted() -> RequestRecord:
    return RequestRecord("r", None, None, 0.0, TokenBalance(recomputed=7), 0, "abort", total_s=1.0)
