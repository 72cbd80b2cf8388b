"""The names under which LMCache's objects are stored on disk, and the LMCache classes that the names depend on."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Protocol

from kvtier.tiers.naming.block_hash import BlockName

TESTED = ("0.5.6", "0.5.7rc2")  # with LMCache's own classes and its real server: tests/connectors/test_lmcache_l2.py
ABSTRACT = {
    *("get_store_event_fd", "get_lookup_and_lock_event_fd", "get_load_event_fd"),
    *("submit_store_task", "pop_completed_store_tasks", "submit_load_task", "query_load_result"),
    *("submit_lookup_and_lock_task", "query_lookup_and_lock_result", "submit_unlock", "close"),
}
ALSO_ABSTRACT = {"get_memory_tags"}  # in lmcache 0.5.7
KEY_FIELDS = {"chunk_hash", "model_name", "kv_rank", "object_group_id", "cache_salt"}
MEMORY_PARTS = ("byte_array", "get_size", "metadata")
VERSION = 1  # of the contents of a name
FIELDS = struct.Struct("<QQIII")  # rank, object group; lengths of the model's name, the salt and the hash


class UnsupportedEngine(ValueError):
    """The error for an LMCache version or configuration that the adapter does not support."""


def check_lmcache(adapter: type, key: type, memory: type) -> None:
    """Raise `UnsupportedEngine` if LMCache's classes differ from those that the adapter was written for.

    *adapter* and *memory* are LMCache's abstract classes of L2 adapters and of an object's memory. *key* is LMCache's
    dataclass for the key of an object. An additional field is not supported, because the adapter would give the same
    name to objects whose keys differ only in this field.
    """
    unknown = (set(getattr(adapter, "__abstractmethods__", ())) ^ ABSTRACT) - ALSO_ABSTRACT
    unknown |= {field.name for field in fields(key)} ^ KEY_FIELDS
    unknown |= {part for part in MEMORY_PARTS if not hasattr(memory, part)}
    if unknown:
        raise UnsupportedEngine(
            f"the adapter does not support this LMCache, whose classes differ in {', '.join(sorted(unknown))}; "
            f"install lmcache {' or '.join(TESTED)}, or a kvtier that supports your version"
        )


class ObjectKey(Protocol):
    """LMCache's key of an object, which holds one rank's KV cache of one chunk of tokens, for one group of layers."""

    @property
    def chunk_hash(self) -> bytes: ...
    @property
    def model_name(self) -> str: ...
    @property
    def kv_rank(self) -> int: ...
    @property
    def object_group_id(self) -> int: ...
    @property
    def cache_salt(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Layout:
    """The shapes and dtypes of an object's tensors, as a digest."""

    digest: bytes  # of the tensors' shapes and dtypes, in the order of the object's bytes
    num_bytes: int  # of the object


@lru_cache(maxsize=256)
def layout_of(shapes: tuple[Sequence[int], ...], dtypes: tuple[Any, ...], num_bytes: int) -> Layout:
    """Return the layout of an object of *num_bytes* with tensors of these shapes and torch dtypes."""
    parts = [f"{dtype} {'x'.join(map(str, shape))}" for shape, dtype in zip(shapes, dtypes, strict=True)]
    return Layout(hashlib.sha256("\n".join([str(num_bytes), *parts]).encode()).digest(), num_bytes)


def namespace_of(lmcache: str, weights: str | None) -> bytes:
    """Return a 16-byte digest of everything that decides an object's bytes, apart from its key and layout.

    Args:
        lmcache: Version of LMCache.
        weights: The operator's setting `weights`, or None if it is not set.
    """
    known = "" if weights is None else weights
    return hashlib.sha256(f"kvtier lmcache l2 {VERSION}\0{lmcache}\0{known}".encode()).digest()[:16]


def name_of(key: ObjectKey, layout: Layout) -> BlockName:
    """Return the name of an object: a digest of its layout and of all fields of its key."""
    model, salt = key.model_name.encode(), key.cache_salt.encode()
    lengths = FIELDS.pack(key.kv_rank, key.object_group_id, len(model), len(salt), len(key.chunk_hash))
    return BlockName(hashlib.sha256(b"".join((layout.digest, lengths, model, salt, key.chunk_hash))).digest())


class KnownLayouts:
    """A record of the layout of the last object that was stored or loaded, for each model, rank and object group.

    A lookup needs the layout, because it is part of an object's name but not of LMCache's key. LMCache may pass a
    layout as a hint. The hint is wrong for objects that one of LMCache's serializers has encoded. All methods may be
    called from any thread.
    """

    def __init__(self) -> None:
        self._layouts: dict[tuple[str, int, int], Layout] = {}

    def learn(self, key: ObjectKey, layout: Layout) -> None:
        """Record *layout* for the key's model, rank and object group."""
        self._layouts[key.model_name, key.kv_rank, key.object_group_id] = layout

    def of(self, key: ObjectKey) -> Layout | None:
        """Return the layout last recorded for the key's model, rank and object group, or None if there is none."""
        return self._layouts.get((key.model_name, key.kv_rank, key.object_group_id))
