"""Hybrid models below SGLang: its own host pools of states, windows and index keys, and its own hybrid controller."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from foreign.sglang_bed import BUDGET_BYTES, PAGE_SIZE, mha_pool, mla_pool, server
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    HybridCacheController,
    PrefetchOperation,
)
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

KV, MAMBA, SWA, INDEXER = PoolName.KV, PoolName.MAMBA, PoolName.SWA, PoolName.INDEXER
DEADLINE_S = 60.0
NUM_STATES = 16  # on the device; a host pool has twice as many, and one more
NUM_MAMBA_LAYERS = 2


def mamba_pool(
    layout: str = "page_first", width: int = 6, dtype: torch.dtype = torch.float32, **more: Any
) -> MambaPoolHost:
    """SGLang's host pool of recurrent states (float32) and convolution states (bfloat16), filled with noise."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(NUM_MAMBA_LAYERS, NUM_STATES, 4, width, 8, dtype=dtype),
        conv=(torch.zeros(NUM_MAMBA_LAYERS, NUM_STATES, 24, 3, dtype=torch.bfloat16),),
        **more,
    )
    with host_memory_budget_scope(BUDGET_BYTES):
        pool = MambaPoolHost(info, 2.0, 0, device_capacity=NUM_STATES, pin_memory=False, device="cpu", layout=layout)
    noise = torch.Generator().manual_seed(2)
    for buffer in (pool.temporal_buffer, *pool.conv_buffer):
        buffer.copy_(torch.randn(buffer.shape, generator=noise))
    return pool


def indexer_pool(kv_pool: Any) -> DSAIndexerPoolHost:
    """SGLang's host pool of sparse attention's index keys, filled with noise, with a page for each of *kv_pool*."""
    device_pool = SimpleNamespace(
        index_head_dim=16,
        quant_block_size=16,
        index_page_size=PAGE_SIZE,
        page_size=PAGE_SIZE,
        skip_topk_layers=[False, True, False],
        store_dtype=torch.uint8,
        start_layer=0,
        end_layer=3,
        layer_num=3,
        layer_shard_enabled=False,
        device="cpu",
        index_k_with_scale_buffer=[torch.zeros(1, dtype=torch.uint8) for _ in range(3)],
    )
    with host_memory_budget_scope(BUDGET_BYTES):
        pool = DSAIndexerPoolHost(make_dsa_indexer_pool_decl(device_pool), kv_pool, pin_memory=False)
    noise = torch.Generator().manual_seed(3)
    buffer = pool.index_k_with_scale_buffer
    buffer.copy_(torch.randint(0, 256, buffer.shape, generator=noise, dtype=torch.uint8))
    return pool


def pools_of(kind: str) -> dict[PoolName, Any]:
    """The host pools of a hybrid model of this kind."""
    kv_pool = mla_pool("page_first") if kind == "indexer" else mha_pool("page_first")
    others = {
        "mamba": lambda: {MAMBA: mamba_pool()},
        "swa": lambda: {SWA: mha_pool("page_first", num_layers=2)},
        "both": lambda: {MAMBA: mamba_pool(), SWA: mha_pool("page_first", num_layers=2)},
        "indexer": lambda: {INDEXER: indexer_pool(kv_pool)},
    }
    return {KV: kv_pool, **others[kind]()}


def looked_for(pool: PoolName, num_last: int) -> PoolTransfer:
    """Return the `PoolTransfer` with which SGLang's tree asks for a pool. *num_last* is 0 if a hit needs all pages."""
    if num_last == 0:
        return PoolTransfer(name=pool, indices_from_pool=KV)
    keys = ["__placeholder__"] * num_last
    return PoolTransfer(name=pool, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)


def written(pool: PoolName, keys: list[str], host_indices: torch.Tensor | None) -> PoolTransfer:
    """Return the `PoolTransfer` with which SGLang's tree reads or writes the last pages of a prompt in a pool."""
    return PoolTransfer(pool, host_indices, keys=keys, hit_policy=PoolHitPolicy.TRAILING_PAGES)


