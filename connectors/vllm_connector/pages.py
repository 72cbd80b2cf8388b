"""`Pages`: one rank's part of vLLM's KV cache, from which whole blocks are copied to host slots and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvtier.connectors.page_moves import copy_pages
from kvtier.connectors.vllm_connector.engine_layout import GroupLayout, UnsupportedEngine

Slots = npt.NDArray[np.uint8]  # [num_slots, block_bytes] of a group, on the host


class Pages(Protocol):
    """The part of a KV cache group that one rank holds. A page is the rank's part of one block.

    The methods return when all copies are complete. They raise IndexError for a page or slot that does not exist.
    """

    def load(self, pages: Sequence[int], slots: Sequence[int], host: Slots) -> None:
        """Copy this rank's part of each of *slots* to the page at the same index of *pages*."""

    def store(self, pages: Sequence[int], slots: Sequence[int], host: Slots) -> None:
        """Copy each of *pages* to this rank's part of the slot at the same index of *slots*."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """The KV cache of a layer on this rank."""

    pages: torch.Tensor  # [num_pages, page_bytes] uint8
    part: slice  # the bytes of a host slot that belong to this layer and rank


class CpuPages:
    """Pages in CPU memory."""

    def __init__(self, layers: Sequence[_Layer]) -> None:
        self._layers = layers

    def load(self, pages: Sequence[int], slots: Sequence[int], host: Slots) -> None:
        copy_pages(*self._pairs(pages, slots, host))

    def store(self, pages: Sequence[int], slots: Sequence[int], host: Slots) -> None:
        in_cache, in_host = self._pairs(pages, slots, host)
        copy_pages(in_host, in_cache)

    def _pairs(
        self, pages: Sequence[int], slots: Sequence[int], host: Slots
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the tensors of all pages and layers, and the parts of slots that correspond to them."""
        rows = torch.from_numpy(host)
        in_cache: list[torch.Tensor] = []
        in_host: list[torch.Tensor] = []
        for page, slot in zip(pages, slots, strict=True):
            row = rows[slot]
            for layer in self._layers:
                in_cache.append(layer.pages[page])
                in_host.append(row[layer.part])
        return in_cache, in_host


class DevicePages:
    """Pages in the memory of a device, such as a GPU.

    All pages of a layer are copied between device and host together, on the calling thread's current stream.
    """

    def __init__(self, layers: Sequence[_Layer]) -> None:
        self._layers = layers

    def load(self, pages: Sequence[int], slots: Sequence[int], host: Slots) -> None:
        for layer in self._layers:
            rows = torch.from_numpy(np.ascontiguousarray(host[:, layer.part][list(slots)]))
            layer.pages[self._ids(layer, pages)] = rows.to(layer.pages.device)

    def store(self, pages: Sequence[int], slots: Sequence[int], host: Slots) -> None:
        for layer in self._layers:
            rows = layer.pages[self._ids(layer, pages)].cpu().numpy()
            host[list(slots), layer.part] = rows

    def _ids(self, layer: _Layer, pages: Sequence[int]) -> torch.Tensor:
        return torch.tensor(pages, dtype=torch.int64, device=layer.pages.device)


def group_pages(layout: GroupLayout, kv_caches: Mapping[str, Any], num_pages: int, rank: int) -> Pages:
    """Return the pages of one group. Raise `UnsupportedEngine` if a page is not contiguous in memory.

    *kv_caches* has vLLM's tensors by layer. The first dimension of each tensor is *num_pages* or a multiple of it.
    """
    layers, end = [], layout.part_of(rank).start
    for name, page_bytes in zip(layout.layer_names, layout.page_bytes, strict=True):
        start, end = end, end + page_bytes
        if not isinstance(kv_caches.get(name), torch.Tensor):
            raise UnsupportedEngine(
                f"the KV cache of layer {name} is not a single tensor; start vLLM without the connector"
            )
        layers.append(_Layer(_as_pages(name, kv_caches[name], num_pages, page_bytes), slice(start, end)))
    is_here = all(layer.pages.device.type == "cpu" for layer in layers)
    return CpuPages(layers) if is_here else DevicePages(layers)


def _as_pages(name: str, cache: torch.Tensor, num_pages: int, page_bytes: int) -> torch.Tensor:
    """Return a view of a layer's tensor as [num_pages, page_bytes] uint8."""
    if cache.shape[0] % num_pages:
        raise UnsupportedEngine(
            f"the KV cache of layer {name} has {cache.shape[0]} rows, which is not a multiple of its {num_pages} blocks"
            "; start vLLM without the connector"
        )
    parts, item = cache.shape[0] // num_pages, cache.element_size()
    inner = [*zip(cache.shape[1:], cache.stride()[1:], strict=True), *([(parts, cache.stride(0))] if parts > 1 else [])]
    run = 1
    for size, stride in sorted((each for each in inner if each[0] > 1), key=lambda each: each[1]):
        if stride != run:
            raise UnsupportedEngine(
                f"a block of layer {name} is not contiguous in this KV cache layout; start vLLM without the connector"
            )
        run *= size
    if not run * item <= page_bytes <= parts * cache.stride(0) * item:
        raise UnsupportedEngine(
            f"a block of layer {name} has {run * item} bytes in memory, but vLLM reports {page_bytes}; start vLLM "
            "without the connector"
        )
    flat = torch.tensor([], dtype=torch.uint8, device=cache.device)
    strides = (parts * cache.stride(0) * item, 1)
    return flat.set_(cache.untyped_storage(), cache.storage_offset() * item, (num_pages, page_bytes), strides)
