"""`LmdbWriter`: puts blocks into an LMDB store, and evicts records to make room for them."""

import errno
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from operator import itemgetter
from typing import NamedTuple

from kvtier.store.blob_store import Blob, Evicted, StoreFull
from kvtier.store.codec.cipher import Cipher
from kvtier.store.codec.codec import NO_CODEC, Codec
from kvtier.store.codec.codec_choice import CodecChoice
from kvtier.store.codec.seal import Sealed, charged_bytes, check_fits, max_charged_bytes, seal_all
from kvtier.store.disk_writes import DiskWrites
from kvtier.store.durability import Durability
from kvtier.store.lmdb import data_file
from kvtier.store.lmdb.change import MAX_EVICTED, Change, NewRecord
from kvtier.store.lmdb.disk_room import DiskRoom
from kvtier.store.lmdb.files import LmdbFiles
from kvtier.store.lmdb.group_commit import GroupCommit
from kvtier.store.lmdb.reserved_slots import ReservedSlot
from kvtier.store.lmdb.tables import NO_TENANT
from kvtier.store.slab import PAGE_BYTES, Slot, num_runs, slot_bytes

_INDEX_PAGES = 8  # new pages that the change of one record may need
_EVICTED_PAGES = 3  # new pages that an eviction may need
_MAX_TRIES = 8  # to make room for the blobs of one change
_MAX_FULL = 3  # tries of a put that finds the disk or the index full, with less capacity each time
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NUM_WRITERS = 4  # threads that share the payloads of a large put
_SHARE_BYTES = 2 << 20  # minimum bytes of a put per thread


class _StillTooMuch(Exception):
    """Error of a change that has evicted or skipped as many records as it may, but still has too little room."""

    def __init__(self, evicted: list[bytes]) -> None:
        super().__init__()
        self.evicted = evicted


class _Vanished(Exception):
    """Error of a put that found a record of a key, and so wrote no payload, before that record was evicted."""


class WrittenBlob(NamedTuple):
    """A blob of a put, as it is entered in the index. *place* and *sealed* are None if its key had a record before."""

    blob: Blob
    sealed: Sealed | None
    place: ReservedSlot | None

    @property
    def key(self) -> bytes:
        return self.blob.key


class InFlight:
    """Limits how many bytes concurrent puts write to reserved slots, which bounds the disk space of these slots."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._changed = threading.Condition()  # guards `_num_bytes` and `num_puts`
        self.num_puts = 0  # that write now

    @contextmanager
    def writing(self, num_bytes: int) -> Iterator[None]:
        """Wait until *num_bytes* fit, and count them during the `with` statement.

        A put that is alone does not wait, even if it is larger than the limit.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._num_bytes or self._num_bytes + num_bytes <= self._max_bytes)
            self._num_bytes += num_bytes
            self.num_puts += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_bytes -= num_bytes
                self.num_puts -= 1
                self._changed.notify_all()


