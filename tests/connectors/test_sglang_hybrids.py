"""Hybrid models below SGLang: states, windows and index keys on kvtier's disk, through SGLang's own hybrid controller.

Runs in the environment with SGLang: `make test-engines`.
"""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damaged_files import damage

from kvtier.connectors.sglang_storage.known_sglang import UnsupportedEngine

pytestmark = pytest.mark.engines

if "sglang" not in sys.modules and importlib.util.find_spec("sglang") is None:
    pytest.skip("there is no sglang here: make .venv/sglang/installed", allow_module_level=True)

from foreign.sglang_bed import PAGE_SIZE, mha_pool  # noqa: E402  # it imports SGLang
from foreign.sglang_hybrid_bed import (  # noqa: E402
    INDEXER,
    KV,
    MAMBA,
    SWA,
    HybridController,
    PoolName,
    PoolTransfer,
    attached,
    indexer_pool,
    looked_for,
    mamba_pool,
    page_hashes,
    pools_of,
    written,
)

NUM_PAGES = 12
WINDOW = 3  # pages
DOCUMENT = list(range(1000, 1000 + NUM_PAGES * PAGE_SIZE))
OTHER = list(range(5000, 5000 + NUM_PAGES * PAGE_SIZE))
SOURCE = [3 * page % 101 for page in range(NUM_PAGES)]  # scattered, as a pool's pages are after a while
TARGET = [150 + 7 * page % 60 for page in range(NUM_PAGES)]
STATE, OTHER_STATE, TARGET_STATE = 4, 9, 21


def settings(folder: Path) -> dict[str, object]:
    return {
        "backend_name": "kvtier",
        "module_path": "kvtier.connectors.sglang",
        "class_name": "KVTierStorage",
        "interface_v1": 1,
        "path": str(folder / "store"),
        "capacity": "64MiB",
        "read_timeout_s": 60,
        "weights": "revision 1",
    }


def indices(pages: list[int], page_size: int = PAGE_SIZE) -> torch.Tensor:
    """Return the indices of all tokens of some pages of a pool."""
    return torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in pages])


def content(pool: Any, pages: list[int]) -> torch.Tensor:
    """Return the bytes of pages as SGLang itself reads them: [num_pages, bytes]."""
    return torch.stack([pool.get_data_page(page * pool.page_size).view(torch.uint8).flatten() for page in pages])


def stored(pool: PoolName, tokens: list[int] = DOCUMENT, state: int = STATE) -> PoolTransfer:
    """Return the `PoolTransfer` for the pages that a prompt of these tokens stores in a pool."""
    hashes = page_hashes(tokens)
    if pool is MAMBA:
        return written(pool, hashes[-1:], torch.tensor([state]))
    if pool is SWA:
        return written(pool, hashes[-WINDOW:], indices(SOURCE[: len(hashes)][-WINDOW:]))
    return looked_for(pool, 0)


TARGETS = {KV: TARGET, MAMBA: [TARGET_STATE], SWA: [200, 3, 77], INDEXER: TARGET}
SOURCES = {KV: SOURCE, MAMBA: [STATE], SWA: SOURCE[-WINDOW:], INDEXER: SOURCE}


def needed_by(pools: dict[PoolName, Any]) -> list[PoolTransfer]:
    return [looked_for(name, {MAMBA: 1, SWA: WINDOW, INDEXER: 0}[name]) for name in pools if name is not KV]


def backup(controller: HybridController, pools: dict[PoolName, Any], tokens: list[int], state: int = STATE) -> None:
    num_pages = len(tokens) // PAGE_SIZE
    others = [stored(name, tokens, state) for name in pools if name is not KV]

    num_stored, hits = controller.backup(tokens, indices(SOURCE[:num_pages]), others)

    assert num_stored == num_pages
    assert all(hits[each.name] == len(each.keys or ()) for each in others)


def targets(pools: dict[PoolName, Any]) -> dict[PoolName, torch.Tensor]:
    return {name: indices(TARGETS[name], pool.page_size) for name, pool in pools.items()}


