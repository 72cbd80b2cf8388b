"""HostBlocks: what is known of the blocks in host memory beside their names."""

from array import array

import numpy as np
import numpy.typing as npt

from kvtier.store.blob_store import TENANT_BYTES
from kvtier.store.record import DIGEST_BYTES
from kvtier.tiers.block_hash import BlockName
from kvtier.tiers.tenants import NOBODY, Ties

NAME_BYTES = 32  # of the longest name


class HostBlocks:
    """Digest, parent and tenant of each block in one group's host slots. Owned by the cache's thread.

    Flat arrays, made once: a dict with a million entries stops for tens of milliseconds when it grows, and a garbage
    collection walks through a million `Ties`.
    """

    def __init__(self, num_slots: int) -> None:
        self._known = np.zeros(num_slots, np.bool_)
        self._digests = memoryview(bytearray(DIGEST_BYTES * num_slots))
        self._parents = memoryview(bytearray(NAME_BYTES * num_slots))
        self._parent_bytes = bytearray(num_slots)  # of each parent's name; 0 if there is none
        self._tenants = array("Q", bytes(TENANT_BYTES * num_slots))  # 0: nobody

    def record(self, slot: int, digest: bytes, ties: Ties) -> None:
        """A block is in the slot."""
        self._known[slot] = True
        self._digests[slot * DIGEST_BYTES : (slot + 1) * DIGEST_BYTES] = digest
        self._tenants[slot] = int.from_bytes(ties.tenant, "little")
        self._parent_bytes[slot] = 0
        if ties.parent is not None:
            start = slot * NAME_BYTES
            self._parent_bytes[slot] = len(ties.parent)
            self._parents[start : start + len(ties.parent)] = ties.parent

    def digest(self, slot: int) -> bytes:
        """Of the bytes in the slot, taken when they arrived."""
        return bytes(self._digests[slot * DIGEST_BYTES : (slot + 1) * DIGEST_BYTES])

    def ties(self, slot: int) -> Ties:
        """What the block in the slot is tied to."""
        start, num_bytes = slot * NAME_BYTES, self._parent_bytes[slot]
        parent = BlockName(bytes(self._parents[start : start + num_bytes])) if num_bytes else None
        return Ties(parent, self.tenant(slot))

    def tenant(self, slot: int) -> bytes:
        """Whose block is in the slot."""
        number = self._tenants[slot]
        return number.to_bytes(TENANT_BYTES, "little") if number else NOBODY

    def of_tenant(self, slots: npt.NDArray[np.int32], tenant: bytes) -> npt.NDArray[np.bool_]:
        """For each of the slots, whether the block in it is the tenant's."""
        own: npt.NDArray[np.bool_] = self._known[slots]
        own &= np.frombuffer(self._tenants, np.uint64)[slots] == np.uint64(int.from_bytes(tenant, "little"))
        return own

    def forget(self, slots: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The slots' blocks can no longer be found; those of the slots that had one."""
        known = slots[self._known[slots]]
        self._known[known] = False
        return known

    def slots(self) -> npt.NDArray[np.int32]:
        """All slots that have a block."""
        return np.flatnonzero(self._known).astype(np.int32)
