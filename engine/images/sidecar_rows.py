"""SidecarRows: the encoder's results in a sidecar's tiers, as blocks under a namespace of their own."""

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as ReadTimeout
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtier.engine.attached.attachment import Attachment
from kvtier.engine.attached.mapped_slots import MappedSlots
from kvtier.engine.attached.sidecar_tiers import SidecarTiers
from kvtier.engine.attached.wire import VERSION, GroupShape, Hello
from kvtier.engine.images.row_store import MAX_BYTES, namespace_of_rows
from kvtier.store.record import digest
from kvtier.tiers.device.eviction_order import NamedSpan
from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.lower.lower_tiers import Fetch
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.groups import FullAttention
from kvtier.tiers.naming.named_blocks import NamedBlocks, number_of
from kvtier.tiers.naming.tier import Reason
from kvtier.transfer.lane import Finished, ThreadLane
from kvtier.transfer.transfer_engine import TransferEngine

log = logging.getLogger(__name__)

TOKENS_PER_BLOCK = 16  # image tokens whose rows are in a block
MAX_QUEUED = 8  # images whose rows wait to be written; further ones are not written
PATIENCE_S = 5.0  # a read that takes longer is given up, and the image is encoded again; so is a write without slots
_CLOSE_WAIT_S = 10.0
_BUSY_S = 0.01  # pause between two looks at the sidecar while something is read or written
_IDLE_S = 0.1  # and while nothing is


@dataclass(eq=False, slots=True)
class _Write:
    """The rows of one image on their way into slots of the sidecar."""

    names: list[BlockName]
    blocks: npt.NDArray[np.uint8]  # [block, block_bytes]
    tenant: bytes
    slots: list[int] = field(default_factory=list)
    give_up_at: float = 0.0  # set when the write begins


