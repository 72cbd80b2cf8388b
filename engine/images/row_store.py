"""RowStore: the encoder's results on disk, in the store of the disk tier, under keys of their own."""

import hashlib
import logging
import time
from collections import deque
from dataclasses import dataclass

import torch

from kvtier.store.blob_store import Blob, Records
from kvtier.store.record import NAMESPACE_BYTES, digest
from kvtier.tiers.lower.other_records import OtherRecords
from kvtier.tiers.naming.named_blocks import NO_TENANT
from kvtier.transfer.lane import LaneClosed

log = logging.getLogger(__name__)

MAX_BYTES = 32 << 20  # of one image's rows: as much as the store takes in one change
MAX_QUEUED = 8  # images whose rows wait to be written; further ones are not written
_FLUSH_WAIT_S = 10.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    key: bytes
    rows: torch.Tensor
    tenant: bytes

    def blob(self) -> Blob:
        raw = _bytes_of(self.rows)
        return Blob(self.key, digest(raw), raw, tenant=self.tenant)


class RowStore:
    """Rows of images in the disk tier's store, which verifies every read. Implements `RowTier`.

    One write or deletion runs at a time; the others are queued.
    """

    def __init__(self, store: Records, records: OtherRecords, namespace: bytes) -> None:
        """Read from *store* and write with *records*, which belong together.

        *namespace* is that of the KV blocks of the model whose rows are kept.
        """
        self._store = store
        self._records = records
        self._namespace = namespace_of_rows(namespace)
        self._waiting: deque[_Write] = deque()
        self._must_clear = False  # before the writes that wait
        self._is_busy = False  # whether a write or deletion is in flight
        self._has_warned = False

    def read(
        self, key: bytes, shape: tuple[int, int, int], dtype: torch.dtype, tenant: bytes = NO_TENANT
    ) -> torch.Tensor | None:
        """Return the rows under *key*; see `RowTier.read`. The record has its *tenant* already."""
        rows = torch.empty(shape, dtype=dtype)
        if not rows.numel() or rows.nbytes > MAX_BYTES or self._must_clear:
            return None
        try:
            (found,) = self._store.read_many([self._namespace + key], [_bytes_of(rows)])
        except (OSError, ValueError) as error:
            self._warn("read", error)
            return None
        return rows if isinstance(found, bytes) else None

    def write(self, key: bytes, rows: torch.Tensor, tenant: bytes) -> None:
        """Queue *rows* to be written, unless they are too large or too many wait. They count for *tenant*."""
        if rows.nbytes <= MAX_BYTES and len(self._waiting) < MAX_QUEUED:
            self._waiting.append(_Write(self._namespace + key, rows, tenant))
        self._start_next()

    def clear(self) -> None:
        """Delete the rows of this model's images on disk in the background, also those that are being written.

        Until they are deleted, `read` finds none. A deletion that fails is repeated before the next write.
        """
        self._waiting.clear()
        self._must_clear = True
        self._start_next()

    def close(self) -> None:
        """Do nothing: the store and the lanes belong to the tiers."""

    def flush(self) -> None:
        """Wait until what is queued is done, at most a few seconds."""
        give_up_at = time.monotonic() + _FLUSH_WAIT_S
        self._start_next()
        while (self._is_busy or self._waiting) and time.monotonic() < give_up_at:
            self._records.wait(_POLL_S)
            self._start_next()

    def _start_next(self) -> None:
        if self._is_busy:
            return
        if self._must_clear:
            self._is_busy = self._records.delete(self._namespace, self._on_cleared)
            return
        if self._waiting:  # a write that is refused is dropped; the next event starts the one after it
            write = self._waiting.popleft()
            self._is_busy = self._records.put(write.blob, write.rows.nbytes, self._on_written)

    def _on_written(self, error: BaseException | None) -> None:
        self._is_busy = False
        self._warn("written", error)
        self._start_next()

    def _on_cleared(self, error: BaseException | None) -> None:
        self._is_busy, self._must_clear = False, error is not None
        self._warn("deleted", error)
        if error is None:
            self._start_next()
        else:
            self._waiting.clear()

    def _warn(self, what: str, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, LaneClosed) and not self._has_warned:
            self._has_warned = True
            log.warning("image rows cannot be %s on disk (%s); images are encoded again instead", what, error)


def namespace_of_rows(namespace: bytes) -> bytes:
    """Return the namespace of the image rows of a model, given the *namespace* of its KV blocks."""
    return hashlib.sha256(b"kvtier image rows 1\0" + namespace).digest()[:NAMESPACE_BYTES]


def _bytes_of(rows: torch.Tensor) -> memoryview:
    numbers = rows.flatten().view(torch.uint8).numpy()
    return memoryview(numbers)  # type: ignore[arg-type]  # an array
