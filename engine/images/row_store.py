"""RowStore: the encoder's results on disk, in the store of the disk tier, under keys of their own."""

import hashlib
import logging
import queue
import threading
from contextlib import suppress
from dataclasses import dataclass

import torch

from kvtier.store.blob_store import Blob, Records
from kvtier.store.record import NAMESPACE_BYTES, digest

log = logging.getLogger(__name__)

MAX_BYTES = 32 << 20  # of one image's rows: as much as the store takes in one change
MAX_QUEUED = 8  # images whose rows wait to be written; further ones are not written
_END_WAIT_S = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    key: bytes
    rows: torch.Tensor
    tenant: bytes


class _Clear:
    """A job that only wakes the thread."""


class RowStore:
    """Rows of images in a store on disk, which verifies every read.

    `read` blocks, so do not call it on the engine's thread or an event loop. `write` queues the rows for a thread.
    Rows that cannot be read or written are lost, which costs another run of the encoder.
    """

    def __init__(self, store: Records, namespace: bytes) -> None:
        """Use *store* for the rows of a model, whose KV blocks have the *namespace*."""
        self._store = store
        self._namespace = hashlib.sha256(b"kvtier image rows 1\0" + namespace).digest()[:NAMESPACE_BYTES]
        self._jobs: queue.Queue[_Write | _Clear | None] = queue.Queue(MAX_QUEUED)
        self._has_warned = False
        self._is_cleared = threading.Event()  # set until the thread has deleted the rows
        self._thread = threading.Thread(target=self._write_all, name="kvtier-image-rows", daemon=True)
        self._thread.start()

    def read(self, key: bytes, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return the rows under *key*, which have this *shape* and *dtype*; None if they are missing or damaged."""
        rows = torch.empty(shape, dtype=dtype)
        if not rows.numel() or rows.nbytes > MAX_BYTES:
            return None
        try:
            (found,) = self._store.read_many([self._namespace + key], [_bytes_of(rows)])
        except (OSError, ValueError) as error:
            self._warn("read", error)
            return None
        return rows if isinstance(found, bytes) else None

    def write(self, key: bytes, rows: torch.Tensor, tenant: bytes) -> None:
        """Queue *rows* to be written, unless they are too large or too many wait. They count for *tenant*."""
        if rows.nbytes <= MAX_BYTES:
            try:
                self._jobs.put_nowait(_Write(self._namespace + key, rows, tenant))
            except queue.Full:
                log.debug("image rows: the disk is behind, so the rows of an image are not written")

    def clear(self) -> None:
        """Queue the deletion of the rows of this model's images on disk. The store's thread deletes them later."""
        self._is_cleared.set()
        with suppress(queue.Full):  # then the thread finds the flag after the next write
            self._jobs.put_nowait(_Clear())

    def close(self) -> None:
        """Write what is queued and end the thread."""
        try:
            self._jobs.put(None, timeout=_END_WAIT_S)
        except queue.Full:
            return
        self._thread.join(_END_WAIT_S)

    def _write_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._is_cleared.is_set():
                self._is_cleared.clear()
                self._delete_all()
            if isinstance(job, _Write):
                self._put(job)

    def _put(self, job: "_Write") -> None:
        raw = _bytes_of(job.rows)
        try:
            self._store.put_many([Blob(job.key, digest(raw), raw, tenant=job.tenant)])
        except (OSError, ValueError) as error:
            self._warn("written", error)

    def _delete_all(self) -> None:
        try:
            stored = self._store.keys()
            self._store.delete([key for key in stored if key.startswith(self._namespace)])
        except (OSError, ValueError) as error:
            self._warn("deleted", error)

    def _warn(self, what: str, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning("image rows cannot be %s on disk (%s); images are encoded again instead", what, error)


def _bytes_of(rows: torch.Tensor) -> memoryview:
    numbers = rows.flatten().view(torch.uint8).numpy()
    return memoryview(numbers)  # type: ignore[arg-type]  # an array
