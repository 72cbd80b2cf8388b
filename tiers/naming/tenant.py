"""Tenants of blocks, and the origin of a block."""

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.store.blob_store import TENANT_BYTES
from kvtier.tiers.naming.block_hash import BlockName

NO_TENANT = b""  # the tenant of requests without a salt
OwnerNumbers = npt.NDArray[np.uint64]  # tenants as numbers, 0 for NO_TENANT


def tenant_of(cache_salt: str | None) -> bytes:
    """Return the tenant of requests with *cache_salt*: 8 bytes that do not reveal the salt; NO_TENANT without a salt.

    A tenant may use many salts: all that consist of the tenant's own salt, a NUL and any suffix.
    """
    if not cache_salt:
        return NO_TENANT
    return hashlib.sha256(b"kvtier tenant\0" + cache_salt.partition("\0")[0].encode()).digest()[:TENANT_BYTES]


def number_of(tenant: bytes) -> int:
    """Return the number of *tenant*."""
    return int.from_bytes(tenant, "little")


def tenant_with(number: int) -> bytes:
    """Return the tenant with the number *number*."""
    return number.to_bytes(TENANT_BYTES, "little") if number else NO_TENANT


class Origin(NamedTuple):
    """The block that a block continues, and its tenant.

    *parent* must stay on disk as long as this block does; None if the block is useful without it.
    """

    parent: BlockName | None = None
    tenant: bytes = NO_TENANT
