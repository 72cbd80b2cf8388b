"""DiskReads: blocks on their way from disk into host memory, verified as they come."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Protocol

from kvtier.store.record import Fault
from kvtier.tiers.lower.breaker import HUNG_S, Attempt
from kvtier.tiers.lower.clean_ahead import CleanAhead
from kvtier.tiers.lower.copies import blocks_in_batch
from kvtier.tiers.lower.disk_tier import DiskTier
from kvtier.tiers.lower.lower_index import LowerIndex
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.eviction import EvictionCause
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.naming.tenant import Origin
from kvtier.tiers.naming.tier import Reason
from kvtier.transfer.host_memory import HostMemory
from kvtier.transfer.lane import LaneClosed, Transfer
from kvtier.transfer.transfer_engine import Route, TransferEngine

REASONS = {  # any other fault: corrupt
    Fault.MISSING: Reason.EVICTED_FROM_DISK,
    Fault.IO_ERROR: Reason.FAILED,
    Fault.KEY: Reason.FAILED,
}
BATCH_BYTES = 4 << 20  # for each copier: small enough that reading, verifying and uploading overlap
BATCH_BLOCKS = 32  # at most, so that taking in what became of them is short


def read_blocks(
    disk: DiskTier, memory: HostMemory, keys: Sequence[bytes], host_slots: Sequence[int]
) -> list[bytes | Fault]:
    """Fill the host slots from disk, verified: a reader's work. Each block's digest or fault."""
    return disk.read(keys, [memory.host_block(slot) for slot in host_slots])


@dataclass(eq=False, slots=True)
class DiskRead:
    """One block on its way from disk into host memory. It leases *host_slot* until its *waiters* have been told."""

    group_id: int
    name: BlockName
    origin: Origin
    waiters: dict["Waiter", int] = field(default_factory=dict)  # and the block's place in what each waits for
    host_slot: int | None = None  # leased, once it is being read
    digest: bytes = b""  # of the bytes that landed


class Waiter(Protocol):
    """A fetch that waits for blocks to be read."""

    def on_landed(self, place: int, disk_read: DiskRead, failure: Reason | None) -> None:
        """Take in that the block at that place has landed (*failure* is None), or why it never will."""


@dataclass(frozen=True, eq=False, slots=True)
class Read:
    """A batch of blocks that a reader is reading."""

    batch: tuple[DiskRead, ...]
    attempt: Attempt
    submitted_at: float
    is_for_later: bool


class DiskReads:
    """The blocks that fetches wait for, read from disk in batches: those wanted now before those that may come later.

    A block is read once, however many fetches wait for it. What finds the lane full waits here, in order.

    No fetch waits for a read that hangs, and its blocks count as not on disk; if it comes back after all they are in
    host memory. Until then it leases its slots. Owned by the tiers' thread.
    """

    def __init__(
        self,
        index: LowerIndex,
        memories: Sequence[HostMemory],
        transfers: TransferEngine,
        windows: Sequence[CleanAhead],
        is_host_cleaned: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        """*windows*: how far to look for host slots that lose nothing, by group. *is_host_cleaned*: whether copies to
        disk are under way that will leave slots to read into."""
        self._index = index
        self._memories = memories
        self._transfers = transfers
        self._windows = windows
        self._is_host_cleaned = is_host_cleaned
        self._clock = clock
        self._under_way: list[dict[BlockName, DiskRead]] = [{} for _ in memories]
        # In order, and left anywhere at once: a queue of thousands is left by thousands.
        self._wanted_now: OrderedDict[DiskRead, None] = OrderedDict()
        self._wanted_later: OrderedDict[DiskRead, None] = OrderedDict()
        self._num_wanted_now = [0 for _ in memories]
        self._reading: list[Read] = []
        self._hanging: list[Read] = []  # no fetch waits for these any more

    def join(
        self, group_id: int, blocks: NamedBlocks, places: Iterable[int], waiter: Waiter, now: bool
    ) -> dict[int, DiskRead]:
        """Queue the blocks at *places* to be read, and have *waiter* told of each; the reads, by place.

        *now*: before all that may come later.
        """
        under_way, disk_reads = self._under_way[group_id], {}
        for place in places:
            name = blocks.names[place]
            disk_read = under_way.get(name)
            if disk_read is None:
                under_way[name] = disk_read = DiskRead(group_id, name, blocks.origin(place))
                self._put(disk_read, now)
            elif now and disk_read in self._wanted_later:
                del self._wanted_later[disk_read]
                self._put(disk_read, now)
            disk_read.waiters[waiter] = place
            disk_reads[place] = disk_read
        return disk_reads

    def leave(self, disk_read: DiskRead, waiter: Waiter) -> None:
        """Let *waiter* wait for the read no longer.

        A read that no fetch waits for is not begun; one that has begun lands in host memory nevertheless.
        """
        disk_read.waiters.pop(waiter, None)
        for queue in (self._wanted_now, self._wanted_later):
            if not disk_read.waiters and disk_read in queue:
                del queue[disk_read], self._under_way[disk_read.group_id][disk_read.name]
                self._num_wanted_now[disk_read.group_id] -= queue is self._wanted_now

    def pump(self) -> None:
        """Hand queued blocks to readers that are free.

        Those that may come later only where nothing else is to be read, and in one batch at a time.
        """
        if not self._reading and not self._wanted_now and not self._wanted_later:
            return
        late = any(read.is_for_later and self._clock() - read.submitted_at > HUNG_S for read in self._reading)
        if late and not self._transfers.has_finished:
            self.time_out()  # no promotion waits for it, so no deadline of one ends it
        while self._wanted_now and self._submit(self._wanted_now):
            pass
        if self._wanted_later and not self._wanted_now and not any(read.is_for_later for read in self._reading):
            self._submit(self._wanted_later)

    @property
    def queued_bytes(self) -> int:
        """Bytes of the blocks wanted now that wait for a reader."""
        return sum(m.block_bytes * num for m, num in zip(self._memories, self._num_wanted_now, strict=True))

    def time_out(self) -> None:
        """Count all reads under way as hung, and end all that waits for the disk: a request's deadline has passed.

        Otherwise every request to come would wait as long. While outcomes wait to be taken in the disk is not blamed:
        these reads may be among them, and their owner was away.
        """
        hung, self._reading = self._reading, []
        self._hanging += hung
        for read in hung:
            if not self._transfers.has_finished:
                self._index.disk.reading.on_hung(read.attempt)
            for disk_read in read.batch:
                self._index.remove_from_disk_index(disk_read.group_id, disk_read.name, EvictionCause.UNREADABLE)
                self._end(disk_read, Reason.DEADLINE)
        if hung:
            self._give_up()

    def time_out_late(self, timeout_s: float) -> None:
        """As `time_out`, if a read has been under way for *timeout_s*; also one that no fetch waits for any more."""
        is_late = bool(self._reading) and self._clock() - self._reading[0].submitted_at >= timeout_s
        if is_late and not self._transfers.has_finished:
            self.time_out()

    def num_leases(self, group_id: int) -> int:
        """Host slots of the group that are being read into."""
        return sum(
            disk_read.group_id == group_id for read in (*self._reading, *self._hanging) for disk_read in read.batch
        )

    def check(self) -> None:
        """Raise AssertionError if a block under way is neither queued nor being read, or no fetch waits for it."""
        reading = [disk_read for read in self._reading for disk_read in read.batch]
        queued = [*self._wanted_now, *self._wanted_later]
        under_way = [disk_read for disk_reads in self._under_way for disk_read in disk_reads.values()]
        assert set(under_way) == {*reading, *queued}, "the books of what is being read disagree"
        assert len(under_way) == len(reading) + len(queued), "a block is under way twice"
        assert all(disk_read.waiters and disk_read.host_slot is None for disk_read in queued), (
            "a block is queued that no fetch waits for"
        )
        num_now = [sum(disk_read.group_id == i for disk_read in self._wanted_now) for i in range(len(self._memories))]
        assert num_now == self._num_wanted_now, "the blocks to be read now were miscounted"

    def _put(self, disk_read: DiskRead, now: bool) -> None:
        """Queue the block behind those that are wanted now, or later."""
        (self._wanted_now if now else self._wanted_later)[disk_read] = None
        self._num_wanted_now[disk_read.group_id] += now

    def _submit(self, queue: OrderedDict[DiskRead, None]) -> bool:
        """Hand the queue's first blocks of one group, up to a batch, to a reader; False if that cannot be now."""
        disk = self._index.disk
        attempt = disk.reading.begin() if disk.is_readable else None
        if attempt is None:
            self._give_up()
            return False
        group_id = next(iter(queue)).group_id
        memory, host, window = self._memories[group_id], self._index.host[group_id], self._windows[group_id].num_blocks
        most = blocks_in_batch(memory.block_bytes, memory.num_copiers, BATCH_BLOCKS, BATCH_BYTES)
        batch = list(takewhile(lambda disk_read: disk_read.group_id == group_id, islice(queue, most)))
        slots = host.take_clean(len(batch), window)
        # No spill will make room.
        if not slots and queue is self._wanted_now and not self._is_host_cleaned():
            slots = host.take(min(len(batch), host.pool.num_free), window) or []
        read = Read(tuple(batch[: len(slots)]), attempt, self._clock(), queue is self._wanted_later)
        keys = [disk.key(group_id, disk_read.name) for disk_read in read.batch]
        if not keys or not self._transfers.submit(
            Route.DISK_TO_HOST,
            lambda: read_blocks(disk, memory, keys, slots),
            len(keys) * memory.block_bytes,
            lambda transfer: self._on_read(read, transfer),
            len(keys),
        ):
            disk.reading.withdraw(attempt)
            host.pool.release(slots)
            return False
        for disk_read, slot in zip(read.batch, slots, strict=True):
            del queue[disk_read]
            disk_read.host_slot = slot
        self._num_wanted_now[group_id] -= 0 if read.is_for_later else len(read.batch)
        self._reading.append(read)
        return True

    def _give_up(self) -> None:
        """Fail all that is queued, since the disk is to be left alone."""
        queued = [*self._wanted_now, *self._wanted_later]
        self._wanted_now.clear()
        self._wanted_later.clear()
        self._num_wanted_now = [0 for _ in self._memories]
        for disk_read in queued:
            self._end(disk_read, Reason.FAILED)

    def _on_read(self, read: Read, transfer: Transfer) -> None:
        disk = self._index.disk
        outcomes = transfer.result if transfer.error is None else [Fault.IO_ERROR] * len(read.batch)
        is_late = read in self._hanging
        (self._hanging if is_late else self._reading).remove(read)
        if isinstance(transfer.error, LaneClosed):
            disk.reading.withdraw(read.attempt)
        elif Fault.IO_ERROR in outcomes:
            disk.reading.on_failed(read.attempt)
        else:
            disk.reading.on_succeeded(read.attempt)
        good = [
            (disk_read, outcome)
            for disk_read, outcome in zip(read.batch, outcomes, strict=True)
            if not isinstance(outcome, Fault)
        ]
        self._add_to_host(good, is_late)
        for disk_read, outcome in zip(read.batch, outcomes, strict=True):
            if isinstance(outcome, Fault) and not is_late:
                self._index.on_read_failed(disk_read.group_id, disk_read.name, outcome)
            if not is_late:
                self._end(disk_read, REASONS.get(outcome, Reason.CORRUPT) if isinstance(outcome, Fault) else None)
        slots = [disk_read.host_slot for disk_read in read.batch if disk_read.host_slot is not None]
        self._index.host[read.batch[0].group_id].pool.release(slots)
        for tenant in {disk_read.origin.tenant for disk_read in read.batch}:  # host memory has become fuller
            self._index.quotas.enforce(read.batch[0].group_id, tenant)

    def _add_to_host(self, landed: Sequence[tuple[DiskRead, bytes]], is_late: bool) -> None:
        """Make blocks of a batch findable that are in their host slots, with these digests."""
        if not landed:
            return
        disk_reads, digests = [disk_read for disk_read, _ in landed], [digest for _, digest in landed]
        for disk_read, digest in landed:
            disk_read.digest = digest
        group_id = disk_reads[0].group_id
        slots = [disk_read.host_slot for disk_read in disk_reads if disk_read.host_slot is not None]
        names, origin = [disk_read.name for disk_read in disk_reads], [disk_read.origin for disk_read in disk_reads]
        new = self._index.add_to_host(group_id, slots, names, digests, origin)
        if is_late:  # they do not count as being on disk
            self._index.offer_to_disk(group_id, new)

    def _end(self, disk_read: DiskRead, failure: Reason | None) -> None:
        """Take the block off what is under way, and tell the fetches that wait for it."""
        del self._under_way[disk_read.group_id][disk_read.name]
        for waiter, place in list(disk_read.waiters.items()):
            waiter.on_landed(place, disk_read, failure)
