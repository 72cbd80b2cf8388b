"""Maintenance of a store while it is not in use: `kvtier check` and other commands verify it and delete from it.

No engine or sidecar may have the store open.

The functions are generators, so that a command can show their progress. Closing a generator early closes the store. Run
the functions in a process of their own, because a damaged index may crash it.

The store is opened with `Durability.COMMIT`, so a crash during maintenance leaves the store no worse than before. The
functions do not change a store whose index is damaged.
"""

import random
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from kvtier.store.codec.cipher import Cipher
from kvtier.store.codec.seal import charged_bytes
from kvtier.store.durability import Durability
from kvtier.store.folder import Folder
from kvtier.store.lmdb.boot_mark import BootMark, FileState, current_boot_id
from kvtier.store.lmdb.data_file import DAMAGE
from kvtier.store.lmdb.inspection import NextStart, StoreDamaged, StoreLost, require_store, standing
from kvtier.store.lmdb.lmdb_store import LmdbStore
from kvtier.store.owner_lock import FolderInUse, OwnerLock
from kvtier.store.record import NAMESPACE_BYTES, Fault

_SAY_EVERY_S = 0.1
_RECORDS_PER_DELETION = 512  # deleted in one change


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a maintenance command, as `verify_store` and `delete_namespaces` yield it.

    *doing* names the current step. *done_bytes* is the size of the records processed so far, and *total_bytes* that of
    all records to process, or 0 if unknown. Both are sizes as counted against the store's capacity.
    """

    doing: str
    done_bytes: int = 0
    total_bytes: int = 0


@dataclass(slots=True)
class Tally:
    """Result of verifying the records of one namespace."""

    num_records: int = 0
    read_bytes: int = 0
    faults: Counter[Fault] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of verifying a store. *miscount* says what is wrong in the store's accounting, or is "" if nothing is."""

    num_stored: int  # records in the store; perhaps only a sample of them was read
    tallies: dict[bytes, Tally]  # by namespace
    miscount: str
    was_restored: bool  # whether it was restored to its last checkpoint after a machine crash
    num_deleted: int
    seconds: float  # spent reading records

    @property
    def num_records(self) -> int:
        """Number of records read."""
        return sum(tally.num_records for tally in self.tallies.values())

    @property
    def read_bytes(self) -> int:
        """Number of bytes read."""
        return sum(tally.read_bytes for tally in self.tallies.values())

    @property
    def faults(self) -> Counter[Fault]:
        """Number of records with each fault."""
        return sum((tally.faults for tally in self.tallies.values()), Counter[Fault]())

    @property
    def num_bad(self) -> int:
        """Number of records that can never be read again."""
        return sum(count for fault, count in self.faults.items() if fault.is_bad_record)


@dataclass(frozen=True, slots=True)
class Deletion:
    """Result of a deletion. *stored_bytes* is how many bytes of the capacity the deleted records took."""

    num_records: int
    stored_bytes: int


