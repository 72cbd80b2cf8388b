"""kvtier's disk below SGLang's host memory: SGLang's own factory, controller and host pools, on a CPU.

Runs in the environment with SGLang: `make test-engines`.
"""

import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged_files import damage

pytestmark = pytest.mark.engines

if "sglang" not in sys.modules and importlib.util.find_spec("sglang") is None:
    pytest.skip("there is no sglang here: make .venv/sglang/installed", allow_module_level=True)

from foreign.sglang_bed import (  # noqa: E402  # it imports SGLang
    MHA_LAYOUTS,
    MLA_LAYOUTS,
    PAGE_SIZE,
    Controller,
    HiCacheController,
    config,
    created,
    label_weights,
    mha_pool,
    mla_pool,
    server,
)

NUM_PAGES = 20
NUM_TOKENS = NUM_PAGES * PAGE_SIZE
TOKENS = list(range(1000, 1000 + NUM_TOKENS))
POOLS: dict[str, Callable[[], Any]] = {
    **{f"mha-{layout}": lambda layout=layout: mha_pool(layout) for layout in MHA_LAYOUTS},
    **{f"mla-{layout}": lambda layout=layout: mla_pool(layout) for layout in MLA_LAYOUTS},
}
INTERFACES = {"v1": True, "generic": False}


def extra_config(folder: Path, *, is_in_place: bool = True, **more: object) -> dict[str, object]:
    return {
        "backend_name": "kvtier",
        "module_path": "kvtier.connectors.sglang",
        "class_name": "KVTierStorage",
        "interface_v1": int(is_in_place),
        "path": str(folder / "store"),
        "capacity": "64MiB",
        "read_timeout_s": 60,
        "weights": "revision 1",
        **more,
    }


@contextmanager
def attached(folder: Path, pool: Any, *, is_in_place: bool = True, **facts: Any) -> Iterator[Controller]:
    more, options = facts.pop("more", {}), facts.pop("server", {})
    is_mla_model = "MLA" in type(pool).__name__
    storage_config = config(
        extra_config(folder, is_in_place=is_in_place, **more), **{"is_mla_model": is_mla_model, **facts}
    )
    with server(**options):
        storage = created(storage_config, pool)
        try:
            yield Controller(storage, pool, is_in_place=is_in_place)
        finally:
            storage.close()


def indices(pages: list[int]) -> torch.Tensor:
    """Return the indices of all tokens of some pages of the pool."""
    return torch.cat([torch.arange(page * PAGE_SIZE, (page + 1) * PAGE_SIZE) for page in pages])


def content(pool: Any, pages: list[int]) -> torch.Tensor:
    """Return the bytes of pages as SGLang itself reads them: [num_pages, bytes]."""
    return torch.stack([pool.get_data_page(page * PAGE_SIZE).contiguous().view(torch.uint8) for page in pages])


SOURCE = [3 * page % 101 for page in range(NUM_PAGES)]  # scattered, as a pool's pages are after a while
TARGET = [150 + 7 * page % 60 for page in range(NUM_PAGES)]


@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize("kind", POOLS)
def test_pages_come_back_after_a_restart_into_other_places_of_the_pool(
    tmp_path: Path, kind: str, interface: str
) -> None:
    pool, is_in_place = POOLS[kind](), INTERFACES[interface]
    expected = content(pool, SOURCE)
    with attached(tmp_path, pool, is_in_place=is_in_place) as controller:
        assert controller.num_hit(TOKENS) == 0
        assert controller.backup(TOKENS, indices(SOURCE)) == NUM_TOKENS
    pool.kv_buffer.zero_()

    with attached(tmp_path, pool, is_in_place=is_in_place) as controller:
        assert controller.num_hit(TOKENS) == NUM_TOKENS
        assert controller.prefetch(TOKENS, indices(TARGET)) == NUM_TOKENS

    assert torch.equal(content(pool, TARGET), expected)
    others = sorted(set(range(pool.page_num)) - set(TARGET))
    assert not content(pool, others).any()


def test_a_prompt_that_begins_alike_hits_as_far_as_it_does(tmp_path: Path) -> None:
    pool = mha_pool("page_first")
    with attached(tmp_path, pool) as controller:
        controller.backup(TOKENS, indices(SOURCE))
        half = [*TOKENS[: 7 * PAGE_SIZE + 3], *range(5000, 5100)]

        assert controller.num_hit(half) == 7 * PAGE_SIZE
        assert controller.prefetch(half, indices(TARGET)) == 7 * PAGE_SIZE
        assert controller.num_hit(TOKENS[1:]) == 0


