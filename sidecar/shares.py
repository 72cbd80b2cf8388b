"""Shares: how much of host memory each client may have leased at once."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kvtier.sidecar.layout import SlotMemory
from kvtier.sidecar.lease_ledger import LeaseLedger
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.lower.lower_tiers import Places, are_cold
from kvtier.tiers.naming.block_hash import BlockName

TIMES_FREE = 7


@dataclass(frozen=True, slots=True)
class Wanted:
    """Chunks of one memory that a client would have leased, in the order in which it wants them."""

    memory: SlotMemory
    places: Places  # where each is; a chunk that is in no slot needs one
    names: Sequence[BlockName] = ()  # of those chunks; only for chunks that may be on disk


class LeaseCounts:
    """How often each slot is leased, and how many bytes of the segment that keeps in their places."""

    def __init__(self) -> None:
        self.num_bytes = 0
        # [num_slots] for each memory: the pages of what is never leased are never touched.
        self._counts: dict[SlotMemory, npt.NDArray[np.int32]] = {}

    def add(self, memory: SlotMemory, slots: Ids) -> Ids:
        """Each of these slots, no two of which are equal, is leased once more; those that were not leased before."""
        counts = self._of(memory)
        new: Ids = slots[counts[slots] == 0]
        counts[slots] += 1
        self.num_bytes += len(new) * memory.slot_bytes
        return new

    def remove(self, memory: SlotMemory, slots: Ids) -> Ids:
        """Each of these slots is leased once less; those that are not leased any more."""
        counts = self._of(memory)
        counts[slots] -= 1
        gone: Ids = slots[counts[slots] == 0]
        self.num_bytes -= len(gone) * memory.slot_bytes
        return gone

    def are_new(self, memory: SlotMemory, places: Places) -> npt.NDArray[np.bool_]:
        """For each place whether it would be leased for the first time; yes for what is no slot."""
        are_new: npt.NDArray[np.bool_] = (places < 0) | (self._of(memory)[np.maximum(places, 0)] == 0)
        return are_new

    def check(self) -> None:
        """Raise AssertionError if the bytes are miscounted."""
        found = sum(np.count_nonzero(counts) * memory.slot_bytes for memory, counts in self._counts.items())
        assert all((counts >= 0).all() for counts in self._counts.values()), "shares: a slot was released twice"
        assert found == self.num_bytes, f"shares: {self.num_bytes} bytes are leased, {found} are accounted for"

    def _of(self, memory: SlotMemory) -> npt.NDArray[np.int32]:
        counts = self._counts.get(memory)
        if counts is None:
            counts = self._counts[memory] = np.zeros(memory.num_host_slots, np.int32)
        return counts


class Share:
    """What one client has leased, in chunks that it wants from disk too. A chunk counts once for a client, however many
    of its requests want it. Made by `Shares.of`; whoever leases for the client tells it so."""

    def __init__(self, shares: "Shares", ledger: LeaseLedger | None = None, part: float = 1.0) -> None:
        """It never is more than *part* of host memory. *ledger*: where its leases are noted, if its client copies."""
        self._shares = shares
        self._ledger = ledger
        self._part = part
        self._leased = LeaseCounts()
        self.num_coming_bytes = 0  # that are read from disk for it
        self._coming: Counter[tuple[SlotMemory, BlockName]] = Counter()

    @property
    def num_bytes(self) -> int:
        """Bytes of the segment that it keeps in their places, or waits for."""
        return self._leased.num_bytes + self.num_coming_bytes

    def num_affordable(self, wanted: Sequence[Wanted]) -> int:
        """How many of the first chunks the client may have leased beside what it has: in each of the memories. One that
        has fewer chunks than others has the first ones. What the client has leased already costs nothing; a client
        without anything may have one."""
        limit = max(len(each.places) for each in wanted)
        own, of_all = np.zeros((2, limit), np.int64)  # bytes that each chunk costs
        for each in wanted:
            are_new, num = self._are_new(each), len(each.places)
            own[:num] += are_new * each.memory.slot_bytes
            of_all[:num] += (are_new & self._shares.leased.are_new(each.memory, each.places)) * each.memory.slot_bytes
        of_free = TIMES_FREE * self._shares.num_free_bytes - self.num_bytes
        of_part = int(self._part * self._shares.total_bytes) - self.num_bytes
        num_chunks = min(
            int(np.searchsorted(np.cumsum(own + TIMES_FREE * of_all), max(0, of_free), "right")),
            int(np.searchsorted(np.cumsum(own), max(0, of_part), "right")),
        )
        return num_chunks if num_chunks or self.num_bytes or self._part < 1 else min(1, limit)

    def lease(self, memory: SlotMemory, slots: Ids) -> None:
        """The client has these slots leased, once more each."""
        new = self._leased.add(memory, slots)
        self._shares.leased.add(memory, new)
        if self._ledger is not None:
            self._ledger.lease(memory, new)

    def release(self, memory: SlotMemory, slots: Ids) -> None:
        """The client has these slots leased once less each."""
        gone = self._leased.remove(memory, slots)
        self._shares.leased.remove(memory, gone)
        if self._ledger is not None:
            self._ledger.release(memory, gone)

    def expect(self, memory: SlotMemory, names: Iterable[BlockName]) -> None:
        """These chunks are read from disk for the client."""
        for name in names:
            self._coming[memory, name] += 1
            if self._coming[memory, name] == 1:
                self._count_coming(memory.slot_bytes)

    def do_not_expect(self, memory: SlotMemory, names: Iterable[BlockName]) -> None:
        """They have come, or never will, or are not wanted any more."""
        for name in names:
            self._coming[memory, name] -= 1
            if not self._coming[memory, name]:
                del self._coming[memory, name]
                self._count_coming(-memory.slot_bytes)

    def check(self) -> None:
        """Raise AssertionError if the bytes are miscounted."""
        self._leased.check()
        coming = sum(memory.slot_bytes for memory, _ in self._coming)
        assert coming == self.num_coming_bytes, "shares: what comes from disk is miscounted"

    def _are_new(self, wanted: Wanted) -> npt.NDArray[np.bool_]:
        are_new = self._leased.are_new(wanted.memory, wanted.places)
        if self._coming:
            for place in np.flatnonzero(are_cold(wanted.places)).tolist():
                are_new[place] = (wanted.memory, wanted.names[place]) not in self._coming
        return are_new

    def _count_coming(self, num_bytes: int) -> None:
        self.num_coming_bytes += num_bytes
        self._shares.num_coming_bytes += num_bytes


class Shares:
    """Host memory among the clients that have something leased in it. Owned by the sidecar's thread.

    A client may have leased `TIMES_FREE` times as many bytes as no client has. So one that is alone may have 7/8 of
    host memory, and n clients that want all that they can get end with an equal part each, about an n-th; and however
    many there are, one that comes next finds room. Nothing is taken away from a client when another one comes: it gets
    nothing more until some of its leases have ended, as all of them do. Clients that lease nothing cost the others
    nothing: an engine has a connection for its scheduler and one for each worker, which lease in turns. (This is how
    switches share a buffer: dynamic thresholds, Choudhury and Hahne, IEEE/ACM Transactions on Networking 6, 1998.)
    """

    def __init__(self, total: Callable[[], int], ledger: LeaseLedger) -> None:
        """*total*: bytes of host memory that there are now. *ledger*: where clients' leases are noted."""
        self.leased = LeaseCounts()
        self.num_coming_bytes = 0  # a chunk that several clients wait for counts for each
        self._total = total
        self._ledger = ledger
        self._of: WeakKeyDictionary[object, Share] = WeakKeyDictionary()

    @property
    def total_bytes(self) -> int:
        """Bytes of host memory."""
        return self._total()

    @property
    def num_free_bytes(self) -> int:
        """Bytes of host memory that no client has leased, or waits for."""
        return self._total() - self.leased.num_bytes - self.num_coming_bytes

    def of(self, client: object) -> Share:
        """The client's share, the same one each time. *client* is anything that is equal to itself alone."""
        share = self._of.get(client)
        if share is None:
            share = self._of[client] = Share(self, self._ledger)
        return share

    def check(self) -> None:
        """Raise AssertionError if the bytes are miscounted."""
        self.leased.check()
        for share in self._of.values():
            share.check()
