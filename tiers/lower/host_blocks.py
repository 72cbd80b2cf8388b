"""HostBlocks: what is known of the blocks in host memory beside their names."""

import numpy as np
import numpy.typing as npt

from kvtier.store.record import DIGEST_BYTES
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.naming.tenant import OwnerNumbers, number_of, tenant_with


class HostBlocks:
    """Digest and tenant of each block in one group's host slots. Owned by the cache's thread.

    Flat arrays, made once: a dict with a million entries stops for tens of milliseconds when it grows.
    """

    def __init__(self, num_slots: int) -> None:
        self._known = np.zeros(num_slots, np.bool_)
        self._digests = np.zeros(num_slots, f"V{DIGEST_BYTES}")
        self._tenants = np.zeros(num_slots, np.uint64)  # 0: nobody

    def record(self, slots: Ids, digests: bytes, tenants: OwnerNumbers) -> None:
        """Blocks are in the slots. *digests* of all of them in a row; *tenants* by their numbers."""
        self._known[slots] = True
        self._digests[slots] = np.frombuffer(digests, f"V{DIGEST_BYTES}")
        self._tenants[slots] = tenants

    def digest(self, slot: int) -> bytes:
        """Of the bytes in the slot, taken when they arrived."""
        return bytes(self._digests[slot])

    def tenant(self, slot: int) -> bytes:
        """Whose block is in the slot."""
        return tenant_with(int(self._tenants[slot]))

    def tenants(self, slots: Ids) -> OwnerNumbers:
        """Whose blocks are in the slots."""
        return self._tenants[slots]

    def of_tenant(self, slots: Ids, tenant: bytes) -> npt.NDArray[np.bool_]:
        """For each of the slots, whether the block in it is the tenant's."""
        own: npt.NDArray[np.bool_] = self._known[slots]
        own &= self._tenants[slots] == np.uint64(number_of(tenant))
        return own

    def forget(self, slots: Ids) -> Ids:
        """The slots' blocks can no longer be found; those of the slots that had one."""
        known = slots[self._known[slots]]
        self._known[known] = False
        return known

    def slots(self) -> Ids:
        """All slots that have a block."""
        return np.flatnonzero(self._known)
