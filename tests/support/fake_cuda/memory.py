"""Memory of a fake device: which addresses are the device's, which host memory is registered."""

import ctypes
from bisect import bisect_right

import torch

from fake_cuda.spans import Span, Spans, first_overlap

FRESH = 0xA5  # in each byte of memory that was never written


class Memory:
    """The memory that a device knows. Device memory is ordinary memory, at its real address, as long as the device."""

    def __init__(self) -> None:
        self._allocations: list[tuple[int, int]] = []  # by address
        self._registrations: list[tuple[int, int]] = []
        self._kept: list[torch.Tensor] = []
        self._pinned_by_torch: set[int] = set()
        self._uploads: dict[Span, bytes] = {}

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocate device memory, [num_bytes] uint8, aligned as `cudaMalloc` aligns it."""
        blocks = self._aligned(num_bytes)
        self._insert(self._allocations, blocks)
        return blocks

    def allocate_pinned(self, num_bytes: int) -> torch.Tensor:
        """Allocate host memory that torch has registered for as long as the device is there."""
        blocks = self._aligned(num_bytes)
        self._insert(self._registrations, blocks)
        self._pinned_by_torch.add(blocks.data_ptr())
        return blocks

    def register(self, address: int, num_bytes: int) -> bool:
        """Register host memory; False, and nothing is registered, if any of these bytes is already."""
        if first_overlap(tuple(self._registrations), ((address, address + num_bytes),)) is not None:
            return False
        self._registrations.append((address, address + num_bytes))
        self._registrations.sort()
        return True

    def unregister(self, address: int) -> Span | None:
        """Undo the registration that begins at the address; its span, None if there is none."""
        span = next((span for span in self._registrations if span[0] == address), None)
        if span is not None:
            self._registrations.remove(span)
        return span

    def is_on_device(self, address: int, num_bytes: int) -> bool:
        """Whether all of these bytes are of one allocation."""
        return _is_within(self._allocations, address, num_bytes)

    def is_registered(self, address: int, num_bytes: int) -> bool:
        """Whether all of these bytes are of one registration."""
        return _is_within(self._registrations, address, num_bytes)

    def is_pageable(self, address: int, num_bytes: int) -> bool:
        """Whether none of these bytes is the device's or registered."""
        span = ((address, address + num_bytes),)
        return not any(first_overlap(tuple(known), span) for known in (self._allocations, self._registrations))

    @property
    def left_registered(self) -> list[Span]:
        """Registrations that were not undone; torch's own pinned memory is not among them."""
        return [span for span in self._registrations if span[0] not in self._pinned_by_torch]

    def remember_upload(self, address: int, content: bytes) -> None:
        """Remember what will be in fresh device memory, so that an operation's tables are known when it is enqueued."""
        self._uploads[address, address + len(content)] = content

    def forget_uploads(self, spans: Spans) -> None:
        """Forget the uploads to memory that something else is written to now."""
        for span in [span for span in self._uploads if first_overlap((span,), spans)]:
            del self._uploads[span]

    def upload_at(self, address: int, num_bytes: int) -> bytes:
        """The bytes that an upload brings to the address; NotImplementedError if anything else brings them."""
        for (start, end), content in self._uploads.items():
            if start <= address and address + num_bytes <= end:
                return content[address - start : address - start + num_bytes]
        raise NotImplementedError("the fake device knows tables and indices only that came whole from ordinary memory")

    def _aligned(self, num_bytes: int) -> torch.Tensor:
        whole = torch.full((num_bytes + 512,), FRESH, dtype=torch.uint8)
        self._kept.append(whole)
        start = -whole.data_ptr() % 512
        return whole[start : start + num_bytes]

    @staticmethod
    def _insert(spans: list[tuple[int, int]], blocks: torch.Tensor) -> None:
        spans.append((blocks.data_ptr(), blocks.data_ptr() + blocks.numel()))
        spans.sort()


def read(address: int, num_bytes: int) -> bytes:
    """The bytes that are at the address now."""
    return ctypes.string_at(address, num_bytes)


def scramble(spans: Spans) -> None:
    """Overwrite memory that a copy is on its way to: nothing may count on its bytes before the copy has landed."""
    for start, end in spans:
        ctypes.memset(start, FRESH, end - start)


def _is_within(spans: list[tuple[int, int]], address: int, num_bytes: int) -> bool:
    place = bisect_right(spans, (address, float("inf"))) - 1  # type: ignore[arg-type]
    return place >= 0 and spans[place][0] <= address and address + num_bytes <= spans[place][1]
