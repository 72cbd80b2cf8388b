"""Shares: limits on how much host memory each client may lease at once."""

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

TIMES_FREE = 7  # a client may lease this many times as many bytes as are free


@dataclass(frozen=True, slots=True)
class Wanted:
    """Chunks of one group that a client wants to lease, the most important chunk first."""

    memory: SlotMemory
    places: Places  # where each chunk is; a chunk that is in no slot needs a new slot
    names: Sequence[BlockName] = ()  # of the chunks; needed only if they may be on disk


class LeaseCounts:
    """The number of leases on each slot, and the total bytes of the leased slots, which cannot be evicted."""

    def __init__(self) -> None:
        self.num_bytes = 0
        # [num_slots] for each memory. Pages of an array whose slots are never leased take no physical memory.
        self._counts: dict[SlotMemory, npt.NDArray[np.int32]] = {}

    def add(self, memory: SlotMemory, slots: Ids) -> Ids:
        """Count one more lease on each of these distinct slots. Returns the slots that had no lease before."""
        counts = self._of(memory)
        new: Ids = slots[counts[slots] == 0]
        counts[slots] += 1
        self.num_bytes += len(new) * memory.slot_bytes
        return new

    def remove(self, memory: SlotMemory, slots: Ids) -> Ids:
        """Count one lease less on each of these slots. Returns the slots that have no lease left."""
        counts = self._of(memory)
        counts[slots] -= 1
        gone: Ids = slots[counts[slots] == 0]
        self.num_bytes -= len(gone) * memory.slot_bytes
        return gone

    def are_new(self, memory: SlotMemory, places: Places) -> npt.NDArray[np.bool_]:
        """Return for each chunk whether its slot has no lease yet. *places* has the slot of each chunk, or ABSENT.

        True for a chunk without a slot, because that chunk needs a new slot.
        """
        are_new: npt.NDArray[np.bool_] = (places < 0) | (self._of(memory)[np.maximum(places, 0)] == 0)
        return are_new

    def check(self) -> None:
        """Raise AssertionError if the counted bytes do not match the leases."""
        found = sum(np.count_nonzero(counts) * memory.slot_bytes for memory, counts in self._counts.items())
        assert all((counts >= 0).all() for counts in self._counts.values()), "shares: a slot was released twice"
        assert found == self.num_bytes, f"shares: {self.num_bytes} bytes are leased, {found} are accounted for"

    def _of(self, memory: SlotMemory) -> npt.NDArray[np.int32]:
        counts = self._counts.get(memory)
        if counts is None:
            counts = self._counts[memory] = np.zeros(memory.num_host_slots, np.int32)
        return counts