@pytest.mark.parametrize("kind", ["mamba", "swa", "both", "indexer"])
def test_a_hybrids_prompt_comes_back_from_every_pool_after_a_restart(tmp_path: Path, kind: str) -> None:
    pools = pools_of(kind)
    expected = {name: content(pool, SOURCES[name]) for name, pool in pools.items()}
    with attached(pools, settings(tmp_path)) as controller:
        assert controller.num_hit(DOCUMENT, needed_by(pools)) == 0
        backup(controller, pools, DOCUMENT)

    with attached(pools, settings(tmp_path)) as controller:
        num_loaded, hits = controller.load(DOCUMENT, targets(pools), needed_by(pools))

    assert num_loaded == NUM_PAGES
    for name, pool in pools.items():
        assert torch.equal(content(pool, TARGETS[name]), expected[name]), name
    assert hits.get(MAMBA, 0) == (MAMBA in pools)
    assert hits.get(SWA, 0) == (WINDOW if SWA in pools else 0)


def test_a_hit_ends_where_a_state_is(tmp_path: Path) -> None:
    """Keys and values of all pages are there, and states after the fifth and the ninth of them."""
    pools = pools_of("mamba")
    with attached(pools, settings(tmp_path)) as controller:
        for num_pages in (5, 9):
            backup(controller, pools, DOCUMENT[: num_pages * PAGE_SIZE])
        controller.backup(DOCUMENT, indices(SOURCE), [])

        operation = controller.looked_up(DOCUMENT, needed_by(pools))

        assert operation.storage_hit_count == 9 * PAGE_SIZE
        assert operation.pool_storage_result.restorable_prefix_pages == [5, 9]
        assert operation.query_pool_hit_pages == {KV: NUM_PAGES, MAMBA: 9}
        assert controller.num_hit(DOCUMENT[: 8 * PAGE_SIZE], needed_by(pools)) == 5
        assert controller.num_hit(DOCUMENT[: 4 * PAGE_SIZE], needed_by(pools)) == 0


def test_a_window_needs_its_last_pages_only(tmp_path: Path) -> None:
    pools = pools_of("swa")
    with attached(pools, settings(tmp_path)) as controller:
        backup(controller, pools, DOCUMENT)

        assert controller.num_hit(DOCUMENT, needed_by(pools)) == NUM_PAGES
        assert controller.num_hit(DOCUMENT[:-PAGE_SIZE], needed_by(pools)) == 0


def test_a_prompt_gets_the_state_of_its_own_tokens(tmp_path: Path) -> None:
    pools = pools_of("mamba")
    states = [content(pools[MAMBA], [state]) for state in (STATE, OTHER_STATE)]
    with attached(pools, settings(tmp_path)) as controller:
        backup(controller, pools, DOCUMENT, STATE)
        backup(controller, pools, OTHER, OTHER_STATE)
        for tokens, expected in zip((OTHER, DOCUMENT), states[::-1], strict=True):
            _, hits = controller.load(tokens, targets(pools), needed_by(pools))

            assert hits[MAMBA] == 1
            assert torch.equal(content(pools[MAMBA], [TARGET_STATE]), expected)


def test_a_damaged_state_is_not_loaded_and_not_found_again(tmp_path: Path) -> None:
    pools = pools_of("mamba")
    with attached(pools, settings(tmp_path)) as controller:
        backup(controller, pools, DOCUMENT)
    damage(tmp_path / "store", content(pools[MAMBA], [STATE])[0].numpy().tobytes())

    with attached(pools, settings(tmp_path)) as controller:
        before = content(pools[MAMBA], [TARGET_STATE])
        num_loaded, hits = controller.load(DOCUMENT, targets(pools), needed_by(pools))

        assert (num_loaded, hits[MAMBA]) == (NUM_PAGES, 0)
        assert torch.equal(content(pools[MAMBA], [TARGET_STATE]), before)
        assert controller.num_hit(DOCUMENT, needed_by(pools)) == 0
        backup(controller, pools, DOCUMENT)
        assert controller.num_hit(DOCUMENT, needed_by(pools)) == NUM_PAGES


