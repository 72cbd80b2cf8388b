"""HybridLayout: the layout of an LMCache client whose chunks have parts, one for each of several KV cache groups."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import TypeAlias

from kvtier.sidecar.layout import LayoutRefused
from kvtier.sidecar.lmcache.chunk_layout import ChunkLayout, ChunkMemory
from kvtier.sidecar.lmcache.chunk_part import ChunkPart, check_fields, memories_of
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.transfer.segment import Segment

HYBRID_VERSION = 1  # of what the digest is made of


@dataclass(frozen=True, slots=True)
class HybridLayout:
    """See `Layout`: how an engine with several KV cache groups lays out its KV.

    *whole* is what the client says of all groups together, which decides no object's bytes by itself. Each of the
    *parts* is found, kept and evicted by itself; the parts of rank r are the groups from r * len(parts) on.
    """

    whole: ChunkLayout
    parts: tuple[ChunkPart, ...]

    def __post_init__(self) -> None:
        """Raise `LayoutRefused` for what no chunk can have."""
        for number, part in enumerate(self.parts):
            check_fields(part)
            if part.num_tokens > self.chunk_tokens:
                raise LayoutRefused(
                    f"group {number} has {part.num_tokens} tokens of each chunk, which has {self.chunk_tokens}"
                )
            if part.is_recurrent and not part.window_chunks:
                raise LayoutRefused(f"group {number} has recurrent states, and needs those of all chunks")

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
        """Tokens in a chunk."""
        return self.whole.chunk_tokens

    @property
    def digest(self) -> bytes:
        """The namespace of its chunks, 16 bytes (sha256): equal only for equal layouts."""
        running = hashlib.sha256(f"kvtier hybrid layout {HYBRID_VERSION}".encode())
        running.update(self.whole.digest)
        for part in self.parts:
            for field in astuple(part):
                value = str(field).encode()
                running.update(len(value).to_bytes(4, "little") + value)
        return running.digest()[:16]

    @property
    def groups(self) -> Sequence[AttentionGroup]:
        """One for each rank and part."""
        return [part.group(self.chunk_tokens) for part in self.parts] * self.world_size

    def memories(self, segment: Segment, extent_bytes: int) -> Sequence[ChunkMemory]:
        """See `Layout`; by rank and part."""
        return memories_of(self.parts, self.world_size, self.chunk_tokens, segment, extent_bytes)

    def details(self) -> Mapping[str, object]:
        """See `Layout`."""
        parts = [{**asdict(part), "chunk_bytes": part.num_bytes} for part in self.parts]
        return {**asdict(self.whole), "groups": parts, "chunk_bytes": sum(part.num_bytes for part in self.parts)}


AnyChunkLayout: TypeAlias = ChunkLayout | HybridLayout


def groups_of(layout: AnyChunkLayout, rank: int) -> range:
    """Return the numbers of the groups that have the parts of this rank's chunks."""
    num_parts = len(layout.parts)
    return range(rank * num_parts, (rank + 1) * num_parts)
