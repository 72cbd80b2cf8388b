"""ChunkLayout: what decides the bytes of a chunk of an LMCache client's KV beside its tokens."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import prod

from kvtier.engine.sidecar.layout import MOST_SLOTS, LayoutRefused
from kvtier.engine.sidecar.lmcache.chunk_memory import ChunkMemory
from kvtier.tiers.naming.groups import FullAttention
from kvtier.transfer.segment import Segment

VERSION = 1  # of what the digest is made of
ELEMENT_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """See `Layout`: how an engine lays out its KV. Two engines have a chunk in common only if all of this is equal.

    *weights* is a digest or revision of the model's weights, empty if it is not known. A chunk is *chunk_tokens* tokens
    of one rank: in each of *num_planes* planes (keys and values, or both fused) and each of *num_layers* layers it has
    *width* elements for each of *num_physical_slots* tokens. The engine's own blocks have *block_size* tokens.
    """

    model: str
    weights: str
    dtype: str  # torch's name, such as "bfloat16"
    num_planes: int
    num_layers: int
    width: int
    block_size: int
    chunk_tokens: int
    num_physical_slots: int
    world_size: int

    def __post_init__(self) -> None:
        """Raise `LayoutRefused` for what no chunk can have."""
        if self.dtype not in ELEMENT_BYTES:
            raise LayoutRefused(f"dtype {self.dtype!r} is not known; use one of {', '.join(ELEMENT_BYTES)}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and not 1 <= value < 1 << 31:
                raise LayoutRefused(f"{field.name} is {value}; it must be 1 or more")
        if self.world_size > MOST_RANKS:
            raise LayoutRefused(f"world_size is {self.world_size}; at most {MOST_RANKS} ranks are served")

    @property
    def shape(self) -> list[int]:
        """Of a chunk as a tensor; the planes only if there are several."""
        shape = [self.num_layers, self.num_physical_slots, self.width]
        return shape if self.num_planes == 1 else [self.num_planes, *shape]

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]

    @property
    def digest(self) -> bytes:
        """The namespace of its chunks, 16 bytes (sha256): equal only for equal layouts."""
        running = hashlib.sha256(f"kvtier layout {VERSION}".encode())
        for field in fields(self):
            value = str(getattr(self, field.name)).encode()
            running.update(len(value).to_bytes(4, "little") + value)
        return running.digest()[:16]

    @property
    def groups(self) -> Sequence[FullAttention]:
        """One for each rank: its chunks are its own."""
        return [FullAttention(self.chunk_tokens)] * self.world_size

    def memories(self, segment: Segment, extent_bytes: int) -> Sequence[ChunkMemory]:
        """See `Layout`; by rank."""
        if self.chunk_bytes > extent_bytes:
            raise LayoutRefused(
                f"a chunk of {self.chunk_tokens} tokens has {self.chunk_bytes} bytes, an extent {extent_bytes}; "
                "start the sidecar with fewer tokens in a chunk, or larger extents"
            )
        memories = [ChunkMemory(segment, extent_bytes, self.chunk_bytes) for _ in range(self.world_size)]
        num_slots = sum(memory.num_host_slots for memory in memories)
        if num_slots > MOST_SLOTS:  # before the books of one rank are made
            raise LayoutRefused(
                f"a chunk of {self.chunk_tokens} tokens has {self.chunk_bytes} bytes, so all ranks would have "
                f"{num_slots} slots in host memory; at most {MOST_SLOTS} are served, since each costs memory beside "
                "it: start the sidecar with more tokens in a chunk, or less host memory"
            )
        return memories

    def details(self) -> Mapping[str, object]:
        """See `Layout`."""
        return {**asdict(self), "chunk_bytes": self.chunk_bytes}


MOST_RANKS = 64
