"""`ObjectsOnDisk`: LMCache's objects in kvtier's store on disk."""

import os
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from math import prod
from typing import Annotated, Any, Generic, Protocol, TypeVar

import msgspec
import numpy as np

from kvtier.connectors.disk_below.disk_below import DiskBelow
from kvtier.connectors.disk_below.row_index import BlockRow
from kvtier.connectors.lmcache_l2.object_names import KnownLayouts, Layout, ObjectKey, layout_of, name_of
from kvtier.engine.config import DiskConfig, tree_from_dict
from kvtier.tiers.naming.block_hash import BlockName

T = TypeVar("T")


class Outcomes(Generic[T]):
    """The outcomes of finished tasks of one kind (stores, lookups or loads), until LMCache fetches them.

    Each outcome is returned once. The eventfd `event_fd` becomes readable when an outcome is added. All methods may be
    called from any thread. After `close`, new outcomes are dropped.
    """

    def __init__(self) -> None:
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # guards the next two attributes
        self._outcomes: dict[int, T] = {}
        self._is_closed = False

    def put(self, task_id: int, outcome: T) -> None:
        """Add a task's outcome, and make the eventfd readable."""
        with self._lock:
            if not self._is_closed:
                self._outcomes[task_id] = outcome
                os.eventfd_write(self.event_fd, 1)

    def pop(self, task_id: int) -> T | None:
        """Return the task's outcome, or None if it has none yet or its outcome was returned before."""
        with self._lock:
            return self._outcomes.pop(task_id, None)

    def pop_all(self) -> dict[int, T]:
        """Return the outcomes of all tasks that have one."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, {}
            return outcomes

    def close(self) -> None:
        """Close the eventfd. A second call does nothing."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.event_fd)


class Settings(DiskConfig, frozen=True, kw_only=True):
    """The settings in `adapter_params`: the keys of the `[disk]` table of kvtier's configuration, and *weights*.

    *weights* is the operator's name for everything that decides bytes but is not in LMCache's keys: the revision of the
    weights, LoRA adapters, and how an engine lays out its KV cache.
    """

    weights: Annotated[str, msgspec.Meta(min_length=1)] | None = None


def settings_of(adapter_params: Mapping[str, object]) -> Settings:
    """Parse the settings. Raise ValueError, whose message names the setting, if one is unknown or out of range."""
    return tree_from_dict(Settings, adapter_params, "adapter_params")


MAX_OBJECT_BYTES = 1 << 32  # objects are smaller, because an object's size is used as its group number of 4 bytes
NO_MEMORY = memoryview(b"")


class Tensors(Protocol):
    """LMCache's description of the tensors in an object's memory.

    *shapes* and *dtypes* describe several tensors. Without them, *shape* and *dtype* describe a single one.
    """

    @property
    def shapes(self) -> Sequence[Sequence[int]] | None: ...
    @property
    def dtypes(self) -> Sequence[Any] | None: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> Any: ...


class ObjectMemory(Protocol):
    """LMCache's memory of one object, which contains the object's tensors."""

    @property
    def byte_array(self) -> memoryview: ...
    @property
    def metadata(self) -> Tensors: ...


class TensorLayouts(Protocol):
    """The layout of an object group's tensors, which LMCache passes to a lookup as a hint.

    Empty *shapes* mean that there is no hint.
    """

    @property
    def shapes(self) -> Sequence[Sequence[int]]: ...
    @property
    def dtypes(self) -> Sequence[Any]: ...


class ObjectsOnDisk:
    """LMCache's objects on disk, by LMCache's keys.

    `DiskBelow` expects all blocks of a group to have the same size. So the size of an object in bytes serves as its
    group number. All methods may be called from any thread.
    """

    def __init__(self, disk: DiskBelow) -> None:
        self._disk = disk
        self._layouts = KnownLayouts()

    def store(self, keys: Sequence[ObjectKey], objects: Sequence[ObjectMemory]) -> "Future[list[bool]]":
        """Write the objects. Return for each object whether it is on disk.

        LMCache passes keys in the order of the prompt. So the parent of an object is assumed to be the previous
        object, if both have the same model, rank, object group, salt and size.
        """
        rows = self._rows(keys, objects)
        for place in range(1, len(rows)):
            if _family(keys[place]) == _family(keys[place - 1]) and rows[place].group_id == rows[place - 1].group_id:
                rows[place] = rows[place]._replace(parent=rows[place - 1].name)
        return self._disk.store(rows)

    def load(self, keys: Sequence[ObjectKey], objects: Sequence[ObjectMemory]) -> "Future[list[bool]]":
        """Read objects from disk into their memory. Return for each object whether its memory has the right bytes.

        The memory of an object whose load fails has undefined contents.
        """
        return self._disk.load(self._rows(keys, objects))

    def find(self, keys: Sequence[ObjectKey], layouts: Mapping[int, TensorLayouts]) -> list[BlockRow | None]:
        """Find objects on disk. Return for each key a `BlockRow` with the object's name, or None if it is not on disk.

        An object's name depends on its layout (shapes and dtypes), which is not in the key. So two layouts are tried:
        the one that LMCache expects, in *layouts* by object group, and the last one stored or loaded in this group.
        """
        said = {group: _said(layout) for group, layout in layouts.items() if layout.shapes}
        found: list[BlockRow | None] = [None] * len(keys)
        asked: defaultdict[int, list[tuple[int, BlockName]]] = defaultdict(list)
        for place, key in enumerate(keys):
            meant, seen = said.get(key.object_group_id), self._layouts.of(key)
            if meant is not None:
                asked[meant.num_bytes].append((place, name_of(key, meant)))
            if seen is not None and seen != meant:  # there is no hint, or the object was stored serialized
                asked[seen.num_bytes].append((place, name_of(key, seen)))
        for num_bytes, of_size in asked.items():
            held = self._disk.are_held([name for _, name in of_size], num_bytes)
            for (place, name), is_held in zip(of_size, held, strict=True):
                if is_held:
                    found[place] = BlockRow(name, NO_MEMORY, num_bytes)
        return found

    def touch(self, rows: Sequence[BlockRow]) -> None:
        """Mark these rows as recently used, so that they are evicted later."""
        self._disk.touch(rows)

    def _rows(self, keys: Sequence[ObjectKey], objects: Sequence[ObjectMemory]) -> list[BlockRow]:
        return [self._row(key, memory) for key, memory in zip(keys, objects, strict=True)]

    def _row(self, key: ObjectKey, memory: ObjectMemory) -> BlockRow:
        # Use numpy's view of bytes, because LMCache's view of C's unsigned chars cannot be cast.
        raw = np.frombuffer(memory.byte_array, np.uint8).data
        if not 0 < raw.nbytes < MAX_OBJECT_BYTES:
            raise ValueError(
                f"kvtier cannot store an object of {raw.nbytes} bytes, only of 1 to {MAX_OBJECT_BYTES - 1}; "
                "change LMCache's chunk size"
            )
        tensors = memory.metadata
        shapes, dtypes = tensors.shapes or [tensors.shape], tensors.dtypes or [tensors.dtype]
        layout = layout_of(tuple(shapes), tuple(dtypes), raw.nbytes)
        self._layouts.learn(key, layout)
        return BlockRow(name_of(key, layout), raw, layout.num_bytes)


def _family(key: ObjectKey) -> tuple[str, int, int, str]:
    return key.model_name, key.kv_rank, key.object_group_id, key.cache_salt


def _said(layout: TensorLayouts) -> Layout:
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)]
    return layout_of(tuple(layout.shapes), tuple(layout.dtypes), sum(sizes))
