"""`MemoryRemote`: a minimal `RemoteStore` in memory."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from kvtier.store.record import Fault
from kvtier.store.remote_store import RemoteRecord, RemoteUnavailable, RemoteUsage


class MemoryRemote:
    """A `RemoteStore` in this process. Clients that are given the same *values* share them."""

    where = "memory"

    def __init__(self, values: dict[bytes, bytes] | None = None) -> None:
        """Create a client of *values*, which are by key. The caller may damage, remove or replace them at any time."""
        self._values = {} if values is None else values
        self._usage = RemoteUsage()
        self._is_closed = False
        self._lock = threading.Lock()  # guards the usage; a dict's own methods are atomic

    def get_many(self, keys: Sequence[bytes]) -> list[memoryview | Fault]:
        self._check_open()
        values = [self._values.get(key) for key in keys]
        self._count(num_reads=len(keys), read_bytes=sum(len(value) for value in values if value is not None))
        return [Fault.MISSING if value is None else memoryview(value) for value in values]

    def put_many(self, records: Sequence[RemoteRecord]) -> list[bool]:
        self._check_open()
        values = {record.key: record.header + bytes(record.payload) for record in records}
        self._values.update(values)
        self._count(num_writes=len(records), written_bytes=sum(map(len, values.values())))
        return [True] * len(records)

    def exist_many(self, keys: Sequence[bytes], apart: bool = False) -> list[bool | None]:
        self._check_open()
        self._count(num_questions=len(keys))
        return [key in self._values for key in keys]

    def forget(self, namespace: bytes) -> None:
        self._check_open()
        for key in [key for key in list(self._values) if key.startswith(namespace)]:
            self._values.pop(key, None)

    def usage(self) -> RemoteUsage:
        with self._lock:
            return self._usage

    def close(self) -> None:
        self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise RemoteUnavailable("the store is closed")

    def _count(
        self,
        num_reads: int = 0,
        num_writes: int = 0,
        num_questions: int = 0,
        read_bytes: int = 0,
        written_bytes: int = 0,
    ) -> None:
        with self._lock:
            before = self._usage
            self._usage = replace(
                before,
                num_reads=before.num_reads + num_reads,
                num_writes=before.num_writes + num_writes,
                num_questions=before.num_questions + num_questions,
                read_bytes=before.read_bytes + read_bytes,
                written_bytes=before.written_bytes + written_bytes,
            )
