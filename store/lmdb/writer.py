"""`LmdbWriter`: puts blocks into an LMDB store, and evicts records to make room for them."""

import errno
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from kvtier.store.blob_store import Blob, Evicted, StoreFull
from kvtier.store.codec.cipher import Cipher
from kvtier.store.codec.codec import Codec
from kvtier.store.codec.codec_choice import CodecChoice
from kvtier.store.codec.seal import Sealed, charged_bytes, most_charged_bytes, refuse_unfit, seal
from kvtier.store.durability import Durability
from kvtier.store.lmdb import data_file
from kvtier.store.lmdb.change import MOST_EVICTED, Change
from kvtier.store.lmdb.disk_room import DiskRoom
from kvtier.store.lmdb.files import LmdbFiles
from kvtier.store.lmdb.group_commit import GroupCommit
from kvtier.store.lmdb.rows import NO_TENANT
from kvtier.store.slab import PAGE_BYTES, Slot, slot_bytes

_INDEX_PAGES = 8  # new pages that the change of one record may need
_EVICTED_PAGES = 3  # new pages that an eviction may need
_MOST_TRIES = 8  # to make room for one group
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class _StillTooMuch(Exception):
    """One change has evicted and passed over as many records as it may, and there is still no room."""

    def __init__(self, evicted: list[bytes]) -> None:
        super().__init__()
        self.evicted = evicted


