"""Attention of chunks of prompts, on a CPU: each over the blocks where they are, by `chunk_kernel`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvtier.engine.model.cpu.kernel_threads import KernelThreads
from kvtier.engine.model.cpu.layer import Layer
from kvtier.engine.model.cpu.row_attention import DTYPES, WORTH_A_THREAD
from kvtier.engine.model.paged_choice import Shape
from kvtier.engine.model.paged_segment import Segment, oldest_key

LANES = 16  # heads are of so many numbers, or a multiple
MAX_TOKENS = 192  # of a piece; the keys and values that it reads are copied for it


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one request and the query heads of one head of keys: one call of the kernel."""

    tokens: slice  # of the packed batch
    blocks: np.ndarray  # [num_blocks] int64: where each block's first layer has its keys, in halves of a layer
    reads: np.ndarray  # [num_tokens, 2] int64: the first key that each token reads, and the one after the last
    kv_head: int

    @property
    def num_scores(self) -> int:
        """What it takes to compute the piece, about: the scores of one query head."""
        return int((self.reads[:, 1] - self.reads[:, 0]).sum())


@dataclass(frozen=True, slots=True)
class Chunks:
    """A step's pieces by the thread that computes them; serves every layer of the group."""

    shares: tuple[tuple[Piece, ...], ...]


class ChunkAttention:
    """Computes chunks; used by one thread.

    A token's sums are the same in any batch, in any pieces and with any number of threads. In a group that reads all
    tokens before they are the same for any cut of a prompt into chunks of several tokens.
    """

    def __init__(self, threads: KernelThreads) -> None:
        self._threads = threads

    def supports(self, shape: Shape) -> bool:
        """Return whether the kernel is made for layers of this shape."""
        return shape.device.type == "cpu" and shape.dtype in DTYPES and shape.head_dim % LANES == 0

    def plan(
        self, parts: Sequence[Segment], num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> Chunks:
        """The pieces of *parts*, which have several tokens each, in a slab of *num_layers*."""
        pieces = [piece for part in parts for piece in _pieces(part, num_layers, num_kv_heads)]
        work = sum(piece.num_scores for piece in pieces) * (num_heads // num_kv_heads) * head_dim
        num_threads = self._threads.worth(work, WORTH_A_THREAD)
        shares: list[list[Piece]] = [[] for _ in range(num_threads)]
        loads = [0] * num_threads
        for piece in sorted(pieces, key=lambda piece: -piece.num_scores):
            minimum = loads.index(min(loads))
            shares[minimum].append(piece)
            loads[minimum] += piece.num_scores
        return Chunks(tuple(tuple(share) for share in shares if share))

    def attend(self, layer: Layer, chunks: Chunks) -> None:
        """Attend *chunks* and write their tokens of the layer's output."""
        from kvtier.engine.model.cpu.chunk_kernel import attend_chunk

        def attend(share: Sequence[Piece]) -> None:
            for it in share:
                attend_chunk(
                    layer.queries[it.tokens], layer.halves, it.blocks, it.reads, layer.number, it.kv_head,
                    layer.scale, layer.softcap, layer.sinks, layer.output[it.tokens],
                )  # fmt: skip

        self._threads.run([partial(attend, share) for share in chunks.shares])


def _pieces(part: Segment, num_layers: int, num_kv_heads: int) -> list[Piece]:
    firsts = [oldest_key(part.group, position) - part.first_key for position in range(part.start, part.end)]
    ends = range(part.start - part.first_key + 1, part.num_keys + 1)
    reads = np.array([firsts, ends], np.int64).T.copy()
    blocks = np.asarray(part.table, np.int64) * (2 * num_layers)
    return [
        Piece(slice(part.rows.start + begin, part.rows.start + end), blocks, reads[begin:end], kv_head)
        for begin, end in _cuts(part.num_queries)
        for kv_head in range(num_kv_heads)
    ]


def _cuts(num_tokens: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + MAX_TOKENS, num_tokens)) for begin in range(0, num_tokens, MAX_TOKENS)]
