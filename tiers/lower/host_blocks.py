"""HostBlocks: digest and tenant of each block in host memory, by slot."""

import numpy as np
import numpy.typing as npt

from kvtier.store.record import DIGEST_BYTES
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.naming.tenant import OwnerNumbers, number_of, tenant_with


class HostBlocks:
    """Digest and tenant of each block in one group's host slots. Owned by the tiers' thread.

    Flat arrays, made once: a dict with a million entries stops for tens of milliseconds when it grows.
    """

    def __init__(self, num_slots: int) -> None:
        self._known = np.zeros(num_slots, np.bool_)
        self._digests = np.zeros(num_slots, f"V{DIGEST_BYTES}")
        self._tenants = np.zeros(num_slots, np.uint64)  # 0: no tenant

    def record(self, slots: Ids, digests: bytes, tenants: OwnerNumbers) -> None:
        """Record the blocks that have come to these slots. *digests* of all joined; *tenants* by their numbers."""
        self._known[slots] = True
        self._digests[slots] = np.frombuffer(digests, f"V{DIGEST_BYTES}")
        self._tenants[slots] = tenants

    def digest(self, slot: int) -> bytes:
        """The digest of the bytes in the slot, taken when they arrived."""
        return bytes(self._digests[slot])

    def digests(self, slots: Ids) -> bytes:
        """The digests of these slots' blocks, joined."""
        return self._digests[slots].tobytes()

    def tenant(self, slot: int) -> bytes:
        """The tenant of the block in the slot."""
        return tenant_with(int(self._tenants[slot]))

    def tenants(self, slots: Ids) -> OwnerNumbers:
        """The tenants of the blocks in the slots, by their numbers."""
        return self._tenants[slots]

    def of_tenant(self, slots: Ids, tenant: bytes) -> npt.NDArray[np.bool_]:
        """For each of the slots whether it has a block of the tenant's."""
        own: npt.NDArray[np.bool_] = self._known[slots]
        own &= self._tenants[slots] == np.uint64(number_of(tenant))
        return own

    def forget(self, slots: Ids) -> Ids:
        """Forget the blocks in these slots; those of the slots that had one."""
        known = slots[self._known[slots]]
        self._known[known] = False
        return known

    def slots(self) -> Ids:
        """All slots that have a block."""
        return np.flatnonzero(self._known)