class LmdbWriter:
    """The part of a store that changes its records. It puts, touches, evicts and deletes them.

    The writer keeps the records within the capacity, and a tenant's records within its quota in *quotas*. While the
    disk is full, the capacity is lower than the configured one. *codec* encodes the blocks. If *durability* is COMMIT,
    a put returns only once the payloads are on disk. *reserve_bytes* of the disk are left free for other programs.

    A put reserves slots, writes its payloads to them without the writer's lock, and then enters them in the index. So
    several puts write at the same time, and the lock is held only for short transactions.
    """

    def __init__(
        self,
        files: LmdbFiles,
        codec: Codec | CodecChoice,
        cipher: Cipher | None,
        durability: Durability,
        quotas: Mapping[bytes, int],
        reserve_bytes: int,
    ) -> None:
        self._files = files
        self._codec = codec
        self._cipher = cipher
        self._durability = durability
        self._quotas = quotas
        self.room = DiskRoom(files.name, files.here, files.capacity_bytes, reserve_bytes)
        self._untold: list[bytes] = []  # evicted keys that no put has returned yet; guarded by `files.writer`
        self._syncer = ThreadPoolExecutor(1, "kvtier-store-sync")
        self._threads = ThreadPoolExecutor(NUM_WRITERS - 1, "kvtier-store-write")
        self._max_bytes = data_file.part_bytes(files.capacity_bytes)
        self._in_flight = InFlight(2 * self._max_bytes)
        self._group = GroupCommit(files.writer, self._max_bytes, self._enter)
        # A put of plain blocks holds the writer's lock while it prepares its write. Without the lock, its thread would
        # wait for the GIL, and wake up at each LMDB call of another put. Puts that encode prepare without the lock.
        self._preparing: AbstractContextManager[object] = (
            files.writer if codec is NO_CODEC and cipher is None else nullcontext()
        )

    def fit_capacity(self) -> None:
        """Evict the records that exceed the capacity, if the store was opened with a lower one than before.

        No put returns these keys, because right after opening no caller knows yet which keys the store has.
        """
        self._evict_to(self._files.capacity_bytes)
        self._untold.clear()

    def put_many(self, blobs: Sequence[Blob]) -> list[bytes]:
        """See `BlobStore.put_many`."""
        check_fits(blobs, self._files.capacity_bytes, self._cipher)
        evicted: dict[bytes, None] = {}
        for part in _parts(blobs, self._max_bytes):
            try:
                gone = self._put_part(part)
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
        self._files.change(lambda change: change.mark(keys), _INDEX_PAGES * PAGE_BYTES * len(keys))

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
        """End the writer's threads. The store's files must already be closed. A second call does nothing."""
        self._threads.shutdown()
        self._syncer.shutdown()

    def _put_part(self, part: Sequence[Blob]) -> list[bytes]:
        """Store *part* completely or not at all, and evict records if there is no room.

        Returns all evicted keys that no put has returned yet.
        """
        num_bytes = max_charged_bytes(part, self._cipher)
        with self._in_flight.writing(num_bytes):
            num_full = 0
            for _ in range(_MAX_TRIES):
                num_shrunk = self.room.num_shrunk
                try:
                    return self._put_at_once(part, num_bytes)
                except _Vanished:
                    continue
                except OSError as error:
                    num_full += 1
                    if num_full == _MAX_FULL or error.errno not in _NO_ROOM:
                        raise
                    with self._files.writer:
                        if isinstance(error, StoreFull):
                            self._make_room(2 * num_bytes)
                        elif num_shrunk == self.room.num_shrunk and not self._shrink():
                            raise
        raise StoreFull(errno.ENOSPC, f"store: no room for {len(part)} blocks after {_MAX_TRIES} tries")

    def _put_at_once(self, part: Sequence[Blob], num_bytes: int) -> list[bytes]:
        """Write the payloads of new blobs to reserved slots, and enter the blobs in the index with those of other puts.

        Raises `_Vanished` if a record of *part* was evicted meanwhile.
        """
        unique = {blob.key: blob for blob in part}
        with self._preparing:
            with self._files.reading() as txn:
                there = self._files.tables.has(txn, unique)
            new = [blob for key, blob in unique.items() if key not in there]
            sealed = seal_all(new, self._codec, self._cipher)
            with self._files.writer:
                self.room.grow_back()
                limit_bytes = self.room.slab_limit(self._files.slot_bytes)
                places = self._files.reserve([slot_bytes(one.payload.nbytes) for one in sealed], limit_bytes)
        try:
            self._write([place.slot for place in places], [one.payload for one in sealed])
            written = list(map(WrittenBlob, new, sealed, places))
            if there:  # in the order of *part*
                by_key = {one.key: one for one in written}
                written = [by_key.get(key) or WrittenBlob(blob, None, None) for key, blob in unique.items()]
            return self._group.put(written, num_bytes)
        finally:
            self._files.release(places)

    def _write(self, slots: Sequence[Slot], values: Sequence[memoryview]) -> None:
        """Write each value to its slot, with several threads if there are many bytes in several runs of slots.

        Puts that write at the same time share the threads, because handing over work costs processor time.
        """
        num_shares = min(NUM_WRITERS // max(1, self._in_flight.num_puts), len(slots))
        if num_shares <= 1:
            if slots:
                with self._files.using():
                    self._files.slabs.write(slots, values)
            return
        pairs = sorted(zip(slots, values, strict=True), key=itemgetter(0))
        num_shares = min(num_shares, sum(slot.num_bytes for slot in slots) // _SHARE_BYTES)
        if num_shares > 1 and self._files.slabs.writes is DiskWrites.DIRECT:
            # One call for a whole run of neighbouring slots keeps a drive busy, and costs less than a call per thread.
            num_shares = min(num_shares, num_runs([slot for slot, _ in pairs]))
        num_shares = max(1, num_shares)
        size = -(-len(pairs) // num_shares)
        shares = [pairs[start : start + size] for start in range(0, len(pairs), size)]

        def write_share(share: Sequence[tuple[Slot, memoryview]]) -> None:
            with self._files.using():
                self._files.slabs.write([slot for slot, _ in share], [value for _, value in share])

        others: list[Future[None]] = []
        try:
            others.extend(self._threads.submit(write_share, share) for share in shares[1:])
            write_share(shares[0])
        except RuntimeError as error:  # the pool was shut down
            raise ValueError("store is closed") from error
        finally:
            wait(others)  # after an error or an interruption too: no thread may write to a slot that is released
        for other in others:
            other.result()

    def _enter(self, group: Sequence[WrittenBlob]) -> list[bytes]:
        """Enter the blobs in the index in one transaction, which also evicts old records to make room for them.

        Returns all evicted keys that no put has returned yet.
        """
        unique = {one.blob.key: one for one in group}
        if len(unique) != len(group):
            with_payload = {one.blob.key: one for one in sorted(group, key=lambda one: one.place is not None)}
            unique = {one.key: with_payload[one.key] for one in group}  # in the order of *group*
        limit = MAX_EVICTED + len(unique)
        syncing: list[Future[None]] = []

        def put(change: Change) -> tuple[list[bytes], list[ReservedSlot], set[bytes]]:
            records, places = list[NewRecord](), list[ReservedSlot]()
            # Evict before adding, so that the new records are newer than the records skipped for them.
            new_bytes: Counter[bytes] = Counter()
            for blob in _mark(change, [one.blob for one in unique.values()]):
                _, sealed, place = unique[blob.key]
                if sealed is None or place is None:
                    raise _Vanished
                new_bytes[blob.tenant] += sealed.charged_bytes
                records.append((sealed, blob, place.slot))
                places.append(place)
            new = [sealed.key for sealed, _, _ in records]
            evicted = self._evict(change, new_bytes, limit)
            if self._durability is Durability.COMMIT:  # during the commit: digests show whether a payload is complete
                syncing.append(self._syncer.submit(self._files.slabs.sync))
            change.take(places)
            change.add(records)
            change.verify_lookups(new)
            evicted += self._evict(change, dict.fromkeys(new_bytes, 0), limit - len(evicted))
            return evicted, places, set(new)

        index_bytes = (_INDEX_PAGES + _EVICTED_PAGES) * PAGE_BYTES * len(unique)
        for _ in range(_MAX_TRIES):
            try:
                evicted, places, new = self._files.change(put, index_bytes)
                break
            except _StillTooMuch:
                self._evict_for([one.blob for one in unique.values()])
        else:
            raise StoreFull(errno.ENOSPC, f"store: no room for {len(unique)} blocks after {_MAX_TRIES} tries")
        self._files.on_taken(places)
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
        gone, self._untold = self._untold, []
        return gone

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
                    new_bytes[blob.tenant] += max_charged_bytes([blob], self._cipher)
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
        with suppress(OSError, ValueError), self._files.reading() as txn:  # ValueError: closed
            return [key for key in evicted if self._files.tables.located(txn, key) is None]
        return list(evicted)


def _mark(change: Change, group: Collection[Blob]) -> list[Blob]:
    """Mark the existing records of *group*, and the parents of its new blobs, as recently used. Return the new blobs.

    A blob is new if its key has no record.
    """
    there = change.mark(blob.key for blob in group)
    new = [blob for blob in group if blob.key not in there]
    coming = {blob.key for blob in new}
    change.mark({blob.parent for blob in new} - coming)
    return new


def _parts(blobs: Sequence[Blob], max_bytes: int) -> Iterator[list[Blob]]:
    """Split *blobs* into consecutive parts of at most *max_bytes* each. A larger blob is a part by itself."""
    if max_charged_bytes(blobs) <= max_bytes:  # the usual case
        yield list(blobs)
        return
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
