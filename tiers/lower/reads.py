"""Reads of blocks from a colder tier (disk or remote) into host memory, with verification."""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Protocol

from kvtier.store.record import Fault
from kvtier.tiers.device.cleared_blocks import Leftovers
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.lower.breaker import HUNG_S, Attempt, CircuitBreaker
from kvtier.tiers.lower.copies import CleanAhead, blocks_in_batch
from kvtier.tiers.lower.disk_tier import DiskContent
from kvtier.tiers.lower.lower_index import LowerIndex
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.named_blocks import NamedBlocks, Origin
from kvtier.tiers.naming.tier import EvictionCause, Reason, Tier
from kvtier.transfer.block_memory import HostMemory
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

BATCH_BYTES = 4 << 20  # bytes per batch and copier: small enough that reading, verifying and uploading overlap
BATCH_BLOCKS = 32  # maximum number of blocks per batch, so that processing its outcome is short
Block = tuple[int, BlockName]  # group and name


class Readable(Protocol):
    """A tier from which blocks can be read.

    Copy threads call only `read`. The tiers' thread calls everything else.
    """

    @property
    def route(self) -> Route:
        """Transfer route from this tier to host memory."""

    @property
    def reading(self) -> CircuitBreaker:
        """Circuit breaker of the tier's reads. While it is closed, the tier is believed to be readable."""

    def key(self, group_id: int, name: BlockName) -> bytes:
        """Return the key under which this tier stores the block."""

    def read(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> list[bytes | Fault]:
        """Read the block of each key into the memory at the same index of *blocks*, and verify it.

        Returns for each key the block's digest, or the fault if the block could not be read.
        """

    def find_any(self, besides: Container[tuple[int, BlockName]]) -> tuple[int, BlockName] | None:
        """Return group and name of any block that the tier should have, except *besides*; None if none is found."""

    def on_failed(self, group_id: int, name: BlockName, fault: Fault) -> None:
        """Handle a read of the block that failed with *fault*."""


class ReadSource(Readable, Protocol):
    """A tier from which `Reads` reads blocks into host memory. The tier is told how the reads end."""

    @property
    def tier(self) -> Tier:
        """Which tier this is."""

    def on_hung(self, group_id: int, name: BlockName) -> None:
        """Handle a block whose read has been declared hung."""

    def on_come(self, group_id: int, slots: Sequence[int], is_late: bool) -> None:
        """Handle blocks that were read into these host slots and were not in host memory before.

        *is_late* says whether their read had been declared hung.
        """


class ReadableDisk:
    """The disk as a tier from which blocks can be read; implements `Readable`."""

    route = Route.DISK_TO_HOST

    def __init__(self, content: DiskContent) -> None:
        self.reading = content.disk.reading
        self.key = content.disk.key
        self.read = content.disk.read
        self.find_any = content.disk.index.find_any
        self.on_failed = content.on_read_failed


class DiskSource(ReadableDisk):
    """The disk as a source of blocks for host memory; implements `ReadSource`."""

    tier = Tier.DISK

    def __init__(self, index: LowerIndex) -> None:
        super().__init__(index)
        self._index = index

    def on_hung(self, group_id: int, name: BlockName) -> None:
        self._index.remove_from_disk_index(group_id, name, EvictionCause.UNREADABLE)

    def on_come(self, group_id: int, slots: Sequence[int], is_late: bool) -> None:
        if is_late:  # the disk's index has dropped the blocks, because their read was declared hung
            self._index.offer_to_disk(group_id, slots)


def why_failed(tier: Tier, fault: Fault) -> Reason:
    """Return why a block's tokens must be recomputed after its read from *tier* failed with *fault*."""
    match fault:
        case Fault.MISSING:
            return Reason.evicted_from(tier)
        case Fault.IO_ERROR | Fault.KEY:
            return Reason.FAILED
        case _:
            return Reason.CORRUPT


@dataclass(eq=False, slots=True)
class BlockRead:
    """The read of a block into host memory. It leases *host_slot* until its *waiters* have been notified."""

    group_id: int
    name: BlockName
    origin: Origin
    tier: Tier  # the tier it is read from
    waiters: dict["Waiter", int] = field(default_factory=dict)  # fetches that wait, with the block's index in each
    host_slot: int | None = None  # None until the read is submitted to its lane
    digest: bytes = b""  # of the bytes that were read


class Waiter(Protocol):
    """A fetch that waits for blocks to be read."""

    def on_read(self, place: int, block_read: BlockRead, failure: Reason | None) -> None:
        """Handle the end of the read of one of this fetch's blocks.

        *place* is the block's index in the fetch. *failure* is None if the block is in host memory now.
        """


@dataclass(frozen=True, eq=False, slots=True)
class ReadBatch:
    """A batch of blocks whose read is in flight."""

    batch: tuple[BlockRead, ...]
    attempt: Attempt
    submitted_at: float
    is_for_later: bool  # whether the batch is a prefetch


class Reads:
    """The queue of reads from one tier into host memory. Blocks that requests need now are read before prefetches.

    A block is read once, no matter how many fetches wait for it. Reads are submitted in batches to the tier's lane
    (copy queue). While the lane is full, they stay queued here, in order.

    When a read is declared hung, fetches stop waiting for it, and its blocks count as absent from the tier. The read
    keeps its slots leased until it ends. If it succeeds after all, its blocks are added to host memory. Owned by the
    tiers' thread.
    """

    def __init__(
        self,
        index: LowerIndex,
        source: ReadSource,
        memories: Sequence[HostMemory],
        transfers: TransferEngine,
        windows: Sequence[CleanAhead],
        is_host_cleaned: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        """Create an empty queue of reads.

        *windows* says for each attention group how far to search the eviction order for clean host slots to read into.
        A slot is clean if its block need not be copied to disk first. *is_host_cleaned* returns whether copies to disk
        are in flight that will make more slots clean.
        """
        self._index = index
        self._source = source
        self._memories = memories
        self._transfers = transfers
        self._windows = windows
        self._is_host_cleaned = is_host_cleaned
        self._clock = clock
        self._under_way: list[dict[BlockName, BlockRead]] = [{} for _ in memories]  # queued or in flight, by group
        # The queues. Any read can be removed in constant time, because a request may cancel thousands of reads at once.
        self._wanted_now: OrderedDict[BlockRead, None] = OrderedDict()
        self._wanted_later: OrderedDict[BlockRead, None] = OrderedDict()
        self._num_wanted_now = [0 for _ in memories]  # by group
        self._dropped = Leftovers()  # queues that `clear` has dropped, whose memory is still to be freed
        self._reading: list[ReadBatch] = []  # in flight, and not declared hung
        self._hanging: list[ReadBatch] = []  # in flight, but declared hung, so that no fetch waits for them any more

    def join(
        self, group_id: int, blocks: NamedBlocks, places: Iterable[int], waiter: Waiter, now: bool
    ) -> dict[int, BlockRead]:
        """Queue reads of the blocks with the indices *places*, and return the read of each index.

        *waiter* is notified when each read ends. If *now*, the reads are queued ahead of all prefetches.
        """
        under_way, block_reads = self._under_way[group_id], {}
        for place in places:
            name = blocks.names[place]
            block_read = under_way.get(name)
            is_new = block_read is None
            if block_read is None:
                origin = Origin(blocks.parents[place], blocks.tenant)
                under_way[name] = block_read = BlockRead(group_id, name, origin, self._source.tier)
            if now and (is_new or block_read in self._wanted_later):
                self._wanted_later.pop(block_read, None)
                self._wanted_now[block_read] = None
                self._num_wanted_now[group_id] += 1
            elif is_new:
                self._wanted_later[block_read] = None
            block_read.waiters[waiter] = place
            block_reads[place] = block_read
        return block_reads

    def leave(self, block_read: BlockRead, waiter: Waiter) -> None:
        """Remove *waiter* from the fetches that wait for the read.

        If no other fetch waits for it, a queued read is dropped. A read in flight continues, and its block is added to
        host memory.
        """
        block_read.waiters.pop(waiter, None)
        for queue in (self._wanted_now, self._wanted_later):
            if not block_read.waiters and block_read in queue:
                del queue[block_read], self._under_way[block_read.group_id][block_read.name]
                self._num_wanted_now[block_read.group_id] -= queue is self._wanted_now

    def clear(self) -> None:
        """Drop all queued reads in one short step, without notifying the fetches. No read may be in flight."""
        self._dropped.add(self._wanted_now)
        self._dropped.add(self._wanted_later)
        for under_way in self._under_way:
            self._dropped.add(under_way)
        self._wanted_now, self._wanted_later = OrderedDict(), OrderedDict()
        self._under_way = [{} for _ in self._memories]
        self._num_wanted_now = [0 for _ in self._memories]

    def pump(self) -> None:
        """Submit queued reads to the tier's lane (copy queue) until the lane is full.

        Prefetches are submitted one batch at a time, and only while no other read is queued.
        """
        self._dropped.free_some()
        if not self._reading and not self._wanted_now and not self._wanted_later:
            return
        late = any(read.is_for_later and self._clock() - read.submitted_at > HUNG_S for read in self._reading)
        if late and not self._transfers.has_undelivered:
            self.time_out()  # no request waits for a prefetch, so no request's deadline ends it
        while self._wanted_now and self._submit(self._wanted_now):
            pass
        if self._wanted_later and not self._wanted_now and not any(read.is_for_later for read in self._reading):
            self._submit(self._wanted_later)

    @property
    def queued_bytes(self) -> int:
        """Bytes of the blocks that are still queued to be read, without prefetches."""
        return sum(m.block_bytes * num for m, num in zip(self._memories, self._num_wanted_now, strict=True))

    def time_out(self) -> None:
        """Declare all reads in flight hung, because a request's deadline has passed. Queued reads then fail too.

        Otherwise every later request would wait just as long. The hung reads are reported to the tier's circuit
        breaker. Exception: while finished transfers wait to be processed, nothing is reported, because these reads
        may have ended in time.
        """
        hung, self._reading = self._reading, []
        self._hanging += hung
        for read in hung:
            if not self._transfers.has_undelivered:
                self._source.reading.on_hung(read.attempt)
            for block_read in read.batch:
                self._source.on_hung(block_read.group_id, block_read.name)
                self._end(block_read, Reason.DEADLINE)
        if hung:
            self._give_up()

    def time_out_late(self, timeout_s: float) -> None:
        """Call `time_out` if a read has been in flight for *timeout_s*, even if no fetch waits for the read."""
        is_late = bool(self._reading) and self._clock() - self._reading[0].submitted_at >= timeout_s
        if is_late and not self._transfers.has_undelivered:
            self.time_out()

    def num_leases(self, group_id: int) -> int:
        """Return how many host slots of the group are being read into."""
        return sum(
            block_read.group_id == group_id for read in (*self._reading, *self._hanging) for block_read in read.batch
        )

    def check(self) -> None:
        """Raise AssertionError if the records of reads disagree, or if a read is queued that no fetch waits for."""
        reading = [block_read for read in self._reading for block_read in read.batch]
        queued = [*self._wanted_now, *self._wanted_later]
        under_way = [block_read for block_reads in self._under_way for block_read in block_reads.values()]
        assert set(under_way) == {*reading, *queued}, "the reads by name differ from those queued and in flight"
        assert len(under_way) == len(reading) + len(queued), "a block is being read twice"
        assert all(block_read.waiters and block_read.host_slot is None for block_read in queued), (
            "a read is queued that no fetch waits for"
        )
        num_now = [sum(block_read.group_id == i for block_read in self._wanted_now) for i in range(len(self._memories))]
        assert num_now == self._num_wanted_now, "the count of queued reads that are wanted now is wrong"

    def _submit(self, queue: OrderedDict[BlockRead, None]) -> bool:
        """Submit one batch from the front of the queue, with blocks of one attention group.

        Returns False if no block can be submitted now.
        """
        source = self._source
        attempt = source.reading.begin() if source.reading.is_closed else None
        if attempt is None:
            self._give_up()
            return False
        group_id = next(iter(queue)).group_id
        memory, host, window = self._memories[group_id], self._index.host[group_id], self._windows[group_id].num_blocks
        limit = blocks_in_batch(memory.block_bytes, memory.num_copiers, BATCH_BLOCKS, BATCH_BYTES)
        batch = list(takewhile(lambda block_read: block_read.group_id == group_id, islice(queue, limit)))
        slots = host.take_clean(len(batch), window)
        # While no copy to disk is in flight, no slot becomes clean. Then a block wanted now may evict a dirty block.
        if not slots and queue is self._wanted_now and not self._is_host_cleaned():
            slots = list(host.take(min(len(batch), host.pool.num_free), window) or ())
        read = ReadBatch(tuple(batch[: len(slots)]), attempt, self._clock(), queue is self._wanted_later)
        keys = [source.key(group_id, block_read.name) for block_read in read.batch]
        if not keys or not self._transfers.submit(
            source.route,
            lambda: source.read(keys, [memory.host_block(slot) for slot in slots]),
            len(keys) * memory.block_bytes,
            lambda transfer: self._on_read(read, transfer),
            len(keys),
        ):
            source.reading.withdraw(attempt)
            host.pool.release(slots)
            return False
        for block_read, slot in zip(read.batch, slots, strict=True):
            del queue[block_read]
            block_read.host_slot = slot
        self._num_wanted_now[group_id] -= 0 if read.is_for_later else len(read.batch)
        self._reading.append(read)
        return True

    def _give_up(self) -> None:
        """Fail all queued reads, because the tier is suspended."""
        queued = [*self._wanted_now, *self._wanted_later]
        self._wanted_now.clear()
        self._wanted_later.clear()
        self._num_wanted_now = [0 for _ in self._memories]
        for block_read in queued:
            self._end(block_read, Reason.FAILED)

    def _on_read(self, read: ReadBatch, transfer: Transfer) -> None:
        """Publish the blocks of a finished read in host memory, and report each block's outcome to its fetches."""
        source = self._source
        outcomes = transfer.result if transfer.error is None else [Fault.IO_ERROR] * len(read.batch)
        is_late = read in self._hanging
        (self._hanging if is_late else self._reading).remove(read)
        if isinstance(transfer.error, LaneClosed):
            source.reading.withdraw(read.attempt)
        elif Fault.IO_ERROR in outcomes:
            source.reading.on_failed(read.attempt)
        else:
            source.reading.on_succeeded(read.attempt)
        good = [
            (block_read, outcome)
            for block_read, outcome in zip(read.batch, outcomes, strict=True)
            if not isinstance(outcome, Fault)
        ]
        self._add_to_host(good, is_late)
        for block_read, outcome in zip(read.batch, outcomes, strict=True):
            if isinstance(outcome, Fault) and not is_late:
                source.on_failed(block_read.group_id, block_read.name, outcome)
            if not is_late:
                self._end(block_read, why_failed(source.tier, outcome) if isinstance(outcome, Fault) else None)
        slots = [block_read.host_slot for block_read in read.batch if block_read.host_slot is not None]
        self._index.host[read.batch[0].group_id].pool.release(slots)
        if self._index.quotas.has_any:
            for tenant in {block_read.origin.tenant for block_read in read.batch}:  # each may be over its quota now
                self._index.quotas.enforce(read.batch[0].group_id, tenant)

    def _add_to_host(self, landed: Sequence[tuple[BlockRead, bytes]], is_late: bool) -> None:
        """Make blocks findable in host memory. *landed* holds each block that was read, with its digest.

        *is_late* says whether their read had been declared hung.
        """
        if not landed:
            return
        block_reads, digests = [block_read for block_read, _ in landed], [digest for _, digest in landed]
        for block_read, digest in landed:
            block_read.digest = digest
        group_id = block_reads[0].group_id
        slots = [block_read.host_slot for block_read in block_reads if block_read.host_slot is not None]
        names = [block_read.name for block_read in block_reads]
        origins = [block_read.origin for block_read in block_reads]
        new = self._index.add_to_host(group_id, slots, names, digests, origins)
        self._source.on_come(group_id, new, is_late)

    def _end(self, block_read: BlockRead, failure: Reason | None) -> None:
        """Notify the fetches that wait for the read. Later fetches can no longer join it."""
        del self._under_way[block_read.group_id][block_read.name]
        for waiter, place in list(block_read.waiters.items()):
            waiter.on_read(place, block_read, failure)


class ColdReads:
    """The reads from all tiers below host memory.

    A block is read from the remote tier if only the remote tier is known to hold it, otherwise from disk. Owned by the
    tiers' thread.
    """

    def __init__(self, index: LowerIndex, reads: Mapping[Tier, Reads]) -> None:
        """Combine the queues of reads from all tiers that exist."""
        self._index = index
        self._reads = reads

    def join(self, group_id: int, blocks: NamedBlocks, places: Ids, waiter: Waiter, now: bool) -> dict[int, BlockRead]:
        """Queue reads of the blocks with the indices *places*, and return the read of each index.

        *waiter* is notified when each read ends. If *now*, the reads are queued ahead of all prefetches. Blocks that no
        tier can provide are missing from the result.
        """
        joined: dict[int, BlockRead] = {}
        for tier, chosen in self._by_tier(group_id, blocks, places):
            joined |= self._reads[tier].join(group_id, blocks, chosen.tolist(), waiter, now)
        return joined

    def leave(self, block_read: BlockRead, waiter: Waiter) -> None:
        self._reads[block_read.tier].leave(block_read, waiter)

    def clear(self) -> None:
        for reads in self._reads.values():
            reads.clear()

    def pump(self) -> None:
        for reads in self._reads.values():
            reads.pump()

    def queued_bytes(self, tier: Tier) -> int:
        """Return the `Reads.queued_bytes` of a tier; 0 if there is no such tier."""
        return self._reads[tier].queued_bytes if tier in self._reads else 0

    def time_out(self, tier: Tier) -> None:
        self._reads[tier].time_out()

    def time_out_late(self, timeout_s: float) -> None:
        for reads in self._reads.values():
            reads.time_out_late(timeout_s)

    def num_leases(self, group_id: int) -> int:
        """Return how many host slots of the group are being read into."""
        return sum(reads.num_leases(group_id) for reads in self._reads.values())

    def check(self) -> None:
        for reads in self._reads.values():
            reads.check()

    def _by_tier(self, group_id: int, blocks: NamedBlocks, places: Ids) -> Iterator[tuple[Tier, Ids]]:
        """Yield each tier with the indices of the blocks that are to be read from it."""
        if Tier.REMOTE in self._reads:
            is_remote = self._index.are_remote(group_id, [blocks.names[place] for place in places.tolist()])
            if is_remote.any():
                yield Tier.REMOTE, places[is_remote]
                places = places[~is_remote]
        if len(places) and Tier.DISK in self._reads:
            yield Tier.DISK, places


class ReadProbe:
    """Test reads from a tier whose circuit breaker is open, to find out whether the tier works again.

    After a successful probe, lookups find the tier's blocks again. A probe reads one block into memory of its own. So a
    hung probe occupies a copy thread, but no host slot. A new probe does not read a block whose probe hangs. Owned by
    the tiers' thread.
    """

    def __init__(
        self,
        source: Readable,
        block_bytes: Callable[[int], int],
        transfers: TransferEngine,
        clock: Callable[[], float],
    ) -> None:
        self._source = source
        self._block_bytes = block_bytes
        self._transfers = transfers
        self._clock = clock
        self._under_way: dict[Block, tuple[Attempt, float]] = {}  # probes, with submission time

    def go_on(self) -> None:
        """Start a probe if one is due, and report hung probes to the circuit breaker."""
        source = self._source
        if source.reading.is_closed:
            return
        for earlier, since in self._under_way.values():
            if self._clock() - since > HUNG_S and not self._transfers.has_undelivered:
                source.reading.on_hung(earlier)
        block = source.find_any(besides=self._under_way) if source.reading.allows() else None
        attempt = None if block is None else source.reading.begin()
        if block is None or attempt is None:
            return
        key, memory = source.key(*block), memoryview(bytearray(self._block_bytes(block[0])))
        self._under_way[block] = attempt, self._clock()
        if not self._transfers.submit(
            source.route,
            lambda: source.read([key], [memory]),
            0,  # bytes: a probe must not count in the tier's measured speed
            lambda transfer: self._on_probed(block, transfer),
        ):
            del self._under_way[block]
            source.reading.withdraw(attempt)

    def _on_probed(self, block: Block, transfer: Transfer) -> None:
        source = self._source
        attempt, _ = self._under_way.pop(block)
        (outcome,) = transfer.result if transfer.error is None else [Fault.IO_ERROR]
        if isinstance(transfer.error, LaneClosed):
            source.reading.withdraw(attempt)
        elif outcome is Fault.IO_ERROR:
            source.reading.on_failed(attempt)
        else:
            source.reading.on_succeeded(attempt)
        if isinstance(outcome, Fault) and not isinstance(transfer.error, LaneClosed):
            source.on_failed(*block, outcome)