class HybridController(HybridCacheController):
    """SGLang's controller of a hybrid model, with its own attach and threads, and without a device and other ranks."""

    def __init__(self, pools: dict[PoolName, Any]) -> None:
        entries = [PoolEntry(name, pool, None, lambda layer: layer, name is KV) for name, pool in pools.items()]
        self.mem_pool_host = HostPoolGroup(entries)
        self.storage_host_pool = pools[KV]
        self.mem_pool_device = None
        self.page_size = PAGE_SIZE
        self.host_memory_mode = "cache"
        self.enable_storage = self.enable_storage_metrics = False
        self.tp_group = self.pp_group = self.attn_cp_group = self.attn_tp_group = None
        self.prefetch_hits_sync_groups, self.prefetch_completion_sync_groups = [], []
        self.pp_prefetch_command_group = self.pp_prefetch_command_thread = None
        self.pp_prefetch_state_lock = threading.Lock()
        self.pp_prefetch_states, self.pp_prefetch_decisions = {}, {}
        self.storage_stop_event = threading.Event()

    def attach(self, extra_config: dict[str, object]) -> None:
        """Attach the storage backend and register all pools, as SGLang does at the start."""
        self.attach_storage_backend(
            "dynamic",
            model_name="some/model",
            storage_backend_extra_config=extra_config,
            host_pools=self.mem_pool_host.entries,
        )

    def backup(
        self, tokens: Sequence[int], host_indices: torch.Tensor, states: Sequence[PoolTransfer]
    ) -> tuple[int, dict[str, int]]:
        """Store the pages of these tokens; how many pages of keys and values and of each other pool are stored."""
        self.write_storage(host_indices, list(tokens), page_hashes(tokens), extra_pools=list(states))
        operation = self.ack_backup_queue.get(timeout=DEADLINE_S)
        return operation.completed_tokens // PAGE_SIZE, operation.pool_storage_result.extra_pool_hit_pages

    def looked_up(self, tokens: Sequence[int], needed: Sequence[PoolTransfer]) -> PrefetchOperation:
        """The operation that SGLang goes on with after it has looked the prompt up."""
        self.prefetch(CacheRequestHandle("request", 0), list(tokens), extra_pools=list(needed))
        return self.prefetch_hit_queue.get(timeout=DEADLINE_S)

    def num_hit(self, tokens: Sequence[int], needed: Sequence[PoolTransfer]) -> int:
        """Return the number of pages that SGLang finds in all pools."""
        return self.looked_up(tokens, needed).storage_hit_count // PAGE_SIZE

    def load(
        self, tokens: Sequence[int], targets: dict[PoolName, torch.Tensor], needed: Sequence[PoolTransfer]
    ) -> tuple[int, dict[str, int]]:
        """Load what is found into the pools; how many pages of keys and values and of each other pool are loaded."""
        operation = self.looked_up(tokens, needed)
        operation.host_indices = targets[KV][: operation.storage_hit_count]
        for each in operation.pool_transfers:
            if each.indices_from_pool is None:
                each.host_indices = targets[each.name]
        self.prefetch_buffer.put(operation)
        num_pages, hits = 0, {}
        while True:
            ack = self.ack_prefetch_queue.get(timeout=DEADLINE_S)
            num_pages = num_pages if ack.completed_tokens is None else ack.completed_tokens // PAGE_SIZE
            hits |= ack.pool_hits or {}
            if ack.completed_req:
                return num_pages, hits


def page_hashes(tokens: Sequence[int]) -> list[str]:
    """SGLang's own names of these tokens' pages."""
    return get_storage_hash_str(list(tokens), None, page_size=PAGE_SIZE)


@contextmanager
def attached(pools: dict[PoolName, Any], extra_config: dict[str, object]) -> Iterator[HybridController]:
    """A controller with a storage backend of this configuration, until the block ends."""
    alone = dict.fromkeys(("tp_rank", "pp_rank", "attn_dcp_rank"), 0) | dict.fromkeys(
        ("tp_size", "pp_size", "attn_dcp_size"), 1
    )
    with ExitStack() as stack:
        stack.enter_context(server())
        stack.enter_context(get_parallel().override(**alone))
        controller = HybridController(pools)
        stack.callback(controller.detach_storage_backend)
        controller.attach(extra_config)
        yield controller
