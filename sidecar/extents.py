"""Extents: the division of host memory into parts of equal size, and their assignment to layouts by recent use."""

from collections.abc import Callable, Collection
from typing import Protocol

from kvtier.transfer.segment import Segment


class Holder(Protocol):
    """A user of host memory, which stores chunks of one size in the extents that are assigned to it.

    An extent is one of the equal parts into which host memory is divided. It is identified by a number.
    """

    def give(self, extent: int) -> None:
        """Assign an empty extent, a part of host memory, to this holder."""

    def take_back(self, extent: int) -> bool:
        """Evict the chunks in the extent, a part of host memory, and take the extent away from this holder (its user).

        Returns False and changes nothing if one of the chunks is leased, or must still be copied to disk.
        """

    def oldest_extent(self) -> int | None:
        """Return the extent (part of host memory) of the chunk to evict next, or None if no chunk can be evicted."""


class Extents:
    """The extents (equal parts) of the segment, the shared host memory, and the holder (user) of each extent.

    A holder that needs memory gets an unused extent. If there is none, it gets the least recently used extent of the
    other holders. But if its own `oldest_extent` has been unused for even longer, it gets none, and must evict chunks
    of its own. Owned by the sidecar's thread.
    """

    def __init__(
        self, segment: Segment, extent_bytes: int, clock: Callable[[], float], left_out: Collection[int] = ()
    ) -> None:
        """Divide *segment*, the shared host memory, into extents of *extent_bytes* bytes that nobody uses yet.

        The extents with the numbers *left_out* are never used, because engines may still copy from or to them.
        """
        self.extent_bytes = extent_bytes
        self._left_out = left_out
        self._segment = segment
        self._clock = clock
        self._holders: dict[int, Holder] = {}  # by extent
        self._used_at: dict[int, float] = {}  # by extent, for extents with a holder
        self._num_given = 0  # all extents with smaller numbers were given to holders or are left out

    def acquire(self, holder: Holder) -> bool:
        """Assign one more extent (part of host memory) to *holder*, if necessary by taking it from another holder.

        Returns False if that is not possible.
        """
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
        """Record that the extent with this number, a part of host memory, was just used."""
        self._used_at[extent] = self._clock()

    def extents_of(self, holder: Holder) -> list[int]:
        """Return the numbers of the extents (parts of host memory) that are assigned to *holder*."""
        return [extent for extent, its_holder in self._holders.items() if its_holder is holder]

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
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
        own = taker.oldest_extent()
        limit = self._clock() if own is None else self._used_at[own]
        # On a tie, prefer an extent from which its holder would evict next, because it has the end of a document.
        first_to_go = {holder.oldest_extent() for holder in self._holders.values() if holder is not taker}
        others = [extent for extent, holder in self._holders.items() if holder is not taker]
        for extent in sorted(others, key=lambda extent: (self._used_at[extent], extent not in first_to_go)):
            if self._used_at[extent] > limit:
                return None  # *taker* must evict its own chunks instead
            if self._holders[extent].take_back(extent):
                del self._holders[extent], self._used_at[extent]
                return extent
        return None
