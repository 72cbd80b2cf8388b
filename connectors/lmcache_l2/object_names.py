"""What LMCache's objects are called on disk."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from kvtier.tiers.naming.block_hash import BlockName

VERSION = 1  # of what a name is made of
FIELDS = struct.Struct("<QQIII")  # rank, object group; bytes of the model's name, of the salt and of the hash


class ObjectKey(Protocol):
    """LMCache's key of an object: one chunk of tokens, as one rank has it, of one group of layers."""

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
    """The shapes and types of the tensors in an object, in the order in which its bytes have them, as a digest."""

    digest: bytes
    num_bytes: int


@lru_cache(maxsize=256)
def layout_of(shapes: tuple[Sequence[int], ...], dtypes: tuple[Any, ...], num_bytes: int) -> Layout:
    """The layout of tensors of these shapes and torch types, which are *num_bytes* long together."""
    parts = [f"{dtype} {'x'.join(map(str, shape))}" for shape, dtype in zip(shapes, dtypes, strict=True)]
    return Layout(hashlib.sha256("\n".join([str(num_bytes), *parts]).encode()).digest(), num_bytes)


def namespace_of(lmcache: str, weights: str | None) -> bytes:
    """16 bytes for what decides an object's bytes beside its key and layout: LMCache's version, and what the operator
    has said of the weights."""
    known = "" if weights is None else weights
    return hashlib.sha256(f"kvtier lmcache l2 {VERSION}\0{lmcache}\0{known}".encode()).digest()[:16]


def name_of(key: ObjectKey, layout: Layout) -> BlockName:
    """The name of an object that has this *layout*: of all fields of its key, and of the layout, which keys lack."""
    model, salt = key.model_name.encode(), key.cache_salt.encode()
    lengths = FIELDS.pack(key.kv_rank, key.object_group_id, len(model), len(salt), len(key.chunk_hash))
    return BlockName(hashlib.sha256(b"".join((layout.digest, lengths, model, salt, key.chunk_hash))).digest())


class KnownLayouts:
    """The layout that was last stored or loaded of each model, rank and object group.

    A look-up says which layout it means, or not: LMCache calls that a hint. What goes through one of LMCache's
    serializers is stored in another layout than look-ups name. All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._layouts: dict[tuple[str, int, int], Layout] = {}

    def learn(self, key: ObjectKey, layout: Layout) -> None:
        """Take in that an object has this layout."""
        self._layouts[key.model_name, key.kv_rank, key.object_group_id] = layout

    def of(self, key: ObjectKey) -> Layout | None:
        """The layout last seen of such objects."""
        return self._layouts.get((key.model_name, key.kv_rank, key.object_group_id))
