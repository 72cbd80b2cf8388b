"""SGLang's own host pools, factory and cache controller around a storage backend; see `bare_sglang`."""

from collections.abc import Iterator
from contextlib import contextmanager

import foreign.bare_sglang  # noqa: F401  # first: it makes the others importable
import torch
from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation, StorageOperation
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo, MLABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_context

PAGE_SIZE = 8
NUM_LAYERS = 3
NUM_HEADS, HEAD_DIM = 2, 16
DEVICE_TOKENS = 1024
MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
BUDGET_BYTES = 1 << 30  # of host memory for a pool; SGLang otherwise wants 10 GiB more to be free than the pool needs


def mha_pool(layout: str, dtype: torch.dtype = torch.bfloat16, num_layers: int = NUM_LAYERS) -> MHATokenToKVPoolHost:
    """SGLang's host pool for ordinary attention, of 2,056 tokens, filled with noise."""
    shape = (DEVICE_TOKENS, NUM_HEADS, HEAD_DIM)
    keys, values = (tuple(torch.zeros(shape, dtype=dtype) for _ in range(num_layers)) for _ in range(2))
    buffers = KVBuffers(
        k=keys,
        v=values,
        k_data_ptrs=_addresses(keys),
        v_data_ptrs=_addresses(values),
        layout=next(iter(KVBufferLayout)),
    )
    info = MHABufferInfo(
        buffers=buffers,
        page_size=PAGE_SIZE,
        head_num=NUM_HEADS,
        head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(BUDGET_BYTES):
        return _filled(MHATokenToKVPoolHost(info, *_sizes(layout), **_places(num_layers)))


def mla_pool(layout: str) -> MLATokenToKVPoolHost:
    """SGLang's host pool for latent attention, filled with noise."""
    rows = tuple(torch.zeros(DEVICE_TOKENS, 1, 24, dtype=torch.bfloat16) for _ in range(NUM_LAYERS))
    info = MLABufferInfo(
        buffers=rows,
        data_ptrs=_addresses(rows),
        layer_indices=tuple(range(NUM_LAYERS)),
        device_layer_num=NUM_LAYERS,
        page_size=PAGE_SIZE,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        kv_cache_dim=24,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(BUDGET_BYTES):
        return _filled(MLATokenToKVPoolHost(info, *_sizes(layout), target_layer_num=NUM_LAYERS, **_places(NUM_LAYERS)))


def config(extra_config: dict[str, object], **facts: object) -> HiCacheStorageConfig:
    """What SGLang tells a backend of an engine without parallelism."""
    usual: dict[str, object] = {
        **dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0),
        **dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1),
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "some/model",
    }
    return HiCacheStorageConfig(**{**usual, **facts}, extra_config=extra_config)


@contextmanager
def server(**options: object) -> Iterator[None]:
    """A server with these options in this process, as far as SGLang's own context is one."""
    published = get_context().override_server_args(**options)
    published.install()
    try:
        yield
    finally:
        published.restore()


def label_weights(version: str) -> None:
    """Do what SGLang's scheduler does after an update of weights that came with a version."""
    get_context().override("scheduler.weight_version", weight_version=version)


def created(storage_config: HiCacheStorageConfig, pool: MHATokenToKVPoolHost) -> HiCacheStorage:
    """The backend that SGLang's factory makes for `--hicache-storage-backend dynamic`, told of the pool."""
    storage = StorageBackendFactory.create_backend("dynamic", storage_config, pool)
    storage.register_mem_pool_host(pool)
    storage.on_host_pools_registered()
    return storage


class Controller(HiCacheController):
    """SGLang's controller with its own code between pool and backend, and without its device, threads and ranks."""

    def __init__(self, storage: HiCacheStorage, pool: MHATokenToKVPoolHost, *, is_in_place: bool) -> None:
        self.storage_backend = storage
        self.storage_host_pool = self.mem_pool_host = pool
        self.page_size = PAGE_SIZE
        self.page_get_func = self._page_get_zero_copy if is_in_place else self._generic_page_get
        self.page_set_func = self._page_set_zero_copy if is_in_place else self._generic_page_set
        self.prefetch_sync_queue = _Dropping()

    def backup(self, token_ids: list[int], host_indices: torch.Tensor, last_hash: str | None = None) -> int:
        """Store the pages of these tokens, which lie there; how many tokens SGLang counts as stored."""
        hashes = get_storage_hash_str(token_ids, last_hash, page_size=PAGE_SIZE)
        operation = StorageOperation(host_indices, token_ids, hash_value=hashes)
        self._page_backup_or_log(operation)
        return operation.completed_tokens

    def num_hit(self, token_ids: list[int]) -> int:
        """How many tokens SGLang finds in the storage."""
        return self._storage_hit_query(PrefetchOperation("request", token_ids))[1]

    def prefetch(self, token_ids: list[int], host_indices: torch.Tensor) -> int:
        """Load the pages that are found; how many tokens SGLang counts as loaded."""
        operation = PrefetchOperation("request", token_ids)
        operation.hash_value, num_tokens = self._storage_hit_query(operation)
        operation.host_indices = host_indices[:num_tokens]
        return self._page_transfer(operation) * PAGE_SIZE


class _Dropping:
    """A queue that nothing reads."""

    def put(self, item: object) -> None:
        """Drop it."""


def _addresses(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)


def _sizes(layout: str) -> tuple[float, int, int, str]:
    return 2.0, 0, PAGE_SIZE, layout


def _places(num_layers: int) -> dict[str, object]:
    return {
        "pin_memory": False,
        "device": "cpu",
        "device_capacity_tokens": DEVICE_TOKENS,
        "start_layer": 0,
        "end_layer": num_layers,
    }


def _filled(pool: MHATokenToKVPoolHost) -> MHATokenToKVPoolHost:
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, generator=torch.Generator().manual_seed(1)))
    return pool
