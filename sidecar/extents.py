"""Extents: the assignment of host memory, in parts of equal size, to the layouts that use it most recently."""

from collections.abc import Callable, Collection
from typing import Protocol

from kvtier.transfer.segment import Segment


class Holder(Protocol):
    """The owner of some extents, in which it keeps chunks of one size."""

    def give(self, extent: int) -> None:
        """Add an empty extent to this holder."""

    def take_back(self, extent: int) -> bool:
        """Evict the chunks in the extent, and remove it from this holder.

        Returns False and changes nothing if a chunk in the extent is leased, or has no copy on disk yet while the disk
        accepts writes.
        """

    def oldest_extent(self) -> int | None:
        """Return the extent of the chunk that this holder would evict first; None if it can evict no chunk."""


class Extents:
    """The segment (the shared host memory), cut into extents of *extent_bytes*, and the holder of each extent.

    A holder that needs memory gets an extent without a holder first. When there is none left, it gets the least
    recently used extent of another holder, unless that extent was used more recently than the extent from which it
    would itself evict next. Owned by the sidecar's thread.
    """

    def __init__(
        self, segment: Segment, extent_bytes: int, clock: Callable[[], float], left_out: Collection[int] = ()
    ) -> None:
        """Start without holders. The extents *left_out* never get a holder."""
        self.extent_bytes = extent_bytes
        self._left_out = left_out
        self._segment = segment
        self._clock = clock
        self._holders: dict[int, Holder] = {}  # by extent
        self._used_at: dict[int, float] = {}  # by extent, for extents with a holder
        self._num_given = 0  # length of the run of extents at the beginning that were given or are left out

    def acquire(self, holder: Holder) -> bool:
        """Give the holder one more extent. Return False if none is unused and none can be taken from another holder."""
        extent = self._unused()
        if extent is None:
            extent = self._take_oldest(holder)
        if extent is None:
            return False
        self._holders[extent] = holder
        self.touch(extent)
        holder.give(extent)
        return True

    def touch(self, extent: int) -> None:
        """Mark the extent as just used."""
        self._used_at[extent] = self._clock()

    def extents_of(self, holder: Holder) -> list[int]:
        """Return the extents of this holder."""
        return [extent for extent, its_holder in self._holders.items() if its_holder is holder]

    def check(self) -> None:
        """Raise AssertionError if an extent that was given or used has no holder."""
        assert self._holders.keys() == self._used_at.keys(), "an extent is used and has no holder"
        left_out = [extent for extent in self._left_out if extent < self._num_given]
        assert sorted([*self._holders, *left_out]) == list(range(self._num_given)), "an extent is lost"

    def _unused(self) -> int | None:
        while (self._num_given + 1) * self.extent_bytes <= self._segment.backed_bytes:
            self._num_given += 1
            if self._num_given - 1 not in self._left_out:
                return self._num_given - 1
        return None

    def _take_oldest(self, taker: Holder) -> int | None:
        """Take the least recently used extent that a holder other than *taker* can give up, and return it.

        Among extents that were last used at the same time, prefer those from which their holders would evict next,
        because they have the tail of a document. Returns None if *taker* should rather evict chunks of its own.
        """
        own = taker.oldest_extent()
        limit = self._clock() if own is None else self._used_at[own]
        first_to_go = {holder.oldest_extent() for holder in self._holders.values() if holder is not taker}
        others = [extent for extent, holder in self._holders.items() if holder is not taker]
        for extent in sorted(others, key=lambda extent: (self._used_at[extent], extent not in first_to_go)):
            if self._used_at[extent] > limit:
                return None
            if self._holders[extent].take_back(extent):
                del self._holders[extent], self._used_at[extent]
                return extent
        return None
