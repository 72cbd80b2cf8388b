"""Whose a block is, and how many bytes of host memory each tenant has."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.store.blob_store import TENANT_BYTES
from kvtier.tiers.naming.block_hash import BlockName

NOBODY = b""
OwnerNumbers = npt.NDArray[np.uint64]  # tenants as numbers, 0 for nobody


def tenant_of(cache_salt: str | None) -> bytes:
    """The tenant of requests with that salt, 8 bytes that tell nothing of it; NOBODY without a salt.

    One tenant may have many salts: those that begin with the tenant's own and a NUL.
    """
    if not cache_salt:
        return NOBODY
    return hashlib.sha256(b"kvtier tenant\0" + cache_salt.partition("\0")[0].encode()).digest()[:TENANT_BYTES]


def number_of(tenant: bytes) -> int:
    """The tenant as a number."""
    return int.from_bytes(tenant, "little")


def tenant_with(number: int) -> bytes:
    """The tenant of that number."""
    return number.to_bytes(TENANT_BYTES, "little") if number else NOBODY


class Origin(NamedTuple):
    """Where a block comes from: *parent*, the block that it continues, if that has to stay on disk for as long as this
    one; and the *tenant* whose it is."""

    parent: BlockName | None = None
    tenant: bytes = NOBODY


NO_ORIGIN = Origin()


class Tenants:
    """Device slots' tenants, and host bytes of those with a quota. A tenant without one is exempt, and not counted."""

    def __init__(self, num_device_slots: Sequence[int], quotas: Mapping[bytes, int]) -> None:
        """*num_device_slots* by group; *quotas* in bytes of host memory."""
        self._on_device = [np.zeros(num_slots, np.uint64) for num_slots in num_device_slots]
        self._has_computed = False  # a tenant with a name
        self._host_bytes = dict.fromkeys(quotas, 0)
        self._quotas = quotas

    @property
    def host_bytes(self) -> dict[bytes, int]:
        """Bytes of host memory that the blocks of each tenant with a quota are in."""
        return dict(self._host_bytes)

    @property
    def any_quotas(self) -> bool:
        """Whether anybody's host memory is counted. Without a quota it is not: each salt ever used would stay."""
        return bool(self._host_bytes)

    def computed(self, group_id: int, slots: npt.NDArray[np.intp], tenant: bytes) -> None:
        """The tenant's blocks are in these device slots."""
        if not tenant and not self._has_computed:
            return  # nobody's slots is what all are
        self._has_computed = True
        self._on_device[group_id][slots] = number_of(tenant)

    def on_device(self, group_id: int, slots: npt.NDArray[np.intp]) -> OwnerNumbers:
        """Whose blocks are in the device slots."""
        return self._on_device[group_id][slots]

    def came_to_host(self, tenant: bytes, num_bytes: int) -> None:
        """The tenant has a block more in host memory; or, if *num_bytes* is negative, one less."""
        if tenant in self._host_bytes:
            self._host_bytes[tenant] += num_bytes

    def excess(self, tenant: bytes) -> int:
        """Bytes of host memory that the tenant has beyond its quota."""
        quota = self._quotas.get(tenant)
        return 0 if quota is None else max(0, self._host_bytes[tenant] - quota)
