"""HostQuotas: how many bytes of host memory each tenant has that may have only so many."""

from collections.abc import Mapping

import numpy as np

from kvtier.tiers.naming.tenant import OwnerNumbers, tenant_with


class HostQuotas:
    """A tenant without a quota is exempt, and not counted. Owned by the tiers' thread."""

    def __init__(self, quotas: Mapping[bytes, int]) -> None:
        """*quotas* in bytes, by tenant."""
        self._quotas = quotas
        self._num_bytes = dict.fromkeys(quotas, 0)

    @property
    def has_any(self) -> bool:
        """Whether anybody's host memory is counted. Without a quota it is not: each salt ever used would stay."""
        return bool(self._quotas)

    @property
    def num_bytes(self) -> dict[bytes, int]:
        """Bytes of host memory that the blocks of each tenant with a quota are in."""
        return dict(self._num_bytes)

    def count(self, owners: OwnerNumbers, num_bytes: int) -> None:
        """The owners have each a block of so many bytes more in host memory; or, if that is negative, one less."""
        if not self._quotas:
            return
        numbers, counts = np.unique(owners, return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if (tenant := tenant_with(number)) in self._num_bytes:
                self._num_bytes[tenant] += count * num_bytes

    def excess(self, tenant: bytes) -> int:
        """Bytes of host memory that the tenant has beyond its quota."""
        quota = self._quotas.get(tenant)
        return 0 if quota is None else max(0, self._num_bytes[tenant] - quota)