@pytest.mark.parametrize("interface", INTERFACES)
def test_a_damaged_page_ends_the_prefix_and_can_be_stored_again(tmp_path: Path, interface: str) -> None:
    pool, is_in_place = mha_pool("page_first"), INTERFACES[interface]
    expected = content(pool, SOURCE)
    with attached(tmp_path, pool, is_in_place=is_in_place) as controller:
        controller.backup(TOKENS, indices(SOURCE))
    damage(tmp_path / "store", expected[5].numpy().tobytes())

    with attached(tmp_path, pool, is_in_place=is_in_place) as controller:
        assert controller.prefetch(TOKENS, indices(TARGET)) == 5 * PAGE_SIZE
        assert torch.equal(content(pool, TARGET[:5]), expected[:5])
        assert controller.num_hit(TOKENS) == 5 * PAGE_SIZE
        assert sum(controller.storage_backend.statistics()["tier"]["corrupt"].values()) == 1
        assert controller.backup(TOKENS, indices(SOURCE)) == NUM_TOKENS
        assert controller.prefetch(TOKENS, indices(TARGET)) == NUM_TOKENS
    assert torch.equal(content(pool, TARGET), expected)


OTHERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "weights": (lambda: mha_pool("page_first"), {"more": {"weights": "revision 2"}}),
    "model": (lambda: mha_pool("page_first"), {"model_name": "another/model"}),
    "layout": (lambda: mha_pool("page_first_direct"), {}),
    "type": (lambda: mha_pool("page_first", torch.float16), {}),
    "layers": (lambda: mha_pool("page_first", num_layers=4), {}),
    "rank": (lambda: mha_pool("page_first"), {"tp_rank": 1, "tp_size": 2}),
    "stage": (lambda: mha_pool("page_first"), {"pp_rank": 1, "pp_size": 2}),
    "interface": (lambda: mha_pool("page_first"), {"is_in_place": False}),
    "overrides": (lambda: mha_pool("page_first"), {"server": {"json_model_override_args": '{"rope_theta": 1}'}}),
    "quantization": (lambda: mha_pool("page_first"), {"server": {"quantization": "fp8"}}),
    "load format": (lambda: mha_pool("page_first"), {"server": {"load_format": "dummy"}}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_pages_of_another_engine_are_not_found(tmp_path: Path, what: str) -> None:
    make, facts = OTHERS[what]
    with attached(tmp_path, mha_pool("page_first")) as controller:
        controller.backup(TOKENS, indices(SOURCE))

    with attached(tmp_path, make(), **facts) as controller:
        assert controller.num_hit(TOKENS) == 0
        assert controller.backup(TOKENS, indices(SOURCE)) == NUM_TOKENS
    with attached(tmp_path, mha_pool("page_first")) as controller:
        assert controller.num_hit(TOKENS) == NUM_TOKENS


def test_what_decides_no_byte_finds_the_same_pages(tmp_path: Path) -> None:
    with attached(tmp_path, mha_pool("page_first")) as controller:
        controller.backup(TOKENS, indices(SOURCE))

    with attached(tmp_path, mha_pool("page_first"), server={"max_running_requests": 3, "log_level": "info"}) as other:
        assert other.num_hit(TOKENS) == NUM_TOKENS


def test_after_a_reset_of_sglangs_cache_no_page_of_before_is_found(tmp_path: Path) -> None:
    """SGLang resets its cache after an update of weights, and starts other threads that call the storage."""
    pool = mha_pool("page_first")
    expected = content(pool, SOURCE)
    with attached(tmp_path, pool) as controller:
        with ThreadPoolExecutor(1) as before:
            before.submit(controller.backup, TOKENS, indices(SOURCE)).result()
            assert before.submit(controller.num_hit, TOKENS).result() == NUM_TOKENS
        with ThreadPoolExecutor(1) as after:
            assert after.submit(controller.num_hit, TOKENS).result() == 0
            pool.kv_buffer.neg_()
            assert after.submit(controller.backup, TOKENS, indices(SOURCE)).result() == NUM_TOKENS
            assert after.submit(controller.num_hit, TOKENS).result() == NUM_TOKENS

    with attached(tmp_path, pool) as restarted:
        assert restarted.prefetch(TOKENS, indices(TARGET)) == NUM_TOKENS
        assert torch.equal(content(pool, TARGET), expected), "a restarted server has pages of updated weights"


def test_sglangs_own_reset_of_its_controller_ends_the_threads_that_call_a_storage() -> None:
    """What the backend goes by. If SGLang does otherwise, resets are not noticed any more."""
    reset = inspect.getsource(HiCacheController.reset)

    assert "self._stop_storage_threads()" in reset
    assert "threading.Thread(" in reset


def test_after_weights_have_another_version_no_page_of_before_is_found(tmp_path: Path) -> None:
    with attached(tmp_path, mha_pool("page_first")) as controller:
        controller.backup(TOKENS, indices(SOURCE))
        assert controller.num_hit(TOKENS) == NUM_TOKENS

        label_weights("step 2")

        assert controller.num_hit(TOKENS) == 0
        assert controller.backup(TOKENS, indices(SOURCE)) == NUM_TOKENS
        assert controller.num_hit(TOKENS) == NUM_TOKENS


def test_ranks_have_stores_of_their_own_side_by_side(tmp_path: Path) -> None:
    ranks = [{"tp_rank": rank, "tp_size": 2} for rank in range(2)]
    pools = [mha_pool("page_first"), mha_pool("page_first")]
    pools[1].kv_buffer.neg_()
    expected = [content(pool, SOURCE) for pool in pools]
    with attached(tmp_path, pools[0], **ranks[0]) as first, attached(tmp_path, pools[1], **ranks[1]) as second:
        for controller, pool, right in zip((first, second), pools, expected, strict=True):
            assert controller.backup(TOKENS, indices(SOURCE)) == NUM_TOKENS
            assert controller.prefetch(TOKENS, indices(TARGET)) == NUM_TOKENS
            assert torch.equal(content(pool, TARGET), right)


def test_more_pages_than_go_through_the_shared_rows_at_once(tmp_path: Path) -> None:
    pool = mha_pool("layer_first")
    pages = list(range(250))
    tokens = list(range(len(pages) * PAGE_SIZE))
    expected = content(pool, pages)
    with attached(tmp_path, pool) as controller:
        assert controller.backup(tokens, indices(pages)) == len(tokens)
        pool.kv_buffer.zero_()
        assert controller.prefetch(tokens, indices(pages)) == len(tokens)
    assert torch.equal(content(pool, pages), expected)


def test_what_is_cleared_is_not_found(tmp_path: Path) -> None:
    with attached(tmp_path, mha_pool("page_first")) as controller:
        controller.backup(TOKENS, indices(SOURCE))
        assert controller.storage_backend.clear()
        assert controller.num_hit(TOKENS) == 0


def test_a_closed_storage_misses(tmp_path: Path) -> None:
    with attached(tmp_path, mha_pool("page_first")) as controller:
        controller.backup(TOKENS, indices(SOURCE))

    assert controller.prefetch(TOKENS, indices(TARGET)) == 0
    assert controller.backup(list(range(NUM_TOKENS)), indices(SOURCE)) == 0


def test_a_folder_that_cannot_be_used_is_a_storage_without_a_page(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another engine has it: this one says so, serves, and finds nothing."""
    with attached(tmp_path, mha_pool("page_first")) as first:
        first.backup(TOKENS, indices(SOURCE))
        with caplog.at_level(logging.WARNING), attached(tmp_path, mha_pool("page_first")) as second:
            assert second.num_hit(TOKENS) == 0
            assert second.backup(TOKENS, indices(SOURCE)) == 0
        assert "nothing is cached there until it opens" in caplog.text


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"is_mla_model": True, "tp_size": 2}, "use --tp 1"),
        ({"more": {"weights": None}, "server": {"model_path": "no/such-model"}}, 'set "weights"'),
        ({"more": {"capasity": "1GiB"}}, "capasity"),
        ({"more": {"codec": "fp8"}}, "fp8"),
    ],
    ids=["shared latents", "weights", "key", "lossy"],
)
def test_what_cannot_be_kept_is_refused_at_the_attach(tmp_path: Path, facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason), attached(tmp_path, mha_pool("page_first"), **facts):
        pass
