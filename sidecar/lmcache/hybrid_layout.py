"""HybridLayout: the layout of an LMCache client with several KV cache groups, each with a part of every chunk."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import TypeAlias

from kvtier.sidecar.layout import LayoutRefused
from kvtier.sidecar.lmcache.chunk_layout import ChunkLayout
from kvtier.sidecar.lmcache.chunk_part import ChunkMemory, ChunkPart, check_fields, memories_of
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.transfer.segment import Segment

HYBRID_VERSION = 1  # of the digest's input


@dataclass(frozen=True, slots=True)
class HybridLayout:
    """The layout (see `Layout`) of an LMCache engine with several KV cache groups.

    *whole* describes all KV cache groups together, as the client reports them. *parts* describes the part of a chunk
    that belongs to each KV cache group. Each part is looked up, kept and evicted separately. So in the tiers, each KV
    cache group of each rank is a group of its own. The numbers of rank r's groups begin at r * len(parts).
    """

    whole: ChunkLayout
    parts: tuple[ChunkPart, ...]

    def __post_init__(self) -> None:
        """Raise `LayoutRefused` for values that no chunk can have."""
        for number, part in enumerate(self.parts):
            check_fields(part)
            if part.num_tokens > self.chunk_tokens:
                raise LayoutRefused(
                    f"group {number} has {part.num_tokens} tokens of each chunk, but a chunk has {self.chunk_tokens}"
                )
            if part.is_recurrent and not part.window_chunks:
                raise LayoutRefused(
                    f"group {number} has recurrent states, but needs all chunks of a prefix (window_chunks is 0)"
                )

    @property
    def model(self) -> str:
        return self.whole.model

    @property
    def weights(self) -> str:
        return self.whole.weights

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.whole.world_size

    @property
    def chunk_tokens(self) -> int:
        """Number of tokens in a chunk."""
        return self.whole.chunk_tokens

    @property
    def digest(self) -> bytes:
        """Namespace of the layout's chunks, 16 bytes of sha256; equal only for equal layouts."""
        running = hashlib.sha256(f"kvtier hybrid layout {HYBRID_VERSION}".encode())
        running.update(self.whole.digest)
        for part in self.parts:
            for field in astuple(part):
                value = str(field).encode()
                running.update(len(value).to_bytes(4, "little") + value)
        return running.digest()[:16]

    @property
    def groups(self) -> Sequence[AttentionGroup]:
        """Groups in the tiers: one for each KV cache group of each rank, in the order of the ranks."""
        return [part.group(self.chunk_tokens) for part in self.parts] * self.world_size

    def memories(self, segment: Segment, extent_bytes: int) -> Sequence[ChunkMemory]:
        return memories_of(self.parts, self.world_size, self.chunk_tokens, segment, extent_bytes)

    def details(self) -> Mapping[str, object]:
        parts = [{**asdict(part), "chunk_bytes": part.num_bytes} for part in self.parts]
        return {**asdict(self.whole), "groups": parts, "chunk_bytes": sum(part.num_bytes for part in self.parts)}


AnyChunkLayout: TypeAlias = ChunkLayout | HybridLayout


def groups_of(layout: AnyChunkLayout, rank: int) -> range:
    """Return the indices in `layout.groups` that belong to this rank: one for each KV cache group of the engine."""
    num_parts = len(layout.parts)
    return range(rank * num_parts, (rank + 1) * num_parts)
