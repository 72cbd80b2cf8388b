"""ChunkLayout: what determines the bytes of an LMCache client's chunks besides tokens: model, weights and KV format."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from kvtier.sidecar.layout import LayoutRefused
from kvtier.sidecar.lmcache.chunk_part import MAX_RANKS, ChunkMemory, ChunkPart, check_fields, memories_of
from kvtier.tiers.naming.groups import FullAttention
from kvtier.transfer.segment import Segment

VERSION = 1  # of the digest's input


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """The KV layout of an engine, see `Layout`. Two engines share chunks only if all fields are equal.

    *weights* is a digest or revision of the model's weights, or empty if it is not known. The engine's own blocks have
    *block_size* tokens.

    A chunk has the KV of *chunk_tokens* tokens of one rank. It is a tensor with the dimensions *num_planes* (2 for keys
    and values, 1 if both are fused), *num_layers*, *num_physical_slots* and *width*. *num_physical_slots* is the number
    of token positions, which is *chunk_tokens* if the client does not report it.
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
        """Raise `LayoutRefused` if a field has an impossible value."""
        check_fields(self)
        if self.world_size > MAX_RANKS:
            raise LayoutRefused(f"world_size is {self.world_size}; at most {MAX_RANKS} ranks are served")

    @property
    def parts(self) -> tuple[ChunkPart, ...]:
        """The parts of a chunk by KV cache group. There is one group, so its part is the whole chunk."""
        return (
            ChunkPart(
                self.dtype, self.num_planes, self.num_layers, self.width, self.block_size, self.num_physical_slots
            ),
        )

    @property
    def chunk_bytes(self) -> int:
        """Number of bytes of a chunk."""
        return self.parts[0].num_bytes

    @property
    def digest(self) -> bytes:
        """Digest of all fields, 16 bytes of sha256, which is the namespace of the layout's chunks."""
        running = hashlib.sha256(f"kvtier layout {VERSION}".encode())
        for field in fields(self):
            value = str(getattr(self, field.name)).encode()
            running.update(len(value).to_bytes(4, "little") + value)
        return running.digest()[:16]

    @property
    def groups(self) -> Sequence[FullAttention]:
        """Groups into which the tiers divide the chunks: one for each rank."""
        return [FullAttention(self.chunk_tokens)] * self.world_size

    def memories(self, segment: Segment, extent_bytes: int) -> Sequence[ChunkMemory]:
        return memories_of(self.parts, self.world_size, self.chunk_tokens, segment, extent_bytes)

    def details(self) -> Mapping[str, object]:
        return {**asdict(self), "chunk_bytes": self.chunk_bytes}
