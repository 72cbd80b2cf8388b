"""DiskTier: a blob store seen as a tier: keys under one namespace, faults counted, never an exception upwards."""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvtier.store.blob_store import Blob, BlobStore
from kvtier.store.record import Fault
from kvtier.tiers.block_hash import BlockName
from kvtier.tiers.statistics import TierStatistics

NAMESPACE_BYTES = 16
GROUP_BYTES = 4
REST_S = 1.0


class DiskTier:
    """Key = namespace (16 B) ‖ block name ‖ group id (4 B, big endian).

    `holds` and `forget` are the owner's; `read` and `write` run on a lane's thread.
    """

    def __init__(self, store: BlobStore, namespace: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        assert len(namespace) == NAMESPACE_BYTES, f"a namespace has {NAMESPACE_BYTES} bytes, not {len(namespace)}"
        self.store = store
        self.faults: Counter[str] = Counter()
        self._namespace = namespace
        self._clock = clock
        self._rests_until = -math.inf

    def key(self, group_id: int, name: BlockName) -> bytes:
        """The store's key of a block."""
        return self._namespace + name + group_id.to_bytes(GROUP_BYTES, "big")

    def block_of(self, key: bytes) -> tuple[int, BlockName] | None:
        """Group and name of a key; None if the key is another namespace's."""
        if not key.startswith(self._namespace):
            return None
        return int.from_bytes(key[-GROUP_BYTES:], "big"), BlockName(key[NAMESPACE_BYTES:-GROUP_BYTES])

    def names(self, num_groups: int) -> list[list[BlockName]]:
        """The blocks that the store has of this namespace, by group, the oldest first. Reads the whole index."""
        names: list[list[BlockName]] = [[] for _ in range(num_groups)]
        try:
            for key in self.store.keys():  # noqa: SIM118  # no dict
                block = self.block_of(key)
                if block is not None and block[0] < num_groups:
                    names[block[0]].append(block[1])
        except OSError:
            self.faults[Fault.IO_ERROR.value] += 1
        return names

    def rest(self) -> None:
        """Answer no question for a while: reading takes longer than requests can wait."""
        self._rests_until = self._clock() + REST_S

    def holds(self, group_id: int, name: BlockName) -> bool:
        """Whether the store has a record of the block; an index look-up, no payload is read. No while it rests."""
        if self._clock() < self._rests_until:
            return False
        try:
            return self.store.contains(self.key(group_id, name))
        except OSError:
            self.faults[Fault.IO_ERROR.value] += 1
            return False

    def read(self, keys: Sequence[bytes], blocks: Sequence[memoryview]) -> list[bytes | Fault]:
        """Read each key's block into its memory, verified; the digest, or why there is none."""
        return self.store.read_many(keys, blocks)

    def write(self, blobs: Sequence[Blob]) -> list[bytes]:
        """Store the blobs, first of them first evicted; the keys that had to go for them."""
        return self.store.put_many(blobs)

    def clear(self) -> bool:
        """Delete every record of this namespace; False if the store could not, and may have some left."""
        try:
            self.store.delete([key for key in self.store.keys() if self.block_of(key) is not None])  # noqa: SIM118  # no dict
        except OSError:
            self.faults[Fault.IO_ERROR.value] += 1
            return False
        return True

    def statistics(self) -> TierStatistics:
        """The store, all namespaces together; faults as this process has met them."""
        try:
            stored = self.store.statistics()
        except OSError:
            self.faults[Fault.IO_ERROR.value] += 1
            return TierStatistics(corrupt=dict(self.faults))
        return TierStatistics(
            num_blocks=stored.num_records,
            num_bytes=stored.stored_bytes,
            capacity_bytes=stored.capacity_bytes,
            num_evicted=stored.evicted_total,
            corrupt=dict(self.faults),
        )
