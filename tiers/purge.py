"""CachePurge: an eviction from all tiers of a cache, requested by an operator."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from kvtier.tiers.device.slot_purge import SlotPurge
from kvtier.tiers.lower.local_purge import purged
from kvtier.tiers.lower.purge import Purge, Purged, PurgeOrder
from kvtier.tiers.naming.tier import Tier

PARTS_S = 0.001  # time limit of a call, so that an engine step that waits for the call is not noticeably longer
REST_S = 0.02  # pause between two passes, for copies in flight
GIVE_UP_S = 10.0  # time limit of a purge, after which blocks that are computed or copied again and again stay


class CachePurge:
    """An operator's purge, which evicts blocks from the device and then from the lower tiers, some at a time.

    Leased blocks are not evicted. A copy in flight can bring a block to a tier that was already purged. So if the
    operator set no limit on bytes or blocks, the purge is repeated until no further block is found. The tiers' thread
    owns this object, and calls `go_on` between its other work. No call blocks.
    """

    def __init__(
        self,
        order: PurgeOrder,
        device: Sequence[SlotPurge],
        block_bytes: Sequence[int],
        below: Sequence[Purge],
        clock: Callable[[], float],
    ) -> None:
        """Prepare to purge *device* and then the lower tiers, *below*.

        *device* and *block_bytes* have one entry for each attention group. *device* is empty if the device is not
        purged.
        """
        self._order = order
        self._device = device
        self._block_bytes = block_bytes
        self._below = below
        self._looked_through: Sequence[SlotPurge | Purge] = (*device, *below)
        self._clock = clock
        self._parts = self._looks()
        self.is_done = False

    def go_on(self) -> bool:
        """Continue for about a millisecond, or until the purge must wait for copies; return whether it is done."""
        until = self._clock() + PARTS_S
        while not self.is_done:
            part = next(self._parts, None)
            self.is_done = part is None
            if not part or self._clock() >= until:
                break
        return self.is_done

    def outcome(self) -> dict[Tier, Purged]:
        """Return for each tier what was evicted so far, and what is leased there and so cannot be evicted."""
        found = {Tier.DEVICE: purged(self._device, self._block_bytes)} if self._device else {}
        for each in self._below:
            found = _together(found, each.outcome())
        return found

    @property
    def _num_evicted(self) -> int:
        return sum(each.num_evicted for each in self._looked_through)

    @property
    def _is_settled(self) -> bool:
        return all(each.is_settled for each in self._looked_through)

    def _looks(self) -> Iterator[bool]:
        give_up_at, num_before = self._clock() + GIVE_UP_S, -1
        while num_before != self._num_evicted or not self._is_settled:
            num_before = self._num_evicted
            for each in self._looked_through:
                yield from each.parts()
            if self._order.is_bounded or self._clock() >= give_up_at:
                return
            rest_until = self._clock() + REST_S
            while self._clock() < rest_until:
                yield False


def _together(one: Mapping[Tier, Purged], other: Mapping[Tier, Purged]) -> dict[Tier, Purged]:
    tiers = [tier for tier in Tier if tier in one or tier in other]
    return {tier: one.get(tier, Purged()).plus(other.get(tier, Purged())) for tier in tiers}
