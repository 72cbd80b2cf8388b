"""`PageCopies`: copies of pages between vLLM's KV cache and its host pool, for vLLM on a CPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvtier.connectors.page_moves import copy_pages


class Ids(Protocol):
    """The ids in a copy job, group after group. For chunks in the host pool, this is vLLM's `CPULoadStoreSpec`."""

    @property
    def block_ids(self) -> Sequence[int] | npt.NDArray[np.integer]: ...


class PageIds(Ids, Protocol):
    """The ids of pages in the KV cache in a copy job, group after group. This is vLLM's `GPULoadStoreSpec`."""

    @property
    def group_sizes(self) -> Sequence[int]:
        """Number of pages of each group."""

    @property
    def block_indices(self) -> Sequence[int]:
        """Index of each group's first page among the pages of the request."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A KV cache tensor of vLLM and its part of the host pool.

    *pages* is int8 [num_pages, page_bytes], *chunks* is int8 [num_chunks, pages_per_chunk, page_bytes]. Layers that
    share memory share a tensor.
    """

    pages: torch.Tensor
    chunks: torch.Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """The place of a layer's KV: the first *num_bytes* bytes of each page in the tensor with index *tensor*."""

    tensor: int
    num_bytes: int


class PageCopies:
    """A copier of pages between vLLM's KV cache and its host pool. Any thread may call the methods."""

    def __init__(self, tensors: Sequence[Tensor], groups: Sequence[Sequence[Layer]]) -> None:
        """Create a copier for the KV cache *tensors*. *groups* has the layers of each KV cache group."""
        self._tensors = tensors
        self._groups = groups
        self._pages_per_chunk = tensors[0].chunks.shape[1]

    def store(self, pages: PageIds, chunks: Ids) -> int:
        """Copy *pages* of the KV cache to *chunks* of the host pool, and return the number of bytes copied.

        Raises:
            ValueError: If the number of groups, pages or chunks is wrong. Nothing is copied then.
            IndexError: If an id does not exist.
        """
        from_pages, to_chunks = self._pairs(pages, chunks)
        copy_pages(to_chunks, from_pages)
        return sum(page.nbytes for page in from_pages)

    def load(self, pages: PageIds, chunks: Ids) -> int:
        """Copy *chunks* of the host pool to *pages* of the KV cache, and return the number of bytes copied.

        Raises as `store` does.
        """
        to_pages, from_chunks = self._pairs(pages, chunks)
        copy_pages(to_pages, from_chunks)
        return sum(page.nbytes for page in to_pages)

    def _pairs(self, pages: PageIds, chunks: Ids) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the job's pages in each layer, and for each page the part of the host pool to copy from or to."""
        # For each group, the number of pages at the start of the first chunk that are not in the job.
        skipped = [first % self._pages_per_chunk for first in pages.block_indices]
        num_chunks = [
            -(-(before + size) // self._pages_per_chunk) if size else 0
            for before, size in zip(skipped, pages.group_sizes, strict=True)
        ]
        wanted = len(self._groups), sum(pages.group_sizes), sum(num_chunks)
        given = len(pages.group_sizes), len(pages.block_ids), len(chunks.block_ids)
        if wanted != given:
            raise ValueError(f"the numbers of groups, pages and chunks in a copy job are {given}, but must be {wanted}")

        in_cache: list[torch.Tensor] = []
        in_host: list[torch.Tensor] = []
        page_from = chunk_from = 0
        for layers, before, size, count in zip(self._groups, skipped, pages.group_sizes, num_chunks, strict=True):
            page_ids = pages.block_ids[page_from : page_from + size]
            chunk_ids = chunks.block_ids[chunk_from : chunk_from + count]
            page_from, chunk_from = page_from + size, chunk_from + count
            for layer in layers:
                tensor, used = self._tensors[layer.tensor], slice(layer.num_bytes)
                for place, page_id in enumerate(page_ids, before):
                    chunk, part = divmod(place, self._pages_per_chunk)
                    in_cache.append(tensor.pages[page_id, used])
                    in_host.append(tensor.chunks[chunk_ids[chunk], part, used])
        return in_cache, in_host
