"""`KVTierStorage`: a storage backend for SGLang's HiCache that keeps pages on disk."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import msgspec
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult

from kvtier.connectors.sglang_storage.identity import (
    folder_of,
    names_of,
    namespace_of,
    pool_facts,
    weights_of,
)
from kvtier.connectors.sglang_storage.known_sglang import (
    KV_POOL,
    UnsupportedEngine,
    check_config,
    check_pool,
    check_side_pool,
    check_storage,
    pages_in_place,
)
from kvtier.connectors.sglang_storage.page_runs import StorageThreads
from kvtier.connectors.sglang_storage.pool_pages import Needed, PoolPages, hit_of
from kvtier.connectors.sglang_storage.server_facts import option_reader, server_facts, weights_version
from kvtier.connectors.staged_disk import Rows, StagedDisk
from kvtier.connectors.weights_lineage import WeightsLineage
from kvtier.engine.config import DiskConfig, tree_from_dict
from kvtier.tiers.naming.block_hash import BlockName

# Keys of hicache-storage-backend-extra-config that SGLang itself reads.
_OF_SGLANG = {"backend_name", "module_path", "class_name", "interface_v1"}
INDEXED_WAIT_S = 10.0  # max wait until the pages on disk are indexed; the rest is indexed during the first prompts
CLEAR_TIMEOUT_S = 60.0


class StorageSettings(DiskConfig, frozen=True, kw_only=True):
    """The backend's settings: the keys of the `[disk]` table of kvtier's configuration, and *weights*.

    *weights* is a name for the model's weights, such as a revision. If it is None, a digest of the weights is computed
    instead.
    """

    weights: Annotated[str, msgspec.Meta(min_length=1)] | None = None


def settings_of(extra_config: Mapping[str, object]) -> StorageSettings:
    """Parse the settings. Raise ValueError, whose message names the setting, if one is unknown or out of range."""
    own = {key: value for key, value in extra_config.items() if key not in _OF_SGLANG}
    return tree_from_dict(StorageSettings, own, "hicache-storage-backend-extra-config")


class KVTierStorage(HiCacheStorage):
    """The storage backend of one rank, which keeps pages of the rank's host pools on disk.

    SGLang creates the backend, registers the host pools with it, and then calls it from its prefetch and backup
    threads. Every model has a pool of keys and values. Hybrid models have further pools, for example of recurrent
    states, which SGLang passes to the methods whose names end with `_v2`.

    Reads and writes block the calling thread. Every page is verified when it is read. Disk faults raise no exceptions:
    the affected page counts as missing or not stored.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, object] | None = None) -> None:
        """Check *storage_config*. *kwargs* is ignored; SGLang's factory passes an empty dict."""
        check_storage(HiCacheStorage)
        check_config(storage_config)
        self._config = storage_config
        extra_config = storage_config.extra_config or {}
        self._settings = settings_of(extra_config)
        self._is_in_place = bool(extra_config.get("interface_v1", 0))
        self._host_pools: dict[str, Any] = {}  # by SGLang's names
        self._disk: StagedDisk | None = None
        self._pools: dict[str, PoolPages] = {}
        self._naming = threading.Lock()  # because SGLang calls from several threads
        self._threads = StorageThreads()
        self._lineage = WeightsLineage()
        self._version: str | None = None  # SGLang's label of the weights

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register the pool of keys and values. Raise `UnsupportedEngine` if it is not supported."""
        check_pool(mem_pool_host)
        super().register_mem_pool_host(mem_pool_host)
        self.close()
        self._disk, self._pools = None, {}
        self._host_pools = {KV_POOL: mem_pool_host}

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register another pool of a hybrid model. Raise `UnsupportedEngine` if it is not supported.

        SGLang also passes the pool of keys and values again.
        """
        name = str(host_pool_name)
        if name != KV_POOL:
            check_side_pool(name, host_pool)
            if self._disk is not None:
                raise UnsupportedEngine(
                    f'the pool "{name}" is not supported, because SGLang registers it after the store was opened; run '
                    "this model without --hicache-storage-backend"
                )
            self._host_pools[name] = host_pool
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def on_host_pools_registered(self) -> None:
        """Open the store for the pages of all registered pools. Raise `UnsupportedEngine` if one is not supported."""
        others = sorted(self._host_pools.keys() - {KV_POOL})
        runs = {name: pages_in_place(name, self._host_pools[name]) for name in (KV_POOL, *others)}
        facts = {name: pool_facts(self._host_pools[name], each.sizes) for name, each in runs.items()}
        read = option_reader()
        model, revision = read("model_path"), read("revision")
        weights = self._settings.weights or weights_of(str(model), None if revision is None else str(revision))
        namespace = namespace_of(self._config, facts, weights, self._is_in_place, server_facts(read))
        version = read("weight_version")
        self._version = None if version is None else str(version)
        folder = folder_of(self._settings.path, self._config)
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        settings = msgspec.structs.replace(self._settings, path=str(folder))
        disk = StagedDisk(settings, namespace, [each.row_bytes for each in runs.values()])
        disk.wait_indexed(INDEXED_WAIT_S)
        self._pools = {name: PoolPages(disk, group_id, each) for group_id, (name, each) in enumerate(runs.items())}
        self._disk = disk

    def exists(self, key: str) -> bool:
        """Return whether the page is on disk, without waiting."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Return the length of the longest prefix of *keys* whose pages are all on disk, without waiting."""
        return 0 if self._disk is None else self._disk.num_held(self._names(keys))

    def batch_exists_v2(
        self, keys: Sequence[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Return the prefixes of *keys* whose pages are on disk in every pool, without waiting.

        A prefix needs all of its pages of keys and values. It also needs pages of each pool in *pool_transfers*: only
        the last ones for states and windows, and all of them otherwise.
        """
        if self._disk is None:
            return PoolTransferResult.empty()
        needed = [_needed_by(transfer) for transfer in pool_transfers or ()]
        hit = hit_of(self._names(keys), self._pools, KV_POOL, needed)
        return PoolTransferResult(hit.num_pages, dict(hit.by_pool), list(hit.ends))

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Read pages into the host pool. Return for each page whether it was read.

        Reading stops at the first page that cannot be read.
        """
        return self._load(KV_POOL, keys, host_indices)

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Read pages into the pools of *transfers*. Return for each pool and page whether it was read.

        In each pool, reading stops at the first page that cannot be read.
        """
        return {each.name: self._load(str(each.name), each.keys or (), each.host_indices) for each in transfers}

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Write pages of the host pool to disk. Return for each page whether it is on disk."""
        return self._store(KV_POOL, keys, host_indices, extra_info)

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Write pages of the pools of *transfers* to disk. Return for each pool and page whether it is on disk."""
        return {
            each.name: self._store(str(each.name), each.keys or (), each.host_indices, extra_info) for each in transfers
        }

    def get(self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None) -> Any:
        """Read a page into *target_location*, a flat tensor of the page's size.

        Returns:
            *target_location*, or None if the page cannot be read.
        """
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Read pages into *target_locations*, flat tensors of the pages' size.

        Reading stops at the first page that cannot be read.

        Returns:
            For each page, its tensor, or None if the page was not read.
        """
        found: list[Any] = [None] * len(keys)
        if self._disk is None or target_locations is None:
            return found
        targets = [None if target is None else _bytes_of(target) for target in target_locations]

        def take(places: range, rows: Rows) -> None:
            for place, row in zip(places, torch.from_numpy(rows), strict=True):
                target = targets[place]
                if target is not None and target.shape == row.shape:
                    target.copy_(row)
                    found[place] = target_locations[place]

        self._disk.load(self._names(keys), take)
        return found

    def set(
        self, key: str, value: torch.Tensor | None = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        """Write the page in the flat tensor *value*. Return whether the page is on disk."""
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Write the pages in the flat tensors *values*. Return whether all of the pages are on disk."""
        if self._disk is None or values is None:
            return False
        pages = [None if value is None else _bytes_of(value) for value in values]
        if any(page is None or page.numel() != self._pools[KV_POOL].row_bytes for page in pages):
            return False

        def fill(places: range, rows: Rows) -> None:
            for page, row in zip(pages[places.start : places.stop], torch.from_numpy(rows), strict=True):
                row.copy_(page)

        return all(self._disk.store(self._names(keys), None, fill))

    def clear(self) -> bool:
        """Delete the pages of all pools of this rank, model and layout. Return False if the disk could not do so."""
        return self._disk is not None and self._disk.clear(CLEAR_TIMEOUT_S)

    def get_stats(self) -> None:
        """Return None, because SGLang itself measures pages and bandwidth. `statistics` returns kvtier's counts."""

    def statistics(self) -> dict[str, Any]:
        """Return all counts by name, or an empty dict before the store is opened."""
        return {} if self._disk is None else asdict(self._disk.statistics())

    def _load(self, pool: str, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[bool]:
        if pool not in self._pools:
            return [False] * len(keys)
        return self._pools[pool].load(self._names(keys), host_indices)

    def _store(self, pool: str, keys: Sequence[str], host_indices: torch.Tensor | None, extra_info: Any) -> list[bool]:
        if pool not in self._pools:
            return [False] * len(keys)
        return self._pools[pool].store(self._names(keys), self._parent(extra_info), host_indices)

    def _names(self, keys: Sequence[str]) -> list[BlockName]:
        """Return the names of pages on disk, given SGLang's keys.

        If SGLang may have updated its weights, all names change, so that pages of the old weights are not found.
        """
        with self._naming:
            version = weights_version()
            if self._threads.any_ended() or version not in (None, self._version):
                self._version = version
                self._lineage.start_new_lineage()
            return [self._lineage.name(name) for name in names_of(keys)]

    def _parent(self, extra_info: Any) -> BlockName | None:
        """Return the name of the page that precedes a call's first page, or None if SGLang does not pass it."""
        prefix = getattr(extra_info, "prefix_keys", None)
        return self._names(prefix[-1:])[0] if prefix else None

    def close(self) -> None:
        """Close the disk. A second call does nothing."""
        if self._disk is not None:
            self._disk.close()


def _needed_by(transfer: Any) -> Needed:
    """Return what a hit needs of a pool, given SGLang's description of a transfer."""
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        return Needed(str(transfer.name), len(transfer.keys or ()) or 1)
    return Needed(str(transfer.name), None)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8).flatten()


__all__ = ["KVTierStorage", "UnsupportedEngine"]
