"""A fetch of blocks into a sidecar's host memory."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.store.record import DIGEST_BYTES
from kvtier.tiers.device.slot_ids import ABSENT, Ids
from kvtier.tiers.lower.lower_tiers import OnFetched, Places
from kvtier.tiers.naming.tenant import OwnerNumbers, tenant_with
from kvtier.tiers.naming.tier import Reason


class AttachedFetch:
    """Leases on blocks in a sidecar's host memory; implements `Fetch`.

    The leases are known here once the sidecar has answered. Owned by the tiers' thread.
    """

    def __init__(
        self,
        number: int,
        group_id: int,
        num_blocks: int,
        on_fetched: OnFetched,
        on_released: Callable[["AttachedFetch", Ids], None],
        on_late: Callable[["AttachedFetch"], None],
    ) -> None:
        """Create a fetch without leases.

        *on_released* is called with places that the sidecar need no longer lease or fetch, *on_late* when the caller
        gives up the blocks that have not come.
        """
        self.number = number
        self.group_id = group_id
        self.slots: Places = np.full(num_blocks, ABSENT, np.int32)
        self.failures: dict[int, Reason] = {}
        self._is_open = np.ones(num_blocks, np.bool_)  # [place] not leased, failed or released yet
        self._digests = bytearray(num_blocks * DIGEST_BYTES)
        self._owners = np.zeros(num_blocks, np.uint64)
        self._on_fetched = on_fetched
        self._on_released = on_released
        self._on_late = on_late

    @property
    def is_waiting(self) -> bool:
        """Whether any block has yet to come."""
        return bool(self._is_open.any())

    @property
    def num_leased(self) -> int:
        """Number of blocks that are leased now."""
        return int(np.count_nonzero(self.slots != ABSENT))

    @property
    def is_over(self) -> bool:
        """Whether the fetch leases nothing and waits for nothing."""
        return not self.is_waiting and not self.num_leased

    def on_come(self, places: Ids, slots: Ids, digests: bytes, owners: OwnerNumbers) -> None:
        """Record that these blocks are leased in these slots, except those released in the meantime."""
        is_wanted = self._is_open[places]
        for place, number in zip(places[is_wanted].tolist(), np.flatnonzero(is_wanted).tolist(), strict=True):
            digest = digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            self._digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES] = digest
        come = places[is_wanted]
        self.slots[come] = slots[is_wanted]
        self._owners[come] = owners[is_wanted]
        self._is_open[come] = False
        for place in come.tolist():
            if self.slots[place] != ABSENT:  # otherwise an earlier callback has released it
                self._on_fetched(self, place, None)

    def on_failed(self, place: int, reason: Reason) -> None:
        """Record that a block will never come."""
        if self._is_open[place]:
            self._is_open[place] = False
            self.failures[place] = reason
            self._on_fetched(self, place, reason)

    def fail(self, reason: Reason) -> None:
        """Fail every block that has not come."""
        for place in np.flatnonzero(self._is_open).tolist():
            self.on_failed(place, reason)

    def waiting_places(self) -> Ids:
        """Return the places of the blocks that have not come."""
        return np.flatnonzero(self._is_open)

    def digest(self, place: int) -> bytes:
        return bytes(self._digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES])

    def tenant(self, place: int) -> bytes:
        return tenant_with(int(self._owners[place]))

    def release(self, places: Sequence[int] | npt.NDArray[np.int64]) -> None:
        ids = np.asarray(places, np.intp)
        ids = ids[(self.slots[ids] != ABSENT) | self._is_open[ids]]
        if len(ids):
            self.slots[ids] = ABSENT
            self._is_open[ids] = False
            self._on_released(self, ids)

    def time_out(self) -> None:
        if self.is_waiting:
            self._on_late(self)
