"""AttachedFetch: blocks that are leased in a sidecar's host memory, or on their way to it."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.store.record import DIGEST_BYTES
from kvtier.tiers.device.slot_ids import ABSENT, Ids
from kvtier.tiers.lower.lower_tiers import OnFetched, Places
from kvtier.tiers.naming.tenant import OwnerNumbers, tenant_with
from kvtier.tiers.naming.tier import Reason


class AttachedFetch:
    """See `Fetch`. Its leases are known here once the sidecar has answered. Owned by the tiers' thread."""

    def __init__(
        self,
        number: int,
        group_id: int,
        num_blocks: int,
        on_fetched: OnFetched,
        on_released: Callable[["AttachedFetch", Ids], None],
        on_late: Callable[["AttachedFetch"], None],
    ) -> None:
        """*on_released* is called with places that the sidecar need not lease or wait for any more, *on_late* when the
        blocks that have not come are given up."""
        self.number = number
        self.group_id = group_id
        self.slots: Places = np.full(num_blocks, ABSENT, np.int32)
        self.failures: dict[int, Reason] = {}
        self._is_open = np.ones(num_blocks, np.bool_)  # [place] not here, not failed, not released
        self._digests = bytearray(num_blocks * DIGEST_BYTES)
        self._owners = np.zeros(num_blocks, np.uint64)
        self._on_fetched = on_fetched
        self._on_released = on_released
        self._on_late = on_late

    @property
    def is_waiting(self) -> bool:
        """Whether some of its blocks have still to come."""
        return bool(self._is_open.any())

    @property
    def num_leased(self) -> int:
        """Blocks that have come and were not released."""
        return int(np.count_nonzero(self.slots != ABSENT))

    @property
    def is_over(self) -> bool:
        """Whether it leases nothing and waits for nothing."""
        return not self.is_waiting and not self.num_leased

    def on_come(self, places: Ids, slots: Ids, digests: bytes, owners: OwnerNumbers) -> None:
        """Take in that these blocks are leased, in these slots; those that were released meanwhile are left out."""
        is_wanted = self._is_open[places]
        for place, number in zip(places[is_wanted].tolist(), np.flatnonzero(is_wanted).tolist(), strict=True):
            digest = digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            self._digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES] = digest
        come = places[is_wanted]
        self.slots[come] = slots[is_wanted]
        self._owners[come] = owners[is_wanted]
        self._is_open[come] = False
        for place in come.tolist():
            if self.slots[place] != ABSENT:  # else the one before has had it released
                self._on_fetched(self, place, None)

    def on_failed(self, place: int, reason: Reason) -> None:
        """Take in that a block will never come."""
        if self._is_open[place]:
            self._is_open[place] = False
            self.failures[place] = reason
            self._on_fetched(self, place, reason)

    def fail(self, reason: Reason) -> None:
        """Give up every block that has not come."""
        for place in np.flatnonzero(self._is_open).tolist():
            self.on_failed(place, reason)

    def waiting_places(self) -> Ids:
        """Places of the blocks that have not come."""
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
