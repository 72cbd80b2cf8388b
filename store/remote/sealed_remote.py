"""`SealedRemote`: blocks in a remote store, sealed before they are sent and verified when they are received."""

from collections.abc import Sequence

from kvtier.store.blob_store import Blob
from kvtier.store.codec.cipher import Cipher
from kvtier.store.codec.codec import NO_CODEC, Codec
from kvtier.store.codec.codec_choice import CodecChoice
from kvtier.store.codec.seal import seal, unseal
from kvtier.store.record import HEADER_BYTES, Fault
from kvtier.store.remote_store import RemoteRecord, RemoteStore, RemoteUsage


class SealedRemote:
    """A client of a `RemoteStore` that verifies each value: a read returns the key's block or a fault.

    Records have the same bytes as on disk: a header with a checksum of header and key, the encoded and possibly
    encrypted payload, and a digest of the block. So a value of another key, a part of a value, or a value that was
    encrypted with another encryption key gives a fault. All methods are thread-safe. The caller closes *store*.
    """

    def __init__(self, store: RemoteStore, codec: Codec | CodecChoice = NO_CODEC, cipher: Cipher | None = None) -> None:
        self._store = store
        self._codec = codec
        self._cipher = cipher
        self.where = store.where

    def usage(self) -> RemoteUsage:
        """Return the requests to the store so far, as a snapshot."""
        return self._store.usage()

    def read_many(self, keys: Sequence[bytes], outs: Sequence[memoryview]) -> list[bytes | Fault]:
        """Copy each block into its buffer in *outs*, and verify it there. Return for each key its digest or a fault.

        A buffer must have exactly the block's raw length. It holds arbitrary bytes after a fault. Raises
        `RemoteUnavailable` if the whole request failed.
        """
        values = self._store.get_many(keys)
        return [self._open(key, value, out) for key, value, out in zip(keys, values, outs, strict=True)]

    def put_many(self, blobs: Sequence[Blob]) -> list[bool]:
        """Seal and put the blobs, and return for each whether it was stored.

        The blobs of one chain must be in the order of the chain. Raises `RemoteUnavailable` if the whole request
        failed, and ValueError for a block that the codec cannot encode.
        """
        return self._store.put_many([self._sealed(blob) for blob in blobs])

    def exist_many(self, keys: Sequence[bytes], apart: bool = False) -> list[bool | None]:
        """Return for each key whether it has a record, or None if the request failed; see `RemoteStore.exist_many`.

        The records are not read, so they may turn out to be damaged. Raises `RemoteUnavailable` if the whole request
        failed.
        """
        return self._store.exist_many(keys, apart)

    def _sealed(self, blob: Blob) -> RemoteRecord:
        sealed = seal(blob, self._codec, self._cipher)
        return RemoteRecord(sealed.key, sealed.header, sealed.payload, blob.parent)

    def _open(self, key: bytes, value: memoryview | Fault, out: memoryview) -> bytes | Fault:
        if isinstance(value, Fault):
            return value
        return unseal(key, bytes(value[:HEADER_BYTES]), value[HEADER_BYTES:], out, self._cipher)