class SidecarRows:
    """Rows of images in a sidecar, which evicts, stores and counts them as it does blocks of KV. Implements `RowTier`.

    An image's rows are cut into blocks of `TOKENS_PER_BLOCK`, named by the rows' key and the block's number. The bytes
    of each block are compared with its digest when it is read. A thread of this object has a session of its own with
    the sidecar. Rows that cannot be read or written are lost, which costs another run of the encoder.

    Any thread may call the methods. `read` blocks.
    """

    def __init__(
        self, path: str, program: str, model: str, namespace: bytes, row_bytes: int, patience_s: float = PATIENCE_S
    ) -> None:
        """Attach to the sidecar at *path*, now or when it starts.

        *program* and *model* are names for the sidecar's list of engines. *namespace* is that of the model's KV blocks.
        *row_bytes* are the bytes of all rows of one image token. A read that takes longer than *patience_s* is given
        up, as is a write that gets no slots for so long.
        """
        self._patience_s = patience_s
        block_bytes = TOKENS_PER_BLOCK * row_bytes
        group = FullAttention(TOKENS_PER_BLOCK)
        finished: Finished = Finished()
        self._slots = MappedSlots(block_bytes)
        self._transfers = TransferEngine({}, finished)
        shapes = [GroupShape(TOKENS_PER_BLOCK, False, block_bytes)]
        hello = Hello(VERSION, program, model, namespace_of_rows(namespace), shapes)
        self._attachment: Attachment[Any] = Attachment(path, hello, [self._slots])
        self._told = threading.Event()  # when the sidecar has told which rows it has
        answers = ThreadLane(finished, "row answers")
        self._tiers = SidecarTiers(self._attachment, [group], [self._slots], self._transfers, answers)
        self._asked: SimpleQueue[Callable[[], None]] = SimpleQueue()  # for the thread
        self._reads: set[Future[bytes | None]] = set()
        self._writes: deque[_Write] = deque()
        self._published: list[_Write] = []  # of which the sidecar has not told yet that it has them
        self._flushed: list[threading.Event] = []
        self._must_clear = False
        self._has_warned = False
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-image-rows", daemon=True)
        self._thread.start()

    def wait_told(self, timeout_s: float) -> bool:
        """Wait until the sidecar has reported its rows. Return False after *timeout_s*, or if it refuses the engine."""
        self._attachment.wait_tried(timeout_s)
        if why := self._attachment.why_refused:
            log.warning("the sidecar does not keep the image encoder's results (%s); images may be encoded again", why)
            return False
        return self._told.wait(timeout_s)

    def read(self, key: bytes, shape: tuple[int, int, int], dtype: torch.dtype, tenant: bytes) -> torch.Tensor | None:
        """Return the rows under *key*, which have this *shape* and *dtype*; None if they are missing or damaged."""
        depth, num_rows, width = shape
        if self._must_clear or self._is_closing.is_set() or not num_rows:
            return None
        names = _names(key, num_rows)
        found: Future[bytes | None] = Future()
        self._asked.put(partial(self._begin_read, names, tenant, found))
        try:
            raw = found.result(self._patience_s)
        except ReadTimeout:
            return None
        if raw is None:
            return None
        size = num_rows * depth * width * dtype.itemsize
        rows = torch.frombuffer(bytearray(raw[:size]), dtype=dtype).view(num_rows, depth, width)
        return rows.transpose(0, 1).contiguous()

    def write(self, key: bytes, rows: torch.Tensor, tenant: bytes) -> None:
        """Queue *rows* to be written, unless they are too large or too many wait. They count for *tenant*.

        Rows are also dropped if they arrive after `clear` and before it has finished.
        """
        if rows.nbytes > MAX_BYTES or self._must_clear or self._is_closing.is_set():
            return
        raw = rows.transpose(0, 1).contiguous().flatten().view(torch.uint8).numpy()
        names = _names(key, rows.shape[1])
        blocks = np.zeros((len(names), self._slots.block_bytes), np.uint8)
        blocks.reshape(-1)[: len(raw)] = raw
        self._asked.put(partial(self._begin_write, _Write(names, blocks, tenant)))

    def clear(self) -> None:
        """Evict the rows of this model's images from the sidecar's tiers, for all engines that use the sidecar.

        Until they are evicted, `read` finds none.
        """
        self._must_clear = True

    def flush(self) -> None:
        """Wait until what is queued is in the sidecar's host memory, at most a few seconds."""
        done = threading.Event()
        self._asked.put(partial(self._flushed.append, done))
        done.wait(2 * self._patience_s)

    def close(self) -> None:
        """End the session and the thread. Queued rows are lost."""
        self._is_closing.set()
        self._thread.join(_CLOSE_WAIT_S)

    def _run(self) -> None:
        try:
            while not self._is_closing.is_set():
                self._take_asked()
                self._tiers.poll()
                self._tiers.pop_lost()
                if self._tiers.is_told:
                    self._told.set()
                if self._must_clear:
                    self._clear()
                else:
                    self._go_on_writing()
                if not self._is_busy:
                    self._end_flushes()
        except Exception:  # must not end silently: a fault here costs runs of the encoder
            log.exception("rows of images in the sidecar cannot be used any more; images are encoded again instead")
            self._is_closing.set()
        for found in list(self._reads):
            _settle(found, None)
        self._drop_writes()
        self._end_flushes()
        self._tiers.close()
        self._slots.detach()

    @property
    def _is_busy(self) -> bool:
        is_clearing = self._must_clear and self._tiers.is_attached
        return bool(self._writes or self._published or self._reads or is_clearing)

    def _take_asked(self) -> None:
        """Run the calls that other threads have queued. If there are none, wait briefly for a call or an answer."""
        if self._is_busy:
            self._transfers.poll(_BUSY_S)
        try:
            self._asked.get(timeout=None if self._is_busy else _IDLE_S, block=not self._is_busy)()
            while True:
                self._asked.get_nowait()()
        except Empty:
            pass

    def _begin_read(self, names: list[BlockName], tenant: bytes, found: "Future[bytes | None]") -> None:
        if self._must_clear or len(self._tiers.find_run(0, names)) < len(names):
            found.set_result(None)
            return
        self._reads.add(found)
        num_left = len(names)
        has_failed = False

        def on_fetched(fetch: Fetch, place: int, failure: Reason | None) -> None:
            nonlocal num_left, has_failed
            num_left -= 1
            has_failed = has_failed or failure is not None
            if not num_left:
                raw = None if has_failed else self._bytes_of(fetch, names)
                fetch.release(np.arange(len(names))[::-1])
                self._reads.discard(found)
                _settle(found, raw)

        self._tiers.fetch(0, NamedBlocks(names, [None, *names[:-1]], tenant), on_fetched)

    def _bytes_of(self, fetch: Fetch, names: list[BlockName]) -> bytes | None:
        """Return the bytes of all blocks, or None if a block does not match its digest; the sidecar then forgets it."""
        copied = self._slots.blocks[fetch.slots.astype(np.intp)] if (fetch.slots != ABSENT).all() else None
        if copied is None:
            return None
        damaged = [name for place, name in enumerate(names) if digest(memoryview(copied[place])) != fetch.digest(place)]
        if damaged:
            log.warning(
                "%d blocks of an image encoder's result are damaged in the sidecar; the image is encoded again",
                len(damaged),
            )
            self._tiers.forget(0, damaged)
            return None
        return copied.tobytes()

    def _begin_write(self, write: _Write) -> None:
        is_new = all(write.names != each.names for each in (*self._writes, *self._published))
        is_missing = is_new and len(self._tiers.find_run(0, write.names)) < len(write.names)
        if len(self._writes) < MAX_QUEUED and is_missing:
            self._writes.append(write)

    def _go_on_writing(self) -> None:
        """Continue the oldest write: get slots, copy the blocks into them, and publish them."""
        is_known = self._tiers.is_attached
        self._published = [write for write in self._published if is_known and not self._is_there(write)]
        if not self._writes:
            return
        write, now = self._writes[0], time.monotonic()
        write.give_up_at = write.give_up_at or now + self._patience_s
        if not self._tiers.is_attached or now > write.give_up_at:
            self._writes.popleft()
            self._give_back(write)
            if not self._has_warned:
                self._has_warned = True
                no_room = f"no host memory became free within {self._patience_s:g} s"
                why = no_room if self._tiers.is_attached else "it is not attached"
                log.warning(
                    "an image encoder's result is not stored in the sidecar (%s); the image may be encoded again", why
                )
            return
        write.slots += self._tiers.reserve(0, len(write.names) - len(write.slots))
        if len(write.slots) < len(write.names):
            return
        self._writes.popleft()
        slots = np.array(write.slots, np.intp)
        self._slots.blocks[slots] = write.blocks[::-1]  # the last block first, which is evicted first
        digests = [digest(memoryview(block)) for block in write.blocks[::-1]]
        rows = [NamedSpan(0, len(slots), write.names[::-1], None)]
        owners = np.full(len(slots), number_of(write.tenant), np.uint64)
        self._tiers.publish(0, slots, rows, digests, owners)
        self._published.append(write)

    def _is_there(self, write: _Write) -> bool:
        """Return whether the sidecar has told that it has the blocks, or has not done so in time."""
        return time.monotonic() > write.give_up_at or len(self._tiers.find_run(0, write.names)) == len(write.names)

    def _give_back(self, write: _Write) -> None:
        if write.slots:
            self._tiers.abandon(0, np.array(write.slots, np.intp))

    def _drop_writes(self) -> None:
        self._published.clear()
        while self._writes:
            self._give_back(self._writes.popleft())

    def _clear(self) -> None:
        """Evict all rows, as soon as no read is in flight. Without a sidecar, this is repeated later."""
        self._drop_writes()
        if not self._reads and self._tiers.clear():
            self._must_clear = False

    def _end_flushes(self) -> None:
        for done in self._flushed:
            done.set()
        self._flushed.clear()


def _names(key: bytes, num_rows: int) -> list[BlockName]:
    """Return the names of the blocks that hold *num_rows* rows under *key*."""
    num_blocks = -(-num_rows // TOKENS_PER_BLOCK)
    return [
        BlockName(hashlib.sha256(b"kvtier image rows\0" + key + number.to_bytes(4, "little")).digest())
        for number in range(num_blocks)
    ]


def _settle(found: "Future[bytes | None]", raw: bytes | None) -> None:
    if not found.done():
        found.set_result(raw)
