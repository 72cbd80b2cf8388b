"""SharedFetch: a fetch for a client. Its chunks count against the client's limit on host memory."""

from collections.abc import Callable

import numpy as np

from kvtier.sidecar.layout_tiers import LayoutTiers
from kvtier.sidecar.shares import Share
from kvtier.tiers.device.slot_ids import ABSENT, Ids
from kvtier.tiers.lower.lower_tiers import Fetch, Places
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.naming.tier import Reason, Tier


class SharedFetch:
    """A `Fetch` of one group's chunks for a client of the sidecar.

    Each chunk counts against the client's `Share` of host memory from the start, until it is released or its fetch
    fails.
    """

    def __init__(
        self,
        tiers: LayoutTiers,
        group_id: int,
        blocks: NamedBlocks,
        share: Share,
        on_fetched: Callable[[int, Reason | None], None],
    ) -> None:
        """Start to fetch *blocks*. The caller has just made room for them with `LayoutTiers.room_for`.

        Chunks that are in host memory already are usually leased at once (see `slots`). For every other chunk,
        *on_fetched* is called later, unless the caller has released the chunk. It is called with the chunk's index in
        *blocks*, and the reason why the chunk could not be fetched, or None if it was fetched.
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
        """Slot that is leased for each chunk, or ABSENT if the chunk has no slot."""
        return self._fetch.slots

    @property
    def num_coming(self) -> int:
        """Number of chunks that are still being fetched."""
        return int(self._is_coming.sum())

    def digest(self, place: int) -> bytes:
        """Return the digest of the bytes of the chunk with index *place* in *blocks*, which must be leased."""
        return self._fetch.digest(place)

    def tier(self, place: int) -> Tier:
        """Return the tier from which the chunk with index *place* in *blocks*, which must be leased, came."""
        return self._fetch.tier(place)

    def release(self, places: Ids) -> None:
        """End the leases on the chunks at *places*, none of which has been released yet.

        The chunk nearest to the end of the prompt comes first in *places*, so that it is evicted first.
        """
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
        if self._is_coming[place]:  # otherwise the fetch failed, and the chunk was released before this call
            self._expect_no_more(place)
        if failure is None:
            self._share.lease(self._memory, np.array([fetch.slots.item(place)]))
        self._tell(place, failure)
