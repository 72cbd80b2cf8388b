"""`StagedDisk`: a disk tier for an engine whose memory cannot be shared with the store's process."""

import mmap
import os
import queue
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from typing import IO

import numpy as np
import numpy.typing as npt

from kvtier.connectors.disk_below.disk_below import DiskBelowStatistics
from kvtier.connectors.disk_below.job import Outcomes
from kvtier.connectors.disk_below.open import open_disk_below
from kvtier.connectors.disk_below.row_index import BlockRow
from kvtier.engine.config import DiskConfig
from kvtier.store.disk_writes import DiskWrites
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.transfer.pages import back_file

SHARED_MEMORY = "/dev/shm"
PAGE_BYTES = mmap.PAGESIZE  # each row begins at a page, because direct reads go to whole pages
PART_BYTES = 16 << 20  # size of a part of the staging buffer; the disk reads or writes one part per request
NUM_PARTS = 4  # shared by all threads

Rows = npt.NDArray[np.uint8]  # [num_rows, row_bytes]
Copy = Callable[[range, Rows], None]
"""Callback that copies the blocks with the given indices out of the given rows, or into them.

It must not keep a reference to the rows, which are reused after the call.
"""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A part of the staging buffer that is being written to disk or filled from it."""

    part: int
    places: range  # indices of the part's blocks in the caller's sequence
    outcomes: Outcomes


def _memory_file(num_bytes: int) -> IO[bytes]:
    """Return a new file in memory with all of its pages allocated, so that access never raises SIGBUS.

    The file has no name and takes no space in `/dev/shm`. If the system does not allow such files, a file in `/dev/shm`
    is used instead.

    Raises:
        OSError: If there is not enough memory. The message says what to do.
    """
    try:
        file: IO[bytes] = FileIO(os.memfd_create("kvtier-rows", os.MFD_CLOEXEC), "r+")
        where, advice = "memory", "free some memory"
    except OSError:  # a sandbox forbids `memfd_create`
        file = tempfile.NamedTemporaryFile(dir=SHARED_MEMORY, prefix="kvtier-rows-", buffering=0)  # noqa: SIM115  # the caller closes it
        where, advice = SHARED_MEMORY, f"enlarge it: mount -o remount,size=1G {SHARED_MEMORY} (docker run --shm-size)"
    try:
        file.truncate(num_bytes)
        back_file(file.fileno(), 0, num_bytes)
    except OSError as error:
        file.close()
        had = _free_bytes(where)
        raise OSError(
            error.errno,
            f"the disk tier cannot allocate {num_bytes >> 20} MiB of {where}{had} ({error.strerror}); {advice}",
        ) from error
    return file


def _free_bytes(where: str) -> str:
    if where != SHARED_MEMORY:
        return ""
    room = os.statvfs(where)
    return f", where {room.f_bavail * room.f_frsize >> 20} MiB are free"


class StagedDisk:
    """A disk tier for an engine, with a staging buffer in memory that is shared with the store's process.

    The buffer consists of rows, each of which holds one block. The engine's adapter copies blocks into the rows and out
    of them. The store's process writes rows to disk, and reads blocks from disk into rows. Blocks may belong to several
    groups, numbered from 0, each with its own size of a block.

    The buffer is split into `NUM_PARTS` parts. A part is used for rows of one group at a time. A caller waits while
    other callers use all parts. Disk faults raise no exceptions. All methods except `close` may be called from any
    thread.
    """

    def __init__(
        self, config: DiskConfig, namespace: bytes, row_bytes: Sequence[int], writes: DiskWrites = DiskWrites.DIRECT
    ) -> None:
        """Open the store on disk.

        *namespace* is a 16-byte digest of everything that decides a block's bytes, apart from the block's name.
        *row_bytes* has the size of a block of each group. *writes* is used if *config* does not say how to write.

        Raises:
            ValueError: If the configuration cannot be used.
            OSError: If there is not enough memory for the staging buffer.
        """
        self._row_bytes = list(row_bytes)
        self._strides = [-(-size // PAGE_BYTES) * PAGE_BYTES for size in row_bytes]
        self._part_rows = [max(1, PART_BYTES // stride) for stride in self._strides]
        part_bytes = max(rows * stride for rows, stride in zip(self._part_rows, self._strides, strict=True))
        with _memory_file(NUM_PARTS * part_bytes) as file:
            self._memory = memoryview(mmap.mmap(file.fileno(), NUM_PARTS * part_bytes))
            # The store's process maps the file, which must be open until then. Closing it deletes its name, if it has
            # one, so a process that is killed later leaves no file behind.
            self._disk = open_disk_below(
                config, namespace, self._row_bytes.__getitem__, [self._memory], len(self._row_bytes), writes
            )
        self._parts = np.frombuffer(self._memory, np.uint8).reshape(NUM_PARTS, part_bytes)
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for part in range(NUM_PARTS):
            self._free.put(part)

    def wait_indexed(self, timeout_s: float) -> bool:
        """Wait until all blocks that were on disk at the start are indexed. Return whether they are."""
        return self._disk.wait_indexed(timeout_s)

    def num_held(self, names: Sequence[BlockName], group_id: int = 0) -> int:
        """Return the length of the longest prefix of *names* whose blocks are all on disk, without waiting."""
        return self._disk.num_held(names, group_id)

    def are_held(self, names: Sequence[BlockName], group_id: int = 0) -> list[bool]:
        """Return for each of *names* whether its block is on disk, without waiting."""
        return self._disk.are_held(names, group_id)

    def load(self, names: Sequence[BlockName], take: Copy, group_id: int = 0) -> int:
        """Read blocks of a group from disk into the staging buffer, in order, and call *take* to copy them out of it.

        Returns:
            The number of blocks that were copied. Copying stops at the first block that cannot be read.
        """
        num_loaded = 0
        is_whole = True

        def end(flight: _Flight) -> None:
            nonlocal num_loaded, is_whole
            outcomes = flight.outcomes.result()
            num_good = outcomes.index(False) if False in outcomes else len(outcomes)
            if is_whole and num_good:
                places = flight.places[:num_good]
                take(places, self._rows_of(flight.part, group_id, len(places)))
                num_loaded = places.stop
            is_whole &= num_good == len(outcomes)

        def begin(part: int, places: range) -> Outcomes | None:
            return self._disk.load(self._rows_with(part, group_id, places, names, None)) if is_whole else None

        self._fly(len(names), group_id, begin, end)
        # Touching the last block protects all earlier ones too, because a block is evicted before its parent.
        if num_loaded:
            self._disk.touch([BlockRow(names[num_loaded - 1], self._memory[:0], group_id)])
        return num_loaded

    def store(self, names: Sequence[BlockName], parent: BlockName | None, fill: Copy, group_id: int = 0) -> list[bool]:
        """Call *fill* to copy blocks of a group into the staging buffer, in order, and write them to disk.

        *parent* is the name of the block that precedes *names* in the prompt, or None if no such block is known. After
        a block could not be stored, no further writes are begun.

        Returns:
            For each block, whether it is on disk.
        """
        stored = [False] * len(names)
        is_whole = True

        def end(flight: _Flight) -> None:
            nonlocal is_whole
            outcomes = flight.outcomes.result()
            stored[flight.places.start : flight.places.stop] = outcomes
            is_whole &= all(outcomes)

        def begin(part: int, places: range) -> Outcomes | None:
            if not is_whole:
                return None
            fill(places, self._rows_of(part, group_id, len(places)))
            return self._disk.store(self._rows_with(part, group_id, places, names, parent))

        self._fly(len(names), group_id, begin, end)
        return stored

    def clear(self, timeout_s: float) -> bool:
        """Delete all blocks of this namespace from disk. Return False if the disk could not delete them."""
        return self._disk.clear(timeout_s)

    def statistics(self) -> DiskBelowStatistics:
        """Return a snapshot of all counts."""
        return self._disk.statistics()

    def close(self) -> None:
        """End all jobs and close the store. Lookups then find nothing. A second call does nothing."""
        self._disk.close()

    def _fly(
        self,
        num_blocks: int,
        group_id: int,
        begin: Callable[[int, range], Outcomes | None],
        end: Callable[[_Flight], None],
    ) -> None:
        """Transfer the blocks in order through parts of the buffer, with up to two parts in flight.

        *begin* starts to read or write the blocks of a part, and *end* waits until that is done. If *begin* returns
        None, no further blocks are transferred.
        """
        flights: deque[_Flight] = deque()
        part_rows = self._part_rows[group_id]
        try:
            for start in range(0, num_blocks, part_rows):
                part = self._free_part(flights, end)
                places = range(start, min(start + part_rows, num_blocks))
                if (outcomes := self._begun(begin, part, places)) is None:
                    break
                flights.append(_Flight(part, places, outcomes))
                if len(flights) > 1:
                    self._end_first(flights, end)
            while flights:
                self._end_first(flights, end)
        finally:  # after a failed copy, parts in flight must end before other callers use their rows
            for flight in flights:
                flight.outcomes.result()
                self._free.put(flight.part)

    def _begun(self, begin: Callable[[int, range], Outcomes | None], part: int, places: range) -> Outcomes | None:
        outcomes = None
        try:
            outcomes = begin(part, places)
        finally:
            if outcomes is None:
                self._free.put(part)
        return outcomes

    def _free_part(self, flights: deque[_Flight], end: Callable[[_Flight], None]) -> int:
        """Return a free part of the buffer. Waits while all parts are in use.

        First, the method completes this caller's own transfers in *flights*, which frees their parts. Otherwise two
        callers could wait for each other forever.
        """
        while flights:
            try:
                return self._free.get_nowait()
            except queue.Empty:
                self._end_first(flights, end)
        return self._free.get()

    def _end_first(self, flights: deque[_Flight], end: Callable[[_Flight], None]) -> None:
        flight = flights[0]
        end(flight)
        flights.popleft()
        self._free.put(flight.part)

    def _rows_of(self, part: int, group_id: int, num_rows: int) -> Rows:
        stride = self._strides[group_id]
        return self._parts[part, : num_rows * stride].reshape(num_rows, stride)[:, : self._row_bytes[group_id]]

    def _rows_with(
        self, part: int, group_id: int, places: range, names: Sequence[BlockName], parent: BlockName | None
    ) -> list[BlockRow]:
        parents: Iterator[BlockName | None] = iter([parent if place == 0 else names[place - 1] for place in places])
        return [
            BlockRow(names[place], memoryview(row), group_id, next(parents))
            for place, row in zip(places, self._rows_of(part, group_id, len(places)), strict=True)
        ]
