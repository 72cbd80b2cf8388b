"""Pins: prefixes that an operator keeps in host memory for a while."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from kvtier.sidecar.endpoint import AttachedClient, Lease, LeaseUse
from kvtier.sidecar.layout import Layout
from kvtier.sidecar.layout_tiers import LayoutTiers
from kvtier.sidecar.shared_fetch import SharedFetch
from kvtier.sidecar.shared_hit import SharedHit, longest_of, needed
from kvtier.sidecar.shares import Share, Shares
from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.tiers.naming.named_blocks import NamedBlocks

PART = 0.25  # of host memory for all pins together; engines need the rest
MAX_PINS = 256


class TooManyPins(ValueError):
    """The error of a pin beyond `MAX_PINS`."""


@dataclass(frozen=True, slots=True)
class PinnedLayout:
    """A snapshot of the chunks that a pin keeps in one layout.

    *num_chunks* (chunks in host memory) and *num_coming* (chunks still being read) count a chunk once for each group of
    each rank.
    """

    layout: Layout
    num_chunks: int
    num_tokens: int  # of the prefix that all groups of all ranks have in host memory
    num_coming: int  # chunks still being read from disk
    num_beyond: int  # cached chunks of the prefix that are left out, because the pins' part of host memory is full


@dataclass(frozen=True, slots=True)
class PinStatistics:
    """A snapshot of the totals of all pins."""

    num_pins: int
    num_bytes: int  # of the segment, including chunks still being read
    max_bytes: int


class PinnedChunks:
    """Leases on the longest cached prefix of a prompt in one layout. Each group leases only the chunks that it needs.

    Some of these chunks may not have been read from disk yet.
    """

    def __init__(self, tiers: LayoutTiers, blocks: NamedBlocks, share: Share) -> None:
        """Lease the longest cached prefix of *blocks*. All groups of the layout must implement `AttentionGroup`."""
        self.tiers = tiers
        self._num_clears = tiers.num_clears
        self._groups = cast("Sequence[AttentionGroup]", tiers.layout.groups)
        hit = SharedHit(tiers, dict(enumerate(self._groups)), blocks.names, share)
        self._num_beyond = hit.num_there - hit.num_chunks
        num_chunks = hit.within_room()
        self._needed = [needed(group, num_chunks) for group in self._groups]
        self._fetches = [
            SharedFetch(tiers, group_id, blocks.of(group, own), share, lambda place, failure: None)
            for group_id, (group, own) in enumerate(zip(self._groups, self._needed, strict=True))
        ]

    @property
    def is_cleared(self) -> bool:
        """True if the cache was cleared on request after these chunks were leased, so that no lookup finds them."""
        return self.tiers.num_clears != self._num_clears

    def leases(self, since: float) -> Iterator[Lease]:
        """Yield a `Lease` for each group, with its current number of leased chunks, and *since* as its beginning."""
        for group_id, fetch in enumerate(self._fetches):
            yield Lease(LeaseUse.PINNED, group_id, int((fetch.slots != ABSENT).sum()), since)

    def view(self) -> PinnedLayout:
        """Return a snapshot of the leased chunks."""
        are_there = [
            np.append(np.zeros(own.start, np.bool_), fetch.slots != ABSENT)
            for own, fetch in zip(self._needed, self._fetches, strict=True)
        ]
        num_chunks = longest_of(self._groups, are_there, self._needed[0].stop)
        return PinnedLayout(
            self.tiers.layout,
            sum(int(are.sum()) for are in are_there),
            num_chunks * self._groups[0].block_size,
            sum(fetch.num_coming for fetch in self._fetches),
            self._num_beyond,
        )

    def release(self) -> None:
        """End all leases."""
        for fetch in self._fetches:
            fetch.release(np.arange(len(fetch.slots))[::-1])


@dataclass(frozen=True, eq=False, slots=True)
class Pin:
    """A pinned prefix, and its leased chunks in each layout (KV format) of the model."""

    pin_id: str
    since: float
    until: float
    chunks: Sequence[PinnedChunks]


class Pins:
    """All pins, which are leases on chunks until a time that an operator has chosen. Owned by the sidecar's thread.

    A pin keeps only chunks that are cached when the pin is made. A pin ends at the chosen time, when one of its layouts
    is cleared, and when the sidecar ends.
    """

    def __init__(self, shares: Shares, clock: Callable[[], float]) -> None:
        self._share = Share(shares, part=PART)
        self._shares = shares
        self._clock = clock
        self._pins: dict[str, Pin] = {}

    def __iter__(self) -> Iterator[Pin]:
        return iter(list(self._pins.values()))

    def pin(self, pin_id: str, wanted: Sequence[tuple[LayoutTiers, NamedBlocks]], seconds: float) -> None:
        """Keep the cached part of these prefixes in host memory for *seconds*, replacing any pin of this name.

        `view` says how much is kept. Raises `TooManyPins` if there are `MAX_PINS` other pins.
        """
        if pin_id not in self._pins and len(self._pins) >= MAX_PINS:
            raise TooManyPins(f"there are {MAX_PINS} pins already; end one, or wait until one expires")
        now = self._clock()
        chunks = [PinnedChunks(tiers, blocks, self._share) for tiers, blocks in wanted if blocks.names]
        made = Pin(pin_id, now, now + seconds, chunks)
        self.unpin(pin_id)  # after the new pin is made, so that chunks in both pins stay leased
        self._pins[pin_id] = made

    def unpin(self, pin_id: str) -> bool:
        """End the pin, and return whether there was one."""
        pin = self._pins.pop(pin_id, None)
        if pin is not None:
            for chunks in pin.chunks:
                chunks.release()
        return pin is not None

    def view(self, pin_id: str) -> list[PinnedLayout] | None:
        """Return what the pin keeps now, by layout; None if there is no such pin."""
        pin = self._pins.get(pin_id)
        return None if pin is None else [chunks.view() for chunks in pin.chunks]

    def poll(self) -> None:
        """End the pins that have expired, and those whose chunks were cleared."""
        now = self._clock()
        for pin in self:
            if now >= pin.until or any(chunks.is_cleared for chunks in pin.chunks):
                self.unpin(pin.pin_id)

    def holders(self) -> list[AttachedClient]:
        """Return what all pins lease, as one `AttachedClient` for each layout (KV format) of each pin."""
        return [
            AttachedClient(f"pin {pin.pin_id}", pin.since, each.tiers.layout, tuple(each.leases(pin.since)))
            for pin in self
            for each in pin.chunks
        ]

    def statistics(self) -> PinStatistics:
        """Return the totals of all pins."""
        return PinStatistics(len(self._pins), self._share.num_bytes, int(PART * self._shares.total_bytes))

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        self._share.check()
        assert self._pins or not self._share.num_bytes, "pins: something is leased for no pin"