def verify_store(
    folder: Path, owner: int, fix: bool = False, sample: int | None = None, key_file: Path | None = None
) -> Iterator[Progress | Verification]:
    """Compare the store's accounting with a full count, and verify its records. Yields the progress, then the result.

    Args:
        folder: The store's folder.
        owner: Pid of the store's user, for the error messages of other processes that try to open the store.
        fix: Whether to delete bad records.
        sample: Number of records to verify, chosen at random; None for all.
        key_file: File with the key of an encrypted store.

    Raises:
        FolderInUse: Another process has the store open.
        StoreLost: The index is damaged, or the files cannot be trusted.
        ValueError: *key_file* contains no key.
    """
    require_store(folder)
    cipher = None if key_file is None else Cipher.from_file(key_file)
    yield Progress("opening")
    was_restored = standing(folder)[1] is NextStart.CHECKPOINT
    with _opened(folder, owner, cipher) as store:
        yield Progress("counting")
        miscount = _miscount(store)

        statistics = store.statistics()
        keys, total_bytes = store.keys(), statistics.stored_bytes
        if sample is not None and sample < statistics.num_records:
            keys, total_bytes = iter(sample_of(keys, sample)), total_bytes * sample // statistics.num_records
        tallies: dict[bytes, Tally] = {}
        bad: list[bytes] = []
        num_deleted = done_bytes = 0
        began_at = said_at = time.perf_counter()
        yield Progress("verifying", 0, total_bytes)
        for key in keys:
            found = store.verify_one(key)
            if found is None:
                continue
            num_bytes, fault = found
            tally = tallies.setdefault(key[:NAMESPACE_BYTES], Tally())
            tally.num_records += 1
            tally.read_bytes += num_bytes
            done_bytes += charged_bytes(num_bytes)
            if fault is not None:
                tally.faults[fault] += 1
                if fix and fault.is_bad_record:
                    bad.append(key)
            if len(bad) == _RECORDS_PER_DELETION:
                num_deleted += store.delete(bad)
                bad.clear()
            if time.perf_counter() - said_at > _SAY_EVERY_S:
                said_at = time.perf_counter()
                yield Progress("verifying", done_bytes, max(total_bytes, done_bytes))
        num_deleted += store.delete(bad)
        seconds = time.perf_counter() - began_at

        if miscount and num_deleted:  # a record without its payload is bad and miscounted
            yield Progress("counting again")
            miscount = _miscount(store)
    yield Verification(statistics.num_records, tallies, miscount, was_restored, num_deleted, seconds)


def delete_namespaces(
    folder: Path, owner: int, namespaces: Collection[bytes], total_bytes: int
) -> Iterator[Progress | Deletion]:
    """Delete all records of *namespaces*, and release the disk space of their payloads.

    *total_bytes* is the expected number of bytes to delete, which the progress shows. Yields `Progress` several times
    and finally the `Deletion`. Raises FolderInUse or StoreLost, as `verify_store` does.
    """
    require_store(folder)
    yield Progress("opening")
    with _opened(folder, owner) as store:
        before_bytes = store.statistics().stored_bytes
        keys = filter(lambda key: key[:NAMESPACE_BYTES] in namespaces, store.keys())
        num_records = num_bytes = 0
        while batch := list(islice(keys, _RECORDS_PER_DELETION)):
            num_records += store.delete(batch)
            num_bytes = before_bytes - store.statistics().stored_bytes
            yield Progress("deleting", num_bytes, max(total_bytes, num_bytes))
        store.files.give_back(0)  # releases the disk space of all free slots, so that the payloads' bytes are gone
    yield Deletion(num_records, num_bytes)


def mark_damaged(folder: Path) -> None:
    """Record on disk that the store is damaged, so that the next engine starts it empty. Raises FolderInUse."""
    with Folder(folder) as opened:
        lock = OwnerLock(opened)
        try:
            BootMark(current_boot_id(), FileState.DAMAGED).write(opened.here)
        finally:
            lock.release()


@contextmanager
def _opened(folder: Path, owner: int, cipher: Cipher | None = None) -> Iterator[LmdbStore]:
    """Open the store in *folder* with its recorded capacity, and raise errors that tell an operator what to do."""
    try:
        with LmdbStore(folder, cipher=cipher, durability=Durability.COMMIT, owner=owner) as store:
            yield store
    except FolderInUse as error:
        whose = str(error).partition(";")[0]
        raise FolderInUse(f"{whose}; stop that process first (kvtier stats works while it runs)") from error
    except OSError as error:
        if isinstance(error.__cause__, DAMAGE):
            raise StoreDamaged(f"store {folder} is damaged: {error.__cause__}") from error
        if error.errno is None:  # not a system error: the files cannot be trusted, and the message says why
            raise StoreLost(str(error)) from error
        raise


def _miscount(store: LmdbStore) -> str:
    try:
        store.check()
    except AssertionError as error:
        return str(error)
    return ""


def sample_of(keys: Iterable[bytes], size: int) -> list[bytes]:
    """Return a random sample of *size* of the *keys*, each equally likely, in their order (reservoir sampling)."""
    chosen: list[tuple[int, bytes]] = []
    for number, key in enumerate(keys):
        if number < size:
            chosen.append((number, key))
        elif (place := random.randrange(number + 1)) < size:
            chosen[place] = (number, key)
    return [key for _, key in sorted(chosen)]
