"""The tenant of a block, and the block that it continues."""

import hashlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.store.blob_store import TENANT_BYTES
from kvtier.tiers.naming.block_hash import BlockName

NO_TENANT = b""  # the tenant of requests without a salt
OwnerNumbers = npt.NDArray[np.uint64]  # tenants as numbers, 0 for NO_TENANT


def tenant_of(cache_salt: str | None) -> bytes:
    """The tenant of requests with that salt: 8 bytes from which the salt cannot be had; NO_TENANT without a salt.

    One tenant may have many salts: those that begin with the tenant's own and a NUL.
    """
    if not cache_salt:
        return NO_TENANT
    return hashlib.sha256(b"kvtier tenant\0" + cache_salt.partition("\0")[0].encode()).digest()[:TENANT_BYTES]


def number_of(tenant: bytes) -> int:
    """The tenant as a number."""
    return int.from_bytes(tenant, "little")


def tenant_with(number: int) -> bytes:
    """The tenant of that number."""
    return number.to_bytes(TENANT_BYTES, "little") if number else NO_TENANT


class Origin(NamedTuple):
    """Where a block comes from: the block that it continues, and its tenant.

    *parent* has to stay on disk as long as this block does; None if the block is of use without it.
    """

    parent: BlockName | None = None
    tenant: bytes = NO_TENANT