ANOTHER: dict[str, Callable[[], dict[PoolName, Any]]] = {
    "shape of a state": lambda: {KV: mha_pool("page_first"), MAMBA: mamba_pool(width=7)},
    "type of a state": lambda: {KV: mha_pool("page_first"), MAMBA: mamba_pool(dtype=torch.bfloat16)},
    "layout of states": lambda: {KV: mha_pool("page_first"), MAMBA: mamba_pool("page_first_direct")},
    "layers of keys and values": lambda: {KV: mha_pool("page_first", num_layers=4), MAMBA: mamba_pool()},
    "pool": lambda: pools_of("both"),
}


def test_pages_of_a_model_with_other_pools_are_not_found(tmp_path: Path) -> None:
    pools = pools_of("mamba")
    with attached(pools, settings(tmp_path)) as controller:
        backup(controller, pools, DOCUMENT)

    for what, make in ANOTHER.items():
        others = make()
        with attached(others, settings(tmp_path)) as controller:
            assert controller.storage_backend.batch_exists(page_hashes(DOCUMENT)) == 0, what
            backup(controller, others, DOCUMENT)
    with attached(pools, settings(tmp_path)) as controller:
        assert controller.num_hit(DOCUMENT, needed_by(pools)) == NUM_PAGES


def test_what_is_cleared_is_not_found_in_any_pool(tmp_path: Path) -> None:
    pools = pools_of("both")
    with attached(pools, settings(tmp_path)) as controller:
        backup(controller, pools, DOCUMENT)
        assert controller.clear_storage_backend()
        controller.backup(DOCUMENT, indices(SOURCE), [])

        assert controller.num_hit(DOCUMENT, needed_by(pools)) == 0
        assert controller.num_hit(DOCUMENT, []) == NUM_PAGES


def test_wrong_indices_store_and_load_nothing(tmp_path: Path) -> None:
    pools = pools_of("mamba")
    last = page_hashes(DOCUMENT)[-1:]
    with attached(pools, settings(tmp_path)) as controller:
        storage = controller.storage_backend

        assert storage.batch_set_v2([written(MAMBA, last, torch.tensor([1, 2]))]) == {MAMBA: [False]}
        assert storage.batch_set_v2([written(MAMBA, last, torch.tensor([1]))]) == {MAMBA: [True]}
        assert storage.batch_get_v2([written(MAMBA, last, None)]) == {MAMBA: [False]}
        assert storage.batch_get_v2([written(SWA, last, torch.tensor([1]))]) == {SWA: [False]}


def _side_states() -> dict[PoolName, Any]:
    return {KV: mha_pool("page_first"), MAMBA: mamba_pool(extra_checkpoint_buffers=(torch.zeros(16, 5),))}


def _indexer_in_layers() -> dict[PoolName, Any]:
    kv_pool = mha_pool("layer_first")
    return {KV: kv_pool, INDEXER: indexer_pool(kv_pool)}


REFUSED: dict[str, tuple[Callable[[], dict[PoolName, Any]], str]] = {
    "draft": (
        lambda: {KV: mha_pool("page_first"), PoolName.DRAFT: mha_pool("page_first")},
        r'the pool "draft" of a draft model .* run without speculative decoding',
    ),
    "unknown": (
        lambda: {KV: mha_pool("page_first"), PoolName.AUXILIARY_SWA: mha_pool("page_first")},
        r'the pool "auxiliary_swa" .* which of its pages a cached prefix needs',
    ),
    "side states": (_side_states, r'the pool "mamba" .* pages lie \(Mamba storage zero-copy does not carry'),
    "layers": (_indexer_in_layers, r'the pool "indexer" .* for most models, --hicache-mem-layout page_first'),
}


@pytest.mark.parametrize("what", REFUSED)
def test_pools_that_cannot_be_kept_are_refused_at_the_attach(tmp_path: Path, what: str) -> None:
    make, reason = REFUSED[what]
    with pytest.raises(UnsupportedEngine, match=reason), attached(make(), settings(tmp_path)):
        pass


def test_a_pool_that_comes_after_the_others_is_refused(tmp_path: Path) -> None:
    with attached(pools_of("mamba"), settings(tmp_path)) as controller:
        storage = controller.storage_backend
        with pytest.raises(UnsupportedEngine, match=r'the pool "swa" .* after the store was opened'):
            storage.register_mem_host_pool_v2(mha_pool("page_first"), SWA)
