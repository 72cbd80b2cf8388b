"""Chains of small sealed records, whose keys commit to those before them as names of blocks do."""

import hashlib

from store_cases import NAMESPACE

from kvtier.store.blob_store import Blob
from kvtier.store.record import digest
from kvtier.store.remote_store import RemoteRecord


def chain_keys(
    num_blocks: int, seed: str = "", after: bytes = b"", namespace: bytes = NAMESPACE, group_id: int = 0
) -> list[bytes]:
    """Keys of a chain that goes on from the name *after*; *seed* tells chains apart."""
    keys: list[bytes] = []
    name = after
    for number in range(num_blocks):
        name = hashlib.sha256(name + f"{seed}{number}".encode()).digest()
        keys.append(namespace + name + group_id.to_bytes(4, "big"))
    return keys


def payload_of(key: bytes, num_bytes: int = 120) -> bytes:
    return (hashlib.sha256(key).digest() * (num_bytes // 32 + 1))[:num_bytes]


def blobs_of(keys: list[bytes], num_bytes: int = 120, first: int = 0) -> list[Blob]:
    """Blocks of the chain *keys* from number *first* on."""
    return [
        Blob(key, digest(raw := payload_of(key, num_bytes)), memoryview(raw), parent)
        for key, parent in list(zip(keys, [b"", *keys], strict=False))[first:]
    ]


def records_of(keys: list[bytes], num_bytes: int = 120) -> list[RemoteRecord]:
    """Records with a header that says nothing, for what looks at keys and lengths only."""
    payload = memoryview(bytes(num_bytes))
    return [RemoteRecord(key, b"", payload, parent) for key, parent in zip(keys, [b"", *keys], strict=False)]
