"""`LmdbWriter`: puts blocks into an LMDB store, and evicts records to make room for them."""

import errno
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.store.blob_store import Blob, Evicted, StoreFull
from kvtier.store.codec.cipher import Cipher
from kvtier.store.codec.codec import Codec
from kvtier.store.codec.codec_choice import CodecChoice
from kvtier.store.codec.seal import Sealed, charged_bytes, check_fits, max_charged_bytes, seal
from kvtier.store.durability import Durability
from kvtier.store.lmdb import data_file
from kvtier.store.lmdb.change import MAX_EVICTED, Change
from kvtier.store.lmdb.files import LmdbFiles
from kvtier.store.lmdb.tables import NO_TENANT
from kvtier.store.slab import PAGE_BYTES, Slot, slot_bytes

_INDEX_PAGES = 8  # new pages that the change of one record may need
_EVICTED_PAGES = 3  # new pages that an eviction may need
_MAX_TRIES = 8  # to make room for the blobs of one change
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_INDEX_ROOM_BYTES = 8 << 20  # disk space that a lowered capacity leaves to the index; one change may need this much

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Call:
    """The blobs of one caller of `put`, and the result for that caller."""

    blobs: Sequence[Blob]
    num_bytes: int
    done: bool = False
    evicted: list[bytes] = field(default_factory=list)
    error: Exception | None = None


class GroupCommit:
    """A group commit, which stores the blobs of concurrent `put` calls together in one change of the store.

    *act* makes one change. Calls that arrive meanwhile wait for the next change, which stores up to *max_bytes*. The
    call that gets the *writer* lock stores the blobs of all waiting calls. So there is no extra thread, and a single
    call does not wait for others. If that call is interrupted, the next one that gets the lock stores the remaining
    blobs.
    """

    def __init__(self, writer: threading.RLock, max_bytes: int, act: Callable[[Sequence[Blob]], list[bytes]]) -> None:
        self._writer = writer
        self.max_bytes = max_bytes
        self._act = act
        self._waiting: list[_Call] = []  # each call appends itself and, with the writer lock, removes itself

    @property
    def num_waiting(self) -> int:
        """Number of calls that wait or are in progress."""
        return len(self._waiting)

    def put(self, blobs: Sequence[Blob]) -> list[bytes]:
        """Store *blobs* and return the keys that were evicted to make room. Raises the error if storing them fails.

        After the call has ended, even by an interruption, no thread reads *blobs* any more.
        """
        call = _Call(blobs, sum(charged_bytes(blob.raw.nbytes) for blob in blobs))
        try:
            self._waiting.append(call)
            with self._writer:
                while not call.done:
                    self._serve(self._gathered())
                self._waiting.remove(call)
        except BaseException:
            with self._writer, suppress(ValueError):
                self._waiting.remove(call)
            raise
        if call.error is not None:
            raise call.error
        return call.evicted

    def _gathered(self) -> list[_Call]:
        """Return the waiting calls to store in the next change. At least one call must be waiting.

        Together they have at most `max_bytes`, unless the first call alone is larger.
        """
        calls: list[_Call] = []
        num_bytes = 0
        for call in self._waiting.copy():  # other threads append meanwhile
            if not call.done:
                num_bytes += call.num_bytes
                if calls and num_bytes > self.max_bytes:
                    break
                calls.append(call)
        return calls

    def _serve(self, calls: Sequence[_Call]) -> None:
        try:
            evicted = self._act([blob for call in calls for blob in call.blobs])
        except Exception as error:  # raised again in the thread of each caller
            if len(calls) > 1:  # the blobs of one call may be the cause, so try each call by itself
                for call in calls:
                    self._serve([call])
                return
            calls[0].error, calls[0].done = error, True
            return
        for call in calls[1:]:
            own = {blob.key for blob in call.blobs}
            call.evicted = [key for key in evicted if key in own]
        others = {key for call in calls[1:] for key in call.evicted}
        calls[0].evicted = [key for key in evicted if key not in others]
        for call in calls:
            call.done = True


class _StillTooMuch(Exception):
    """Error of a change that has evicted or skipped as many records as it may, but still has too little room."""

    def __init__(self, evicted: list[bytes]) -> None:
        super().__init__()
        self.evicted = evicted