class Share:
    """The leases of a client in host memory, and the chunks that are being read from disk for the client.

    Created by `Shares.of`. Code that leases slots for the client has to report each lease to this object. A chunk
    counts once per client, even if several of the client's requests use it.
    """

    def __init__(self, shares: "Shares", ledger: LeaseLedger | None = None, part: float = 1.0) -> None:
        """Create a share without leases.

        Args:
            shares: Shares of all clients.
            ledger: Record of the leases for the next sidecar process. None if the client never copies from or to the
                slots.
            part: Maximum fraction of host memory that the client may lease.
        """
        self._shares = shares
        self._ledger = ledger
        self._part = part
        self._leased = LeaseCounts()
        self.pending_bytes = 0  # bytes that are being read from disk for the client
        self._coming: Counter[tuple[SlotMemory, BlockName]] = Counter()

    @property
    def num_bytes(self) -> int:
        """Number of bytes of host memory that the client has leased or is waiting for."""
        return self._leased.num_bytes + self.pending_bytes

    def num_affordable(self, wanted: Sequence[Wanted]) -> int:
        """Return the largest n such that the client may lease the first n chunks of every group in *wanted*.

        Of a group with fewer than n chunks, the client may lease all. Chunks that it has already leased cost nothing.
        A client without leases may lease at least one chunk per group, unless the constructor's *part* limits clients.
        """
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
        """Count one more lease of the client on each of these slots."""
        new = self._leased.add(memory, slots)
        self._shares.leased.add(memory, new)
        if self._ledger is not None:
            self._ledger.lease(memory, new)

    def release(self, memory: SlotMemory, slots: Ids) -> None:
        """Count the end of one lease of the client on each of these slots."""
        gone = self._leased.remove(memory, slots)
        self._shares.leased.remove(memory, gone)
        if self._ledger is not None:
            self._ledger.release(memory, gone)

    def expect(self, memory: SlotMemory, names: Iterable[BlockName]) -> None:
        """Count these chunks, which are being read from disk for the client."""
        for name in names:
            self._coming[memory, name] += 1
            if self._coming[memory, name] == 1:
                self._count_coming(memory.slot_bytes)

    def remove_pending(self, memory: SlotMemory, names: Iterable[BlockName]) -> None:
        """Stop counting these chunks as being read: they have arrived, have failed, or are no longer wanted."""
        for name in names:
            self._coming[memory, name] -= 1
            if not self._coming[memory, name]:
                del self._coming[memory, name]
                self._count_coming(-memory.slot_bytes)

    def check(self) -> None:
        """Raise AssertionError if the counted bytes do not match the leases and the pending reads."""
        self._leased.check()
        coming = sum(memory.slot_bytes for memory, _ in self._coming)
        assert coming == self.pending_bytes, "shares: the bytes being read from disk are miscounted"

    def _are_new(self, wanted: Wanted) -> npt.NDArray[np.bool_]:
        are_new = self._leased.are_new(wanted.memory, wanted.places)
        if self._coming:
            for place in np.flatnonzero(are_cold(wanted.places)).tolist():
                are_new[place] = (wanted.memory, wanted.names[place]) not in self._coming
        return are_new

    def _count_coming(self, num_bytes: int) -> None:
        self.pending_bytes += num_bytes
        self._shares.pending_bytes += num_bytes


class Shares:
    """The division of host memory among the sidecar's clients, which limits what each client may lease.

    A client may lease up to `TIMES_FREE` times as many bytes as are free at that moment. So a single client may lease
    7/8 of host memory. If n clients want as much as possible, each gets about 1/n. Some memory always stays free for
    the next client.

    No lease is ended to make room for a new client. A client above its limit gets nothing more until enough of its
    leases have ended. A client without leases takes nothing from the others. That matters because an engine has several
    clients that lease in turns: a connection for its scheduler, and one for each worker.

    The algorithm is "dynamic thresholds", by which the ports of a network switch share a buffer (Choudhury and Hahne,
    IEEE/ACM Transactions on Networking 6, 1998). Owned by the sidecar's thread.
    """

    def __init__(self, total: Callable[[], int], ledger: LeaseLedger) -> None:
        """Create the division of host memory, at first without clients and leases.

        *total* returns the current size of host memory in bytes. *ledger* records the leases for the next sidecar
        process.
        """
        self.leased = LeaseCounts()
        self.pending_bytes = 0  # a chunk that several clients wait for counts once for each
        self._total = total
        self._ledger = ledger
        self._of: WeakKeyDictionary[object, Share] = WeakKeyDictionary()

    @property
    def total_bytes(self) -> int:
        """Number of bytes of host memory."""
        return self._total()

    @property
    def num_free_bytes(self) -> int:
        """Number of bytes of host memory that no client has leased or is waiting for."""
        return self._total() - self.leased.num_bytes - self.pending_bytes

    def of(self, client: object) -> Share:
        """Return the share of *client*, always the same object. *client* is any object that is compared by identity."""
        share = self._of.get(client)
        if share is None:
            share = self._of[client] = Share(self, self._ledger)
        return share

    def check(self) -> None:
        """Raise AssertionError if the counted bytes do not match the leases and the pending reads."""
        self.leased.check()
        for share in self._of.values():
            share.check()
