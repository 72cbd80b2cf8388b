"""SharedFetch: a fetch of one group's chunks, which count in the client's share of host memory."""

from collections.abc import Callable

import numpy as np

from kvtier.sidecar.layout_tiers import LayoutTiers
from kvtier.sidecar.shares import Share
from kvtier.tiers.device.slot_ids import ABSENT, Ids
from kvtier.tiers.lower.lower_tiers import Fetch, Places
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.naming.tier import Reason, Tier


class SharedFetch:
    """A `Fetch` for a client. Each chunk counts in the client's share from the start until it is released or fails."""

    def __init__(
        self,
        tiers: LayoutTiers,
        group_id: int,
        blocks: NamedBlocks,
        share: Share,
        on_fetched: Callable[[int, Reason | None], None],
    ) -> None:
        """Start to fetch *blocks*, for which `LayoutTiers` has just made room.

        *on_fetched* is called for each chunk that is not leased at once, as described at `OnFetched`: with its place in
        *blocks*, and with the reason if it cannot be fetched.
        """
        self._memory = tiers.memories[group_id]
        self._names = blocks.names
        self._share = share
        self._tell = on_fetched
        self._fetch = tiers.fetch(group_id, blocks, self._on_fetched)
        self._is_coming = self._fetch.slots == ABSENT
        share.lease(self._memory, self._leased(np.flatnonzero(~self._is_coming)))
        share.expect(self._memory, [self._names[place] for place in np.flatnonzero(self._is_coming).tolist()])

    @property
    def slots(self) -> Places:
        """Slot that is leased for each chunk, or ABSENT."""
        return self._fetch.slots

    @property
    def num_coming(self) -> int:
        """Number of chunks that are still to be read."""
        return int(self._is_coming.sum())

    def digest(self, place: int) -> bytes:
        """Return the digest of a leased chunk's bytes."""
        return self._fetch.digest(place)

    def tier(self, place: int) -> Tier:
        """Return the tier from which a leased chunk came."""
        return self._fetch.tier(place)

    def release(self, places: Ids) -> None:
        """End the leases on these chunks, none of which has been released yet. *places* begin with the tail."""
        self._share.release(self._memory, self._leased(places))
        for place in places[self._is_coming[places]].tolist():
            self._expect_no_more(place)
        self._fetch.release(places)

    def _leased(self, places: Ids) -> Ids:
        slots = self._fetch.slots[places]
        leased: Ids = slots[slots != ABSENT].astype(np.intp)
        return leased

    def _expect_no_more(self, place: int) -> None:
        self._is_coming[place] = False
        self._share.remove_pending(self._memory, [self._names[place]])

    def _on_fetched(self, fetch: Fetch, place: int, failure: Reason | None) -> None:
        if self._is_coming[place]:  # otherwise it failed, and was released before this call
            self._expect_no_more(place)
        if failure is None:
            self._share.lease(self._memory, np.array([fetch.slots.item(place)]))
        self._tell(place, failure)