class DiskRoom:
    """The current capacity of a store, which is lower than *max_bytes* while the disk is full.

    *name* is the path of the store's folder, for messages. *here* is a path that leads to the same folder even after a
    rename. Only the writer uses this object.
    """

    def __init__(self, name: Path, here: Path, max_bytes: int) -> None:
        self._name = name
        self._here = here
        self._max_bytes = max_bytes
        self._left_bytes = 0  # free on the disk after the store shrank
        self.capacity_bytes = max_bytes
        self.slab_bytes = data_file.slab_bytes(max_bytes)  # limit on the bytes of all slots

    def shrink(self, taken_bytes: int) -> bool:
        """Lower the capacity to what fits into *taken_bytes*, the disk space that the store's slots take now.

        A part of this space is left to the index: `_INDEX_ROOM_BYTES`, but at most a quarter. If no capacity would be
        left, because other files fill the disk, this changes nothing and returns False.
        """
        taken_bytes = min(self.slab_bytes, taken_bytes)
        slab_bytes = taken_bytes - min(_INDEX_ROOM_BYTES, taken_bytes // 4)
        capacity_bytes = data_file.capacity_of_slabs(slab_bytes)
        if not capacity_bytes:
            return False
        self.slab_bytes, self.capacity_bytes = slab_bytes, capacity_bytes
        _log.warning(
            "store %s: the disk is full; the capacity is lowered to %.1f MB until the disk has space for %.1f MB",
            *(self._name, self.capacity_bytes / 1e6, self._max_bytes / 1e6),
        )
        return True

    def on_shrunk(self) -> None:
        """Record how much disk space is free right after the store shrank, so that `grow_back` can see an increase."""
        self._left_bytes = self._free_bytes()

    def grow_back(self) -> None:
        """Restore the full capacity if the disk has clearly more free space than right after the store shrank."""
        if self.capacity_bytes == self._max_bytes:
            return
        if self._free_bytes() >= self._left_bytes + 2 * _INDEX_ROOM_BYTES:
            self.capacity_bytes, self.slab_bytes = self._max_bytes, data_file.slab_bytes(self._max_bytes)
            _log.warning("store %s: the disk has free space again; the full capacity is restored", self._name)

    def _free_bytes(self) -> int:
        try:
            found = os.statvfs(self._here)
        except OSError:  # the next write will fail and say why
            return 0
        return found.f_bavail * found.f_frsize


class LmdbWriter:
    """The part of a store that changes its records. It puts, touches, evicts and deletes them.

    The writer keeps the records within the capacity, and a tenant's records within its quota in *quotas*. While the
    disk is full, the capacity is lower than the configured one. *codec* encodes the blocks. If *durability* is COMMIT,
    a put returns only once the payloads are on disk.
    """

    def __init__(
        self,
        files: LmdbFiles,
        codec: Codec | CodecChoice,
        cipher: Cipher | None,
        durability: Durability,
        quotas: Mapping[bytes, int],
    ) -> None:
        self._files = files
        self._codec = codec
        self._cipher = cipher
        self._durability = durability
        self._quotas = quotas
        self.room = DiskRoom(files.name, files.here, files.capacity_bytes)
        self._untold: list[bytes] = []  # evicted keys that no put has returned yet; guarded by `files.writer`
        self._syncer = ThreadPoolExecutor(1, "kvtier-store-sync")
        self._group = GroupCommit(files.writer, data_file.part_bytes(files.capacity_bytes), self._put_group)

    def fit_capacity(self) -> None:
        """Evict the records that exceed the capacity, if the store was opened with a lower one than before.

        Puts return evicted keys, but not these: right after opening, no caller knows yet which keys the store has.
        """
        self._evict_to(self._files.capacity_bytes)
        self._untold.clear()

    def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
        """See `BlobStore.put_many`."""
        check_fits(blobs, self._files.capacity_bytes, self._cipher)
        evicted: dict[bytes, None] = {}
        for part in _parts(blobs, self._group.max_bytes):
            try:
                gone = self._group.put(part)
            except BaseException as error:
                with self._files.writer:
                    self._untold = self._still_absent(evicted) + self._untold  # the next put returns them
                    if isinstance(error, OSError) and self._untold:
                        full = StoreFull(error.errno, error.strerror or str(error))
                        full.evicted, self._untold = list(dict.fromkeys(self._untold)), []
                        raise full from error
                raise
            for blob in part:  # stored now, even if an earlier part of this call evicted the key
                evicted.pop(blob.key, None)
            evicted.update(dict.fromkeys(gone))
        return list(evicted)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark the records of *keys* as recently used, so that the next eviction skips each of them once."""

        def mark_all(change: Change) -> None:
            for key in keys:
                change.mark(key)

        self._files.change(mark_all, _INDEX_PAGES * PAGE_BYTES * len(keys))

    def delete(self, keys: Sequence[bytes]) -> int:
        """See `BlobStore.delete`."""
        num_deleted, left = 0, list(keys)

        def forget_some(change: Change, limit: int) -> list[bool]:
            return [change.forget(key) for key in left[:limit]]

        while left:
            forgotten = self._files.remove(forget_some)
            num_deleted += sum(forgotten)
            del left[: len(forgotten)]
        return num_deleted

    def evict(self, num_bytes: int, limit: int, tenant: bytes = b"") -> Evicted:
        """See `BlobStore.evict`."""
        owner, gone, num_freed = tenant or NO_TENANT, list[bytes](), 0

        def clear(change: Change, max_now: int) -> tuple[list[bytes], int, int]:
            before = change.counters.stored_bytes
            keys, num_left = change.clear(num_bytes - num_freed, min(max_now, limit - len(gone)), owner)
            return keys, num_left, before - change.counters.stored_bytes

        num_left = 1
        while num_left and num_freed < num_bytes and len(gone) < limit:
            keys, num_left, num_now = self._files.remove(clear)
            gone += keys
            num_freed += num_now
        return Evicted(gone, num_freed)

    def close(self) -> None:
        """End the writer's thread. The store's files must already be closed. A second call does nothing."""
        self._syncer.shutdown()

    def _put_group(self, group: Sequence[Blob]) -> list[bytes]:
        """Store *group*, and evict records if there is no room.

        Returns all evicted keys that no put has returned yet.
        """
        self.room.grow_back()
        for is_last in (False, False, True):
            try:
                self._put_at_once(group)
                break
            except OSError as error:
                if is_last or error.errno not in _NO_ROOM:
                    raise
                if isinstance(error, StoreFull):
                    self._make_room(2 * sum(max_charged_bytes(blob, self._cipher) for blob in group))
                elif not self._shrink():
                    raise
        gone, self._untold = self._untold, []
        return gone

    def _put_at_once(self, group: Sequence[Blob]) -> None:
        """Store the blobs in one transaction, which also evicts old records to make room for them."""
        unique = {blob.key: blob for blob in group}.values()
        limit = MAX_EVICTED + len(unique)
        syncing: list[Future[None]] = []

        def put(change: Change) -> tuple[list[bytes], set[bytes]]:
            new = _mark(change, unique)
            coming = {blob.key for blob in new}
            sealed = [seal(blob, self._codec, self._cipher) for blob in new]
            # Evict before adding, so that the new records are newer than the records skipped for them.
            new_bytes: Counter[bytes] = Counter()
            for blob, one in zip(new, sealed, strict=True):
                new_bytes[blob.tenant] += one.charged_bytes
            evicted = self._evict(change, new_bytes, limit)
            slots = self._write(change, sealed)
            if self._durability is Durability.COMMIT:  # during the commit: digests show whether a payload is complete
                syncing.append(self._syncer.submit(self._files.slabs.sync))
            for blob, one, slot in zip(new, sealed, slots, strict=True):
                coming.discard(blob.key)
                change.add(one, blob, slot, coming)
            change.verify_lookups(blob.key for blob in new)
            return evicted + self._evict(change, dict.fromkeys(new_bytes, 0), limit - len(evicted)), {
                blob.key for blob in new
            }

        index_bytes = (_INDEX_PAGES + _EVICTED_PAGES) * PAGE_BYTES * len(unique)
        for _ in range(_MAX_TRIES):
            try:
                evicted, new = self._files.change(put, index_bytes)
                break
            except _StillTooMuch:
                self._evict_for(unique)
        else:
            raise StoreFull(errno.ENOSPC, f"store: no room for {len(unique)} blocks after {_MAX_TRIES} tries")
        back = [key for key in self._untold if key in new]
        self._untold = [key for key in self._untold if key not in new] + evicted
        try:
            for sync in syncing:
                sync.result()
        except OSError:
            with suppress(OSError):  # otherwise they stay, and may not survive a crash
                self.delete(list(new))
            self._untold += back  # in doubt, report them as evicted: a caller must not expect a record that is gone
            raise

    def _write(self, change: Change, sealed: Sequence[Sealed]) -> list[Slot]:
        """Write the payloads to slots that no record has, and return the slots."""
        sizes = [slot_bytes(one.payload.nbytes) for one in sealed]
        free: dict[int, Iterator[Slot]] = {}
        for size, num_slots in Counter(sizes).items():
            slots, to_punch = change.allocate(size, num_slots, self.room.slab_bytes)
            if to_punch:
                self._files.slabs.punch(*to_punch)
            free[size] = iter(slots)
        placed = [next(free[size]) for size in sizes]
        self._files.slabs.write(placed, [one.payload for one in sealed])
        return placed

    def _evict(self, change: Change, new_bytes: Mapping[bytes, int], limit: int) -> list[bytes]:
        """Evict until *new_bytes* (by tenant) fit. Raises `_StillTooMuch` if *limit* evictions are not enough."""
        evicted: list[bytes] = []
        for tenant, num_bytes in new_bytes.items():
            if tenant in self._quotas and tenant:
                limit_bytes = max(0, self._quotas[tenant] - num_bytes)
                evicted += change.evict_tenant(tenant, limit_bytes, limit - len(evicted))
                if change.bytes_of(tenant) > limit_bytes:
                    raise _StillTooMuch(evicted)
        limit_bytes = max(0, self.room.capacity_bytes - sum(new_bytes.values()))
        if change.counters.stored_bytes > limit_bytes:
            evicted += change.evict(limit_bytes, limit - len(evicted))
            if change.counters.stored_bytes > limit_bytes:
                raise _StillTooMuch(evicted)
        return evicted

    def _evict_for(self, group: Collection[Blob]) -> None:
        is_done = False
        while not is_done:
            with self._files.changing(_EVICTED_PAGES * PAGE_BYTES * len(group)) as change:
                new_bytes: Counter[bytes] = Counter()
                # Mark again in each change, because an eviction that skips a record removes its mark. Otherwise a
                # record could be evicted to make room for its own child block.
                for blob in _mark(change, group):
                    new_bytes[blob.tenant] += max_charged_bytes(blob, self._cipher)
                try:
                    evicted, is_done = self._evict(change, new_bytes, MAX_EVICTED), True
                except _StillTooMuch as too_much:
                    evicted = too_much.evicted
            self._untold += evicted

    def _make_room(self, num_bytes: int) -> None:
        """Evict *num_bytes* of records, and make their slots and their pages in the index usable again."""
        self._evict_to(max(0, self._stored_bytes() - num_bytes))
        self._files.free_pages(self.room.slab_bytes)

    def _shrink(self) -> bool:
        """Lower the capacity to what fits on the full disk, and evict the rest. Returns False if nothing would fit."""
        with self._files.reading() as txn:
            taken_bytes = self._files.tables.counters(txn).slab_bytes
        if not self.room.shrink(taken_bytes):
            return False
        self._evict_to(self.room.capacity_bytes)
        self._files.free_pages(self.room.slab_bytes)
        self.room.on_shrunk()
        return True

    def _evict_to(self, limit_bytes: int) -> None:
        while self._stored_bytes() > limit_bytes:
            self._untold += self._files.remove(lambda change, limit: change.evict(limit_bytes, limit))

    def _stored_bytes(self) -> int:
        with self._files.reading() as txn:
            return self._files.tables.counters(txn).stored_bytes

    def _still_absent(self, evicted: Iterable[bytes]) -> list[bytes]:
        """Return those of *evicted* that still have no record, or all of them if the index cannot be read."""
        with suppress(OSError), self._files.reading() as txn:
            return [key for key in evicted if self._files.tables.located(txn, key) is None]
        return list(evicted)


def _mark(change: Change, group: Iterable[Blob]) -> list[Blob]:
    """Mark the existing records of *group*, and the parents of its new blobs, as recently used. Return the new blobs.

    A blob is new if its key has no record.
    """
    new = [blob for blob in group if not change.mark(blob.key)]
    coming = {blob.key for blob in new}
    for blob in new:
        if blob.parent not in coming:
            change.mark(blob.parent)
    return new


def _parts(blobs: Sequence[Blob], max_bytes: int) -> Iterator[list[Blob]]:
    """Split *blobs* into consecutive parts of at most *max_bytes* each. A larger blob is a part by itself."""
    part: list[Blob] = []
    num_bytes = 0
    for blob in blobs:
        blob_bytes = charged_bytes(blob.raw.nbytes)
        if part and num_bytes + blob_bytes > max_bytes:
            yield part
            part, num_bytes = [], 0
        part.append(blob)
        num_bytes += blob_bytes
    if part:
        yield part
