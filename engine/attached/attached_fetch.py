"""An engine's requests for blocks in a sidecar's host memory."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.engine.attached.wire import (
    Fetch,
    Fetched,
    FromEngine,
    Malformed,
    Release,
    TimeOut,
    digests_in,
    joined,
    numbers_in,
    owners_in,
    packed,
    starts_of,
)
from kvtier.store.record import DIGEST_BYTES
from kvtier.tiers.device.slot_ids import ABSENT, Ids
from kvtier.tiers.lower.lower_tiers import OnFetched, Places, ReadPriority
from kvtier.tiers.naming.named_blocks import NamedBlocks, OwnerNumbers, tenant_with
from kvtier.tiers.naming.tier import Reason


class AttachedFetch:
    """A request for blocks in a sidecar's host memory, and the leases on them; implements `lower_tiers.Fetch`.

    The sidecar reads the blocks from colder tiers if necessary. A block has arrived when the sidecar has answered that
    the block is leased. A *place* is the index of a block in the fetch. Owned by the engine's thread.
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

        *on_released* is called with the indices of released blocks in this fetch, so that the sidecar can end their
        leases or reads.
        *on_late* is called when the caller gives up waiting for the blocks that have not arrived.
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
        """True if any block is still expected. A block is expected until it arrives, fails or is released."""
        return bool(self._is_open.any())

    @property
    def num_leased(self) -> int:
        """Number of blocks that are leased now."""
        return int(np.count_nonzero(self.slots != ABSENT))

    @property
    def is_over(self) -> bool:
        """True if the fetch is finished: all its blocks have failed or been released."""
        return not self.is_waiting and not self.num_leased

    def on_come(self, places: Ids, slots: Ids, digests: bytes, owners: OwnerNumbers) -> None:
        """Record that the sidecar has leased the blocks at *places*. Ignore blocks that were released meanwhile."""
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
        """Record that the block at *place* will never arrive."""
        if self._is_open[place]:
            self._is_open[place] = False
            self.failures[place] = reason
            self._on_fetched(self, place, reason)

    def fail(self, reason: Reason) -> None:
        """Fail every block that is still expected."""
        for place in np.flatnonzero(self._is_open).tolist():
            self.on_failed(place, reason)

    def waiting_places(self) -> Ids:
        """Return the places of the blocks that are still expected."""
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


class AttachedFetches:
    """All fetches of an engine from its sidecar. Owned by the engine's thread."""

    def __init__(self, send: Callable[[FromEngine], None]) -> None:
        """Start without fetches; *send* sends a message to the sidecar."""
        self._send = send
        self._fetches: dict[int, AttachedFetch] = {}  # fetches of this session that are not over, by number
        self._left: set[AttachedFetch] = set()  # fetches of the previous session that still hold leases
        self._dead: list[AttachedFetch] = []  # fetches that were begun without a sidecar, to fail in the next poll
        self._next_number = 0

    @property
    def is_any_waiting(self) -> bool:
        """True if any fetch still expects a block."""
        return any(fetch.is_waiting for fetch in self._fetches.values())

    @property
    def has_left_over(self) -> bool:
        """True if fetches of the previous session, whose connection has ended, still hold leases."""
        return bool(self._left)

    def begin(
        self,
        group_id: int,
        blocks: NamedBlocks,
        on_fetched: OnFetched,
        priority: ReadPriority,
        is_attached: bool,
    ) -> AttachedFetch:
        """Begin a fetch, see `LowerTiers.fetch`. If *is_attached* is False, the fetch fails in the next poll."""
        number, self._next_number = self._next_number, self._next_number + 1
        fetch = AttachedFetch(number, group_id, len(blocks.names), on_fetched, self._on_released, self._on_late)
        if not is_attached:
            self._dead.append(fetch)
        elif len(blocks.names):
            self._fetches[number] = fetch
            starts = starts_of(blocks.names, blocks.parents)
            is_for_later = priority is ReadPriority.LATER
            self._send(Fetch(number, group_id, joined(blocks.names), starts, blocks.tenant, is_for_later))
        return fetch

    def on_fetched(self, message: Fetched, num_host_slots: Sequence[int]) -> None:
        """Process the sidecar's answer to a fetch. *num_host_slots* has the sidecar's host slots, by group.

        Raises:
            Malformed: If the answer is invalid.
        """
        fetch = self._fetches.get(message.number)
        if fetch is None:  # the fetch was released in the meantime, and a message to the sidecar says so
            return
        places = numbers_in(message.places, len(fetch.slots))
        slots = numbers_in(message.slots, num_host_slots[fetch.group_id])
        owners = owners_in(message.owners, len(places))
        if not all(0 <= place < len(fetch.slots) for place, _ in message.failures):
            raise Malformed("the index of a failed block is out of range for its fetch")
        if not len(places) == len(slots) == len(digests_in(message.digests, len(places))):
            raise Malformed("a fetched block has no slot or no digest")
        fetch.on_come(places, slots, message.digests, owners)
        for place, reason in message.failures:
            fetch.on_failed(place, reason)
        if fetch.is_over:
            self._fetches.pop(fetch.number, None)

    def fail_waiting(self, reason: Reason) -> None:
        """Fail all blocks that are still expected, and tell the sidecar that they are not needed any more."""
        for fetch in list(self._fetches.values()):
            if len(places := fetch.waiting_places()):
                self._send(Release(fetch.number, packed(places)))
                fetch.fail(reason)
            if fetch.is_over:
                self._fetches.pop(fetch.number, None)

    def fail_dead(self) -> None:
        """Fail the fetches that were begun while no sidecar was attached."""
        dead, self._dead = self._dead, []
        for fetch in dead:
            fetch.fail(Reason.FAILED)

    def release_all(self) -> None:
        """Release every block of every fetch of this session."""
        for fetch in list(self._fetches.values()):
            fetch.release(range(len(fetch.slots)))

    def end(self) -> list[AttachedFetch]:
        """Return the fetches of a session that has ended. The caller must fail them.

        Blocks that these fetches have leased stay leased until they are released.
        """
        fetches = list(self._fetches.values())
        self._fetches.clear()
        self._left.update(fetch for fetch in fetches if fetch.num_leased)
        return fetches

    def check(self) -> None:
        """Raise AssertionError if the table of unfinished fetches has a wrong entry."""
        for number, fetch in self._fetches.items():
            assert number == fetch.number, "a fetch is kept under another number"
            assert not fetch.is_over, "a fetch that is over is kept"

    def _on_released(self, fetch: AttachedFetch, places: Ids) -> None:
        if fetch.number in self._fetches:
            self._send(Release(fetch.number, packed(places)))
            if fetch.is_over:
                del self._fetches[fetch.number]
        elif fetch.is_over:
            self._left.discard(fetch)

    def _on_late(self, fetch: AttachedFetch) -> None:
        self._send(TimeOut(fetch.number))
