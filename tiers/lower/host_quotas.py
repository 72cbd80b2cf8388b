"""Quotas on host memory: a tenant that exceeds its quota loses its oldest blocks from host memory."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.ma  # otherwise the first call of `np.unique` imports it, which takes 10 ms
import numpy.typing as npt

from kvtier.store.record import DIGEST_BYTES
from kvtier.tiers.device.group_slots import GroupSlots
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.naming.named_blocks import OwnerNumbers, number_of, tenant_with
from kvtier.tiers.naming.tier import EvictionCause

QUOTA_PART = 1 << 12  # entries of the eviction order that are searched at a time for blocks of a tenant
MAX_SHED = 128  # maximum number of blocks evicted for a quota at a time


class HostBlocks:
    """The content digest and the tenant of each block that one attention group has in host memory.

    The data is in flat arrays that are allocated once, because a dict with a million entries stalls for tens of
    milliseconds when it grows. Owned by the tiers' thread.
    """

    def __init__(self, num_slots: int) -> None:
        self._known = np.zeros(num_slots, np.bool_)
        self._digests = np.zeros(num_slots, f"V{DIGEST_BYTES}")
        self._tenants = np.zeros(num_slots, np.uint64)  # 0: no tenant
        for each in (self._known, self._digests.view(np.uint8), self._tenants):
            each.fill(0)  # makes the kernel allocate the memory now: a huge page later takes 5 ms of a call

    def record(self, slots: Ids, digests: bytes, tenants: OwnerNumbers) -> None:
        """Record the digests and tenants of the blocks that are now in *slots*.

        *digests* has the blocks' digests, concatenated. *tenants* has the number of each block's tenant.
        """
        self._known[slots] = True
        self._digests[slots] = np.frombuffer(digests, f"V{DIGEST_BYTES}")
        self._tenants[slots] = tenants

    def digest(self, slot: int) -> bytes:
        """Return the digest that was recorded when the block arrived in the slot."""
        return bytes(self._digests[slot])

    def digests(self, slots: Ids) -> bytes:
        """Return the concatenated digests of the blocks in these slots."""
        return self._digests[slots].tobytes()

    def tenant(self, slot: int) -> bytes:
        """Return the tenant of the block in the slot."""
        return tenant_with(int(self._tenants[slot]))

    def tenants(self, slots: Ids) -> OwnerNumbers:
        """Return the tenants of the blocks in the slots, as numbers."""
        return self._tenants[slots]

    def of_tenant(self, slots: Ids, tenant: bytes) -> npt.NDArray[np.bool_]:
        """Return for each slot whether it holds a block of *tenant*."""
        own: npt.NDArray[np.bool_] = self._known[slots]
        own &= self._tenants[slots] == np.uint64(number_of(tenant))
        return own

    def forget(self, slots: Ids) -> Ids:
        """Forget the blocks in *slots*, and return those of the slots that held a block."""
        known = slots[self._known[slots]]
        self._known[known] = False
        return known

    def clear(self) -> None:
        """Forget the blocks in all slots. The digests of leased blocks stay readable until their slots are reused."""
        self._known.fill(False)

    def slots(self) -> Ids:
        """Return all slots that hold a block."""
        return np.flatnonzero(self._known)


class HostQuotas:
    """Limits on the host memory that each tenant may use.

    The blocks that exceed a tenant's quota are evicted. A tenant without a quota is neither limited nor counted. Owned
    by the tiers' thread.
    """

    def __init__(
        self,
        quotas: Mapping[bytes, int],
        host: Sequence[GroupSlots],
        host_blocks: Sequence[HostBlocks],
        block_bytes: Sequence[int],
    ) -> None:
        """Create the limits. *quotas* has each tenant's limit in bytes. The other arguments have one item per group."""
        self.has_any = bool(quotas)  # if False, callers need not call this object
        self._quotas = quotas
        self._host = host
        self._host_blocks = host_blocks
        self._block_bytes = block_bytes
        self._num_bytes = dict.fromkeys(quotas, 0)
        # For each group and tenant that is still over its quota: the entry of the group's eviction order from which the
        # search for the tenant's blocks continues.
        self._over: dict[tuple[int, bytes], int] = {}

    @property
    def num_bytes(self) -> dict[bytes, int]:
        """Bytes of host memory in use, by tenant with a quota."""
        return dict(self._num_bytes)

    def excess(self, tenant: bytes) -> int:
        """Return by how many bytes of host memory the tenant exceeds its quota."""
        quota = self._quotas.get(tenant)
        return 0 if quota is None else max(0, self._num_bytes[tenant] - quota)

    def add(self, group_id: int, owners: OwnerNumbers) -> None:
        """Count blocks of the group that arrived in host memory. *owners* has each block's tenant as a number."""
        self._count(owners, self._block_bytes[group_id])

    def remove(self, group_id: int, owners: OwnerNumbers) -> None:
        """Stop counting blocks of the group that left host memory. *owners* has each block's tenant as a number."""
        self._count(owners, -self._block_bytes[group_id])

    def clear(self) -> None:
        """Stop counting all blocks, because host memory was cleared."""
        self._num_bytes = dict.fromkeys(self._num_bytes, 0)
        self._over.clear()

    def enforce(self, group_id: int, tenant: bytes) -> None:
        """Evict the tenant's oldest blocks of this group from host memory if the tenant exceeds its quota.

        One call searches only a part of host memory's eviction order for blocks of the tenant. `go_on` searches the
        rest.
        """
        if self.excess(tenant):
            self._shed(group_id, tenant, self._over.pop((group_id, tenant), 0))

    def go_on(self) -> None:
        """Continue one unfinished `enforce`: evict the tenant's blocks in the next part of the eviction order."""
        if self._over:
            (group_id, tenant), start = next(iter(self._over.items()))
            del self._over[group_id, tenant]
            self._shed(group_id, tenant, start)

    def check(self) -> None:
        """Raise AssertionError if the bytes counted for a tenant differ from the bytes of its blocks."""
        num_bytes = dict.fromkeys(self._num_bytes, 0)
        for blocks, block_bytes in zip(self._host_blocks, self._block_bytes, strict=True):
            for slot in blocks.slots().tolist():
                if (tenant := blocks.tenant(slot)) in num_bytes:
                    num_bytes[tenant] += block_bytes
        assert self._num_bytes == num_bytes, "the bytes counted for a tenant with a quota are not those of its blocks"

    def _count(self, owners: OwnerNumbers, num_bytes: int) -> None:
        numbers, counts = np.unique(owners, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if (tenant := tenant_with(number)) in self._num_bytes:
                self._num_bytes[tenant] += count * num_bytes

    def _shed(self, group_id: int, tenant: bytes, start: int) -> None:
        """Evict the tenant's excess blocks among the `QUOTA_PART` entries of the eviction order from *start* on."""
        host = self._host[group_id]
        num_blocks = -(-self.excess(tenant) // self._block_bytes[group_id])
        slots, end = host.pool.order.part(start, QUOTA_PART)
        own = slots[self._host_blocks[group_id].of_tenant(slots, tenant)]
        is_dirty = host.dirty.among(own)
        limit = min(num_blocks, MAX_SHED)
        going = np.concatenate([own[~is_dirty], own[is_dirty]])[:limit]  # clean blocks first
        host.evict(going, EvictionCause.QUOTA)
        if len(going) < num_blocks:
            left = start if len(going) < len(own) else end
            if left is not None:
                self._over[group_id, tenant] = left
