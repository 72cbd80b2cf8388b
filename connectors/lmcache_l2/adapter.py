"""`KVTierL2`: the L2 adapter class that LMCache instantiates."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from importlib.metadata import version
from itertools import count
from typing import Any, Self

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed import api
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.memory_management import MemoryObj

from kvtier.connectors.disk_below.open import open_disk_below
from kvtier.connectors.disk_below.row_index import BlockRow
from kvtier.connectors.guard import Guard
from kvtier.connectors.lmcache_l2.object_names import check_lmcache, namespace_of
from kvtier.connectors.lmcache_l2.objects_on_disk import ObjectsOnDisk, Outcomes, Settings, settings_of
from kvtier.store.disk_writes import DiskWrites
from kvtier.tiers.lower.breaker import BreakerState

INDEXING_WAIT_S = 5.0  # max wait at the start; objects that are indexed later are found by later lookups


class KVTierL2Config(L2AdapterConfigBase):
    """The configuration of `KVTierL2`, given as `adapter_params` in LMCache's L2 adapter option."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @classmethod
    def from_dict(cls, d: Mapping[str, object]) -> "KVTierL2Config":
        """Parse the `adapter_params` *d*. Raise ValueError if a setting is unknown or out of range."""
        return cls(settings_of(d))

    @classmethod
    def help(cls) -> str:
        return "adapter_params: the keys of kvtier's [disk] table, such as path and capacity, and optionally weights"


class KVTierL2(L2AdapterInterface):
    """An L2 adapter that keeps LMCache's objects in kvtier's store on disk.

    The store survives restarts. It has a maximum size and evicts objects itself, so LMCache need not enforce a
    capacity. Lookups use an index in memory and never wait for the disk. Every object is verified when it is loaded.

    Only the constructor raises exceptions. After a fault, an object counts as missing or not stored. All methods may be
    called from any thread.
    """

    def __new__(cls, *arguments: object, **named: object) -> Self:
        """Raise `UnsupportedEngine` for an LMCache that the adapter does not support.

        The check must come before `object.__new__`, which raises TypeError without any advice if LMCache has abstract
        methods that the adapter does not define.
        """
        check_lmcache(L2AdapterInterface, ObjectKey, MemoryObj)
        made: Self = super().__new__(cls)
        return made

    def __init__(self, config: KVTierL2Config, l1_memory_desc: L1MemoryDesc | None = None) -> None:
        """Open the store on disk. Raise ValueError if the configuration cannot be used."""
        super().__init__()
        self._settings = config.settings
        namespace = namespace_of(version("lmcache"), config.settings.weights)
        memories = [] if l1_memory_desc is None else [_memory(l1_memory_desc)]
        self._disk = open_disk_below(
            config.settings,
            namespace,
            lambda num_bytes: num_bytes,
            memories,
            writes=DiskWrites.BUFFERED,  # LMCache may load at once what it has just stored
        )
        self._disk.wait_indexed(INDEXING_WAIT_S)
        self._objects = ObjectsOnDisk(self._disk)
        self._guard = Guard(lambda: None)
        self._numbers = count()
        self._stores: Outcomes[L2StoreResult] = Outcomes()
        self._lookups: Outcomes[Bitmap] = Outcomes()
        self._loads: Outcomes[Bitmap] = Outcomes()

    def get_store_event_fd(self) -> int:
        return self._stores.event_fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.event_fd

    def get_load_event_fd(self) -> int:
        return self._loads.event_fd

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        task_id = next(self._numbers)

        def end(are_stored: Sequence[bool]) -> None:
            num_bytes = [memory.get_size() for memory in objects]
            self._stores.put(task_id, L2StoreResult(all(are_stored), sum(num_bytes)))
            if all(are_stored):
                self._notify_keys_stored(keys, num_bytes)

        self._begin(lambda: self._objects.store(keys, objects), len(keys), end)
        return task_id

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.pop_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        task_id = next(self._numbers)
        found = self._guard.run(lambda: self._objects.find(keys, group_layout_descs), [None] * len(keys))
        self._lookups.put(task_id, _bitmap([row is not None for row in found]))
        self._touch(found)
        return task_id

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Do nothing, because lookups do not lock objects and so there is no lock to release.

        To protect the objects that it finds, a lookup marks them as recently used. Eviction skips each of them once.
        """

    def submit_touch(self, keys: list[ObjectKey]) -> None:
        """Mark those of the objects that are on disk as recently used, so that they are evicted later.

        lmcache 0.5.7 calls this at the end of a request. It also calls this for the part of a prompt that the engine
        already has and does not load.
        """
        self._touch(self._guard.run(lambda: self._objects.find(keys, {}), []))

    def get_memory_tags(self) -> Any:
        """Return LMCache's tags for objects on a local disk.

        Only lmcache 0.5.7 defines such tags and calls this method.
        """
        return api.MemoryTags(api.MemorySegment.STORAGE, api.MemoryResidency.LOCAL)

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        task_id = next(self._numbers)

        def end(are_loaded: Sequence[bool]) -> None:
            self._loads.put(task_id, _bitmap(are_loaded))
            self._notify_keys_accessed([key for key, is_loaded in zip(keys, are_loaded, strict=True) if is_loaded])

        self._begin(lambda: self._objects.load(keys, objects), len(keys), end)
        return task_id

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.pop(task_id)

    def get_usage(self) -> AdapterUsage:
        """Return the number of bytes on disk, over all cache salts, and the store's capacity."""
        tier = self._disk.statistics().tier
        return AdapterUsage(tier.num_bytes, tier.capacity_bytes)

    def report_status(self) -> dict[str, object]:
        seen = self._disk.statistics()
        return {
            "is_healthy": seen.disk.is_open and BreakerState.OPEN not in seen.disk.breakers.values(),
            "type": type(self).__name__,
            "path": self._settings.path,
            "capacity_bytes": seen.tier.capacity_bytes,
            "stored_bytes": seen.tier.num_bytes,
            "objects": seen.tier.num_blocks,
            "stored_objects_total": seen.num_stored,
            "loaded_objects_total": seen.num_loaded,
            "failed_loads_total": seen.num_failed_loads,
            "refused_stores_total": {refusal.value: number for refusal, number in seen.refused.items()},
            "corrupt_total": dict(seen.tier.corrupt),
            "errors_total": self._guard.num_errors,
            "why_failed": dict(seen.disk.why_failed),
        }

    def close(self) -> None:
        """Close the store. Tasks that are running end first, and tasks that are still queued fail."""
        self._guard.run_always(self._disk.close, None)
        for outcomes in (self._stores, self._lookups, self._loads):
            outcomes.close()

    def _touch(self, found: Sequence[BlockRow | None]) -> None:
        self._guard.run(lambda: self._objects.touch([row for row in found if row is not None]), None)

    def _begin(
        self, begin: "Callable[[], Future[list[bool]]]", num_keys: int, end: Callable[[Sequence[bool]], None]
    ) -> None:
        """Call *begin* to start a task. When the task has ended, call *end* with the outcome for each object."""
        future = self._guard.run(begin, None)
        if future is None:
            end([False] * num_keys)
        else:
            future.add_done_callback(lambda done: self._guard.run_always(lambda: end(done.result()), None))


def _memory(described: L1MemoryDesc) -> memoryview:
    """Return a view of LMCache's entire L1 memory."""
    return memoryview((ctypes.c_ubyte * described.size).from_address(described.ptr))


def _bitmap(bits: Sequence[bool]) -> Bitmap:
    found = Bitmap(len(bits))
    for place, bit in enumerate(bits):
        if bit:
            found.set(place)
    return found