class LmdbWriter:
    """Makes all changes of a store's records: puts with the evictions that they need, touches and deletions.

    The records stay within the capacity, which is lower than that of *files* while the disk is full, and those of a
    tenant within its quota. Blocks are encoded by *codec*; with *durability* COMMIT a put also syncs their payloads.
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
        self._room = DiskRoom(files.name, files.here, files.capacity_bytes)
        self._untold: list[bytes] = []  # evicted keys that no put has returned yet; `files.writer` guards it
        self._syncer = ThreadPoolExecutor(1, "kvtier-store-sync")
        self._group = GroupCommit(files.writer, data_file.part_bytes(files.capacity_bytes), self._put_group)

    @property
    def capacity_bytes(self) -> int:
        """The capacity that the records may take now."""
        return self._room.capacity_bytes

    def fit_capacity(self) -> None:
        """Evict what a lowered capacity has no room for. No put returns these keys: no caller knows them yet."""
        self._evict_to(self._files.capacity_bytes)
        self._untold.clear()

    def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
        """See `BlobStore.put_many`."""
        refuse_unfit(blobs, self._files.capacity_bytes, self._cipher)
        evicted: dict[bytes, None] = {}
        for part in _parts(blobs, data_file.part_bytes(self._files.capacity_bytes)):
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
            for blob in part:  # evicted by an earlier part, now back
                evicted.pop(blob.key, None)
            evicted.update(dict.fromkeys(gone))
        return list(evicted)

    def touch(self, keys: Sequence[bytes]) -> None:
        """See `BlobStore.touch`."""

        def mark_all(change: Change) -> None:
            for key in keys:
                change.mark(key)

        self._files.change(mark_all, _INDEX_PAGES * PAGE_BYTES * len(keys))

    def delete(self, keys: Sequence[bytes]) -> int:
        """See `BlobStore.delete`."""
        num_deleted, left = 0, list(keys)

        def forget_some(change: Change, most: int) -> list[bool]:
            return [change.forget(key) for key in left[:most]]

        while left:
            forgotten = self._files.remove(forget_some)
            num_deleted += sum(forgotten)
            del left[: len(forgotten)]
        return num_deleted

    def evict(self, num_bytes: int, most: int, tenant: bytes = b"") -> Evicted:
        """See `BlobStore.evict`."""
        owner, gone, num_freed = tenant or NO_TENANT, list[bytes](), 0

        def clear(change: Change, most_now: int) -> tuple[list[bytes], int, int]:
            before = change.counters.stored_bytes
            keys, num_left = change.clear(num_bytes - num_freed, min(most_now, most - len(gone)), owner)
            return keys, num_left, before - change.counters.stored_bytes

        num_left = 1
        while num_left and num_freed < num_bytes and len(gone) < most:
            keys, num_left, num_now = self._files.remove(clear)
            gone += keys
            num_freed += num_now
        return Evicted(gone, num_freed)

    def close(self) -> None:
        """End its thread; the files must be closed. A second call does nothing."""
        self._syncer.shutdown()

    def _put_group(self, group: Sequence[Blob]) -> list[bytes]:
        """Store *group*, making room if there is none; returns all evicted keys that no put has returned yet."""
        self._room.grow_back()
        for is_last in (False, False, True):
            try:
                self._put_at_once(group)
                break
            except OSError as error:
                if is_last or error.errno not in _NO_ROOM:
                    raise
                if isinstance(error, StoreFull):
                    self._make_room(2 * sum(most_charged_bytes(blob, self._cipher) for blob in group))
                elif not self._shrink():
                    raise
        gone, self._untold = self._untold, []
        return gone

    def _put_at_once(self, group: Sequence[Blob]) -> None:
        unique = {blob.key: blob for blob in group}.values()
        most = MOST_EVICTED + len(unique)
        syncing: list[Future[None]] = []

        def put(change: Change) -> tuple[list[bytes], set[bytes]]:
            new = _mark(change, unique)
            coming = {blob.key for blob in new}
            sealed = [seal(blob, self._codec, self._cipher) for blob in new]
            # Before the new records are added, so that these are newer than the records passed over for them.
            new_bytes: Counter[bytes] = Counter()
            for blob, one in zip(new, sealed, strict=True):
                new_bytes[blob.tenant] += one.charged_bytes
            evicted = self._evict(change, new_bytes, most)
            slots = self._write(change, sealed)
            if self._durability is Durability.COMMIT:  # beside the commit: digests show whether a payload is complete
                syncing.append(self._syncer.submit(self._files.slabs.sync))
            for blob, one, slot in zip(new, sealed, slots, strict=True):
                coming.discard(blob.key)
                change.add(one, blob, slot, coming)
            change.find_again(blob.key for blob in new)
            return evicted + self._evict(change, dict.fromkeys(new_bytes, 0), most - len(evicted)), {
                blob.key for blob in new
            }

        index_bytes = (_INDEX_PAGES + _EVICTED_PAGES) * PAGE_BYTES * len(unique)
        for _ in range(_MOST_TRIES):
            try:
                evicted, new = self._files.change(put, index_bytes)
                break
            except _StillTooMuch:
                self._evict_for(unique)
        else:
            raise StoreFull(errno.ENOSPC, f"store: no room for {len(unique)} blocks after {_MOST_TRIES} tries")
        back = [key for key in self._untold if key in new]
        self._untold = [key for key in self._untold if key not in new] + evicted
        try:
            for sync in syncing:
                sync.result()
        except OSError:
            with suppress(OSError):  # else they stay, and may not survive a crash
                self.delete(list(new))
            self._untold += back  # returned when in doubt: the caller then looks for less on disk than there is
            raise

    def _write(self, change: Change, sealed: Sequence[Sealed]) -> list[Slot]:
        """Write the payloads to slots that no record has, and return these."""
        sizes = [slot_bytes(one.payload.nbytes) for one in sealed]
        free: dict[int, Iterator[Slot]] = {}
        for size, num_slots in Counter(sizes).items():
            slots, to_punch = change.allocate(size, num_slots, self._room.slab_bytes)
            if to_punch:
                self._files.slabs.punch(*to_punch)
            free[size] = iter(slots)
        placed = [next(free[size]) for size in sizes]
        self._files.slabs.write(placed, [one.payload for one in sealed])
        return placed

    def _evict(self, change: Change, new_bytes: Mapping[bytes, int], most: int) -> list[bytes]:
        """Evict until *new_bytes* (by tenant) fit quotas and capacity; `_StillTooMuch` after *most* evictions."""
        evicted: list[bytes] = []
        for tenant, num_bytes in new_bytes.items():
            if tenant in self._quotas and tenant:
                limit_bytes = max(0, self._quotas[tenant] - num_bytes)
                evicted += change.evict_tenant(tenant, limit_bytes, most - len(evicted))
                if change.bytes_of(tenant) > limit_bytes:
                    raise _StillTooMuch(evicted)
        limit_bytes = max(0, self._room.capacity_bytes - sum(new_bytes.values()))
        evicted += change.evict(limit_bytes, most - len(evicted))
        if change.counters.stored_bytes > limit_bytes:
            raise _StillTooMuch(evicted)
        return evicted

    def _evict_for(self, group: Collection[Blob]) -> None:
        """Evict until *group* fits, in as many changes as it takes.

        Each change marks the group's records and parents anew, since a mark lasts for one turn of CLOCK: no record is
        evicted for the sake of one that continues it.
        """
        is_done = False
        while not is_done:
            with self._files.changing(_EVICTED_PAGES * PAGE_BYTES * len(group)) as change:
                new_bytes: Counter[bytes] = Counter()
                for blob in _mark(change, group):
                    new_bytes[blob.tenant] += most_charged_bytes(blob, self._cipher)
                try:
                    evicted, is_done = self._evict(change, new_bytes, MOST_EVICTED), True
                except _StillTooMuch as too_much:
                    evicted = too_much.evicted
            self._untold += evicted

    def _make_room(self, num_bytes: int) -> None:
        """Evict *num_bytes* of records, and make their pages and slots usable."""
        self._evict_to(max(0, self._stored_bytes() - num_bytes))
        self._files.free_pages(self._room.slab_bytes)

    def _shrink(self) -> bool:
        """Lower the capacity to what a full disk allows; False if that is next to nothing."""
        with self._files.reading() as txn:
            taken_bytes = self._files.tables.counters(txn).slab_bytes
        if not self._room.shrink(taken_bytes):
            return False
        self._evict_to(self._room.capacity_bytes)
        self._files.free_pages(self._room.slab_bytes)
        self._room.on_shrunk()
        return True

    def _evict_to(self, limit_bytes: int) -> None:
        while self._stored_bytes() > limit_bytes:
            self._untold += self._files.remove(lambda change, most: change.evict(limit_bytes, most))

    def _stored_bytes(self) -> int:
        with self._files.reading() as txn:
            return self._files.tables.counters(txn).stored_bytes

    def _still_absent(self, evicted: Iterable[bytes]) -> list[bytes]:
        """Those of *evicted* that have no record again; all of them if the index cannot be read."""
        with suppress(OSError), self._files.reading() as txn:
            return [key for key in evicted if self._files.tables.located(txn, key) is None]
        return list(evicted)


def _mark(change: Change, group: Iterable[Blob]) -> list[Blob]:
    """Mark the records of *group* that exist, and the parents of the others; returns these others."""
    new = [blob for blob in group if not change.mark(blob.key)]
    coming = {blob.key for blob in new}
    for blob in new:
        if blob.parent not in coming:
            change.mark(blob.parent)
    return new


def _parts(blobs: Sequence[Blob], most_bytes: int) -> Iterator[list[Blob]]:
    """Runs of *blobs* of at most *most_bytes*, or of one blob."""
    part: list[Blob] = []
    num_bytes = 0
    for blob in blobs:
        blob_bytes = charged_bytes(blob.raw.nbytes)
        if part and num_bytes + blob_bytes > most_bytes:
            yield part
            part, num_bytes = [], 0
        part.append(blob)
        num_bytes += blob_bytes
    if part:
        yield part
