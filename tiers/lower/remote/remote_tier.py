"""The remote tier: a store that several machines share, with hints of its content and its health."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.store.blob_store import Blob
from kvtier.store.record import Fault
from kvtier.store.remote_store import RemoteUnavailable, RemoteUsage
from kvtier.tiers.lower.breaker import CircuitBreaker
from kvtier.tiers.lower.name_set import NAMESPACE_BYTES, block_key
from kvtier.tiers.lower.remote.presence import RemoteHints
from kvtier.tiers.lower.remote.remote_statistics import RemoteStatistics
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.transfer.lane import Lane

MAX_REST_S = 1.0  # maximum time between probes of a failing store; short, because no request waits for a probe
MAX_SPOILT = 1 << 10  # maximum number of remembered blocks whose bad record is to be overwritten


class RemoteRecords(Protocol):
    """A remote store that verifies the records it reads; see `SealedRemote`. Called only by copy threads."""

    @property
    def where(self) -> str:
        """The store's address, for display."""

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes | Fault]: ...

    def put_many(self, blobs: Sequence[Blob]) -> list[bool]: ...

    def exist_many(self, keys: Sequence[bytes], apart: bool = False) -> list[bool | None]: ...

    def usage(self) -> RemoteUsage: ...


class RemoteTier:
    """A remote store, in which blocks are found by attention group and name.

    No index of the store is kept. The store is queried, and its answers are remembered as hints. Copy threads call only
    `read`, `write` and `ask`. The tiers' thread calls everything else, which does not block. Queries, reads and writes
    each have a circuit breaker, and are suspended while their breaker is open.
    """

    def __init__(self, records: RemoteRecords, namespace: bytes, asks: Lane, clock: Callable[[], float]) -> None:
        """Create the tier over the store *records*. *asks* is the queue of queries; the caller closes it."""
        assert len(namespace) == NAMESPACE_BYTES, f"a namespace has {NAMESPACE_BYTES} bytes, not {len(namespace)}"
        self.asks = asks
        self.presence = RemoteHints(clock)
        # Opened by a single failure, because requests wait for queries.
        self.asking = CircuitBreaker(clock, max_failures=1, max_rest_s=MAX_REST_S)
        self.reading = CircuitBreaker(clock, max_rest_s=MAX_REST_S)
        self.writing = CircuitBreaker(clock, max_rest_s=MAX_REST_S)
        self.faults: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()  # the counts of `RemoteStatistics`
        self._records = records
        self._namespace = namespace
        self._spoilt: deque[bytes] = deque(maxlen=MAX_SPOILT)  # keys under which a bad record was found
        self._why_failed = {"ask": "", "read": "", "write": ""}  # the last error of each, set by lanes' threads

    def key(self, group_id: int, name: BlockName) -> bytes:
        """Return the store's key of a block."""
        return block_key(self._namespace, group_id, name)

    def are_held(self, group_id: int, names: Sequence[BlockName]) -> npt.NDArray[np.bool_]:
        """Return for each block whether it is believed to be in the store; False while reads are suspended."""
        return self.presence.are_held(group_id, names) if self.reading.is_closed else np.zeros(len(names), np.bool_)

    def ask(self, keys: Sequence[bytes], apart: bool = False) -> list[bool | None]:
        """Return for each key whether the store seems to have a record; None if that could not be determined.

        *apart* says whether a record may exist without the records of the keys before it. The store's exceptions
        propagate.
        """
        with self._errors_of("ask"):
            return self._records.exist_many(keys, apart)

    def read(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> list[bytes | Fault]:
        """Read the block of each key into the memory at the same index of *blocks*, and verify it.

        Returns for each key the block's digest, or the fault if the block could not be read.
        """
        with self._errors_of("read"):
            return self._records.read_many(keys, blocks)

    def write(self, blobs: Sequence[Blob], spoilt: frozenset[bytes]) -> tuple[list[bool], int]:
        """Write the blobs that the store lacks, and overwrite the bad records that it has under the *spoilt* keys.

        Returns for each blob whether it is in the store now, and the number of blobs that were written. Raises
        `RemoteUnavailable` if none of the blobs is in the store afterwards. The store's exceptions propagate.
        """
        with self._errors_of("write"):
            apart = not any(blob.parent for blob in blobs)
            are_there = map(bool, self._records.exist_many([blob.key for blob in blobs], apart))
            are_good = [is_there and blob.key not in spoilt for blob, is_there in zip(blobs, are_there, strict=True)]
            new = [blob for blob, is_good in zip(blobs, are_good, strict=True) if not is_good]
            are_put = iter(self._records.put_many(new) if new else ())
            outcome = [is_good or next(are_put) for is_good in are_good]
            if not any(outcome):
                raise RemoteUnavailable("the store takes no block: it is full or read-only; free space or allow writes")
            return outcome, sum(outcome) - sum(are_good)

    def on_read_failed(self, group_id: int, name: BlockName, fault: Fault) -> None:
        """Handle a read that failed with *fault*.

        After an I/O error, the record may be intact. After any other fault, the block counts as absent from the store.
        A bad record is overwritten when its block is written the next time.
        """
        self.faults[fault.value] += fault is not Fault.MISSING
        if fault is not Fault.IO_ERROR:
            self.presence.remove(group_id, name)
        if fault.is_bad_record:
            self._spoilt.append(self.key(group_id, name))

    def spoilt(self, keys: Sequence[bytes]) -> frozenset[bytes]:
        """Return those of *keys* under which the store was recently found to have a bad record."""
        return frozenset(self._spoilt).intersection(keys) if self._spoilt else frozenset()

    def on_written(self, keys: frozenset[bytes]) -> None:
        """Record that the store's records under *keys*, which were bad, have been overwritten."""
        for key in keys.intersection(self._spoilt):
            self._spoilt.remove(key)

    def statistics(self, num_wanted: int, ask_s: float) -> RemoteStatistics:
        """Return the tier's statistics.

        *num_wanted* is the number of blocks still to be written, and *ask_s* the recent latency of a query in seconds.
        """
        breakers = {"ask": self.asking, "read": self.reading, "write": self.writing}
        return RemoteStatistics(
            self._records.where,
            self._records.usage(),
            self.presence.num_blocks,
            self.counts["asked"],
            self.counts["late"],
            self.counts["stored"],
            self.counts["there"],
            self.counts["refused"],
            num_wanted,
            ask_s,
            {side: breaker.state for side, breaker in breakers.items()},
            {side: breaker.num_opened for side, breaker in breakers.items()},
            dict(self._why_failed),
            dict(self.faults),
        )

    @contextmanager
    def _errors_of(self, side: str) -> Iterator[None]:
        """Remember an error of "ask", "read" or "write" for display, and let the error propagate."""
        try:
            yield
        except OSError as error:
            self._why_failed[side] = " ".join(str(error).split())
            raise
