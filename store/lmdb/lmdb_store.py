"""`LmdbStore`: a store on disk with an LMDB index and slab files, owned by one process."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

from kvtier.store.blob_store import StoreStatistics
from kvtier.store.codec.cipher import Cipher
from kvtier.store.codec.codec import NO_CODEC, Codec
from kvtier.store.codec.codec_choice import CodecChoice
from kvtier.store.disk_writes import DiskWrites
from kvtier.store.durability import Durability
from kvtier.store.lmdb import data_file
from kvtier.store.lmdb.files import open_files
from kvtier.store.lmdb.reader import LmdbReader
from kvtier.store.lmdb.writer import LmdbWriter
from kvtier.store.record import Fault

_KEYS_PER_PAGE = 4096


class LmdbStore:
    """A `BlobStore` on disk, with an index in LMDB and payloads in slab files.

    One process owns the folder. Another process that opens it gets `FolderInUse`, and a process forked from the owner
    may not use the store. Opening takes the same time at any size. The folder never takes more disk space than
    `data_file.max_bytes(capacity_bytes)`.

    A payload is first written to a free slot of a slab file. Then one transaction adds its record and updates eviction
    order and counters. So a process that is killed at any point leaves an intact store.

    After LMDB's tree was found broken, changes raise OSError, reads continue (each is verified), and the next process
    starts with an empty store. If the disk fails to read a page of the index, SIGBUS ends the process, as in every
    program that maps files. `StoreProcess` protects against that.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int | None = None,
        codec: Codec | CodecChoice = NO_CODEC,
        cipher: Cipher | None = None,
        durability: Durability = Durability.PROCESS,
        interval_s: float = 10.0,
        quotas: Mapping[bytes, int] = MappingProxyType({}),
        owner: int | None = None,
        writes: DiskWrites = DiskWrites.DIRECT,
        reserve_bytes: int = 0,
    ) -> None:
        """Open the store in *folder*.

        Args:
            folder: Folder of the store.
            capacity_bytes: Limit on the stored bytes. If it is None, the store keeps the capacity with which it was
                last opened. Then a missing or broken store raises OSError and is not changed.
            codec: Encoding of new blocks.
            cipher: Encrypts all blocks, if given.
            durability: What survives a machine crash.
            interval_s: Time between checkpoints, to which a store with durability INTERVAL returns after a machine
                crash.
            quotas: Limits in bytes, by tenant. A tenant's quota is enforced from its first put on.
            owner: Pid that the lock file names as the owner of the store. The default is the pid of this process.
            writes: Whether payloads are written past the page cache.
            reserve_bytes: Bytes of the disk that the store leaves free for other programs. If fewer are free, it stores
                new blocks only in the place of old ones.
        """
        # Index and slabs; maintenance commands use them too.
        self.files = open_files(folder, capacity_bytes, durability, interval_s, writes, owner)
        self.writes = writes
        self._quotas = quotas
        self._writer = LmdbWriter(self.files, codec, cipher, durability, quotas, reserve_bytes)
        self._reader = LmdbReader(self.files, cipher, codec if isinstance(codec, CodecChoice) else None)
        # The part of `BlobStore` that reader and writer implement.
        self.read_many, self.verify_one = self._reader.read_many, self._reader.verify_one
        self.put_many, self.touch = self._writer.put_many, self._writer.touch
        self.delete, self.evict = self._writer.delete, self._writer.evict
        try:
            self._writer.fit_capacity()
            self.files.settle()
        except BaseException:
            self.close()
            raise

    def contains(self, key: bytes) -> bool:
        with self.files.reading() as txn:
            return self.files.tables.located(txn, key) is not None

    def keys(self) -> Iterator[bytes]:
        with self.files.using():
            return self._walk()

    def verify(self) -> Iterator[tuple[bytes, Fault | None]]:
        for key in self.keys():
            found = self.verify_one(key)
            if found is not None:
                yield key, found[1]

    def place(self, key: bytes) -> tuple[Path, int, int] | None:
        """Return file, offset and length of the slot with the payload of *key*, or None if there is no record."""
        with self.files.reading() as txn:
            found = self.files.tables.located(txn, key)
        if found is None:
            return None
        file, start, num_bytes = self.files.slabs.place(found[1])
        return self.files.name / file.name, start, num_bytes

    @property
    def is_lost(self) -> bool:
        """True if the index is damaged, so that the store should be closed and opened again."""
        return self.files.is_lost

    def sync(self) -> None:
        self.files.sync()

    def statistics(self) -> StoreStatistics:
        with self.files.reading() as txn:
            counters = self.files.tables.counters(txn)
            tenants = self.files.tables.bytes_of_tenants(txn, self._quotas)
            file_bytes = self.files.file_bytes()
        return StoreStatistics(
            num_records=counters.num_records,
            stored_bytes=counters.stored_bytes,
            capacity_bytes=self._writer.room.capacity_bytes,
            file_bytes=file_bytes,
            written_bytes_total=counters.written_bytes_total,
            recent_written_bytes=counters.lately_bytes(time.time()),
            evicted_total=counters.evicted_total,
            quota_evicted_total=counters.quota_evicted_total,
            tenants=tenants,
            faults=self._reader.faults(),
        )

    def check(self) -> None:
        with self.files.writer, self.files.reading() as txn:
            self.files.tables.check(txn)
            stored_bytes = self.files.tables.counters(txn).stored_bytes
            file_bytes = self.files.file_bytes()
        capacity_bytes = self.files.capacity_bytes
        assert stored_bytes <= capacity_bytes, f"{stored_bytes} bytes exceed {capacity_bytes}"
        limit = data_file.max_bytes(capacity_bytes)
        assert file_bytes <= limit, f"the files take {file_bytes} bytes, more than {limit}"

    def close(self) -> None:
        try:
            self.files.close()
        finally:
            self._reader.close()
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _walk(self) -> Iterator[bytes]:
        """Yield the keys, newest first, with one read transaction per batch.

        The transactions are short, because LMDB cannot reuse freed pages while an older read transaction is open.
        """
        before = None
        while True:
            with self.files.reading() as txn:
                page = self.files.tables.keys_before(txn, before, _KEYS_PER_PAGE)
            if not page:
                return
            before = page[-1][0]
            yield from (key for _, key in page)
