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

    @property
    def num_blank(self) -> int:
        """Number of slots that are available without evicting a chunk."""

    def num_leased(self, extent: int) -> int:
        """Return how many slots of the extent, a part of host memory, are leased now."""

    def drain(self, extent: int) -> bool:
        """Evict the idle chunks in the extent, a part of host memory, and put no chunk into their slots any more.

        A chunk is idle if it is neither leased nor still to be copied to disk. Call this repeatedly. Returns whether
        the extent is empty. If it is, it no longer belongs to this holder (its user).
        """

    def end_drain(self, extent: int) -> None:
        """Stop draining the extent, so that its emptied slots may hold chunks again."""


class Extents:
    """The extents (equal parts) of the segment, the shared host memory, and the holder (user) of each extent.

    A holder that needs memory gets an unused extent. If there is none, it gets the least recently used extent of the
    other holders. But if its own `oldest_extent` has been unused for even longer, it gets none, and must evict chunks
    of its own.

    Only an extent without leased chunks can be taken at once. Busy holders may lease chunks in each of their extents at
    all times. So a holder that has no room of its own *claims* an extent if it gets none at once. A claimed extent is
    drained: each of its slots is taken as soon as it is idle. The empty extent is assigned to the holder that claimed
    it. Owned by the sidecar's thread.
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
        self._claims: dict[Holder, int] = {}  # the extent that is drained for each holder

    def acquire(self, holder: Holder) -> bool:
        """Assign one more extent (part of host memory) to *holder*, if necessary by taking it from another holder.

        Returns False if that is not possible now. If the holder has no room of its own, a later `poll` assigns an
        extent to it.
        """
        extent = self._unused()
        if extent is None:
            extent = self._take_oldest(holder)
        if extent is None:
            self._claim(holder)
            return False
        if holder in self._claims:
            claimed = self._claims.pop(holder)
            self._holders[claimed].end_drain(claimed)
        self._assign(extent, holder)
        return True

    def poll(self) -> None:
        """Drain the claimed extents, and assign those that are empty to the holders that claimed them."""
        for taker, extent in list(self._claims.items()):
            if self._holders[extent].drain(extent):
                del self._claims[taker]
                self._assign(extent, taker)

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
        assert all(self._holders[extent] is not taker for taker, extent in self._claims.items()), "it claims its own"
        assert len(set(self._claims.values())) == len(self._claims), "two holders claim the same extent"

    def _assign(self, extent: int, holder: Holder) -> None:
        self._holders[extent] = holder
        self.touch(extent)
        holder.give(extent)

    def _claim(self, taker: Holder) -> None:
        """Begin to drain an extent for *taker*, unless it has room of its own or has claimed an extent already.

        The extent with the fewest leased slots is chosen, because leases may last long, for example those of pins.
        """
        if taker in self._claims or taker.num_blank or taker.oldest_extent() is not None:
            return
        others = self._unclaimed_of_others(taker)
        if others:
            self._claims[taker] = min(
                others, key=lambda extent: (self._holders[extent].num_leased(extent), self._used_at[extent])
            )

    def _unclaimed_of_others(self, taker: Holder) -> list[int]:
        claimed = set(self._claims.values())
        return [extent for extent, holder in self._holders.items() if holder is not taker and extent not in claimed]

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
        others = self._unclaimed_of_others(taker)
        for extent in sorted(others, key=lambda extent: (self._used_at[extent], extent not in first_to_go)):
            if self._used_at[extent] > limit:
                return None  # *taker* must evict its own chunks instead
            if self._holders[extent].take_back(extent):
                del self._holders[extent], self._used_at[extent]
                return extent
        return None
