"""Pins: prefixes that an operator has kept in host memory for a while."""

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

PART = 0.25  # of host memory, for all pins together: engines need the rest
MAX_PINS = 256


class TooManyPins(ValueError):
    """There are `MAX_PINS` already."""


@dataclass(frozen=True, slots=True)
class PinnedLayout:
    """What a pin keeps of one layout, by value. Chunks are those of one group of one rank."""

    layout: Layout
    num_chunks: int
    num_tokens: int  # of the prefix that all ranks have
    num_coming: int  # chunks that are still read from disk
    num_beyond: int  # chunks of the prefix that are cached, and left out since pins have their part of host memory


@dataclass(frozen=True, slots=True)
class PinStatistics:
    """All pins together, by value."""

    num_pins: int
    num_bytes: int  # of the segment, with what is still read for them
    max_bytes: int


class PinnedChunks:
    """What one layout's groups need of the longest prefix that they have, leased, or on its way from disk."""

    def __init__(self, tiers: LayoutTiers, blocks: NamedBlocks, share: Share) -> None:
        """*tiers* are of a layout whose groups are of attention."""
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
        """Whether the layout's chunks were forgotten after these were leased: they can be found no more."""
        return self.tiers.num_clears != self._num_clears

    def leases(self, since: float) -> Iterator[Lease]:
        """What is leased now, of each group."""
        for group_id, fetch in enumerate(self._fetches):
            yield Lease(LeaseUse.PINNED, group_id, int((fetch.slots != ABSENT).sum()), since)

    def view(self) -> PinnedLayout:
        """How it is now."""
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
    """One prefix, in each layout that has some of it."""

    pin_id: str
    since: float
    until: float
    chunks: Sequence[PinnedChunks]


class Pins:
    """Leases on chunks until a time that the operator has said. A pin keeps what is cached when it is made, and brings
    nothing that no engine has stored. It ends with its time, with a clear of its layout, and with the sidecar. Owned by
    the sidecar's thread."""

    def __init__(self, shares: Shares, clock: Callable[[], float]) -> None:
        self._share = Share(shares, part=PART)
        self._shares = shares
        self._clock = clock
        self._pins: dict[str, Pin] = {}

    def __iter__(self) -> Iterator[Pin]:
        return iter(list(self._pins.values()))

    def pin(self, pin_id: str, wanted: Sequence[tuple[LayoutTiers, NamedBlocks]], seconds: float) -> None:
        """Keep what there is of these prefixes in host memory for so long, in place of the pin of this name; `view`
        tells how much that is. `TooManyPins` if it is one too many."""
        if pin_id not in self._pins and len(self._pins) >= MAX_PINS:
            raise TooManyPins(f"there are {MAX_PINS} pins already; end one, or wait until one has had its time")
        now = self._clock()
        chunks = [PinnedChunks(tiers, blocks, self._share) for tiers, blocks in wanted if blocks.names]
        made = Pin(pin_id, now, now + seconds, chunks)
        self.unpin(pin_id)  # after its successor has leased what both have
        self._pins[pin_id] = made

    def unpin(self, pin_id: str) -> bool:
        """End the pin; whether there was one."""
        pin = self._pins.pop(pin_id, None)
        if pin is not None:
            for chunks in pin.chunks:
                chunks.release()
        return pin is not None

    def view(self, pin_id: str) -> list[PinnedLayout] | None:
        """What the pin keeps now, by layout; None if there is no such pin."""
        pin = self._pins.get(pin_id)
        return None if pin is None else [chunks.view() for chunks in pin.chunks]

    def poll(self) -> None:
        """End the pins that have had their time, or whose chunks can be found no more."""
        now = self._clock()
        for pin in self:
            if now >= pin.until or any(chunks.is_cleared for chunks in pin.chunks):
                self.unpin(pin.pin_id)

    def holders(self) -> list[AttachedClient]:
        """Each pin as who has leases, once for each layout."""
        return [
            AttachedClient(f"pin {pin.pin_id}", pin.since, each.tiers.layout, tuple(each.leases(pin.since)))
            for pin in self
            for each in pin.chunks
        ]

    def statistics(self) -> PinStatistics:
        """All of them together."""
        return PinStatistics(len(self._pins), self._share.num_bytes, int(PART * self._shares.total_bytes))

    def check(self) -> None:
        """Raise AssertionError if any two books disagree."""
        self._share.check()
        assert self._pins or not self._share.num_bytes, "pins: something is leased for no pin"
