"""DocumentFolder: stores documents on disk, one file each. If [disk] has an encryption key, the files are encrypted.

A file consists of a magic number, a digest (xxh3_128, 16 bytes) and a `_Record` in msgpack. In an encrypted file, the
output of `Cipher.encrypt` replaces the digest and the record. The file's name consists of digests of tenant and id.
"""

import hashlib
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
import xxhash

from kvtier.server.documents.document import Document, Form
from kvtier.store.codec.cipher import OVERHEAD_BYTES, Cipher
from kvtier.store.folder import Folder, open_private, sync_folder
from kvtier.store.owner_lock import FolderInUse, OwnerLock
from kvtier.store.record import DIGEST_BYTES

log = logging.getLogger(__name__)

CLEAR, ENCRYPTED = b"kvtdoc1\0", b"kvtdoc1E"
SUFFIX = ".doc"
_UNFINISHED = ".new"  # suffix of a file that is being written


class Damaged(ValueError):
    """Error for a file that does not hold a document, or that cannot be read with this configuration."""


class _Record(msgspec.Struct, frozen=True):
    id: str
    tenant: str | None
    form: str
    text: str | None
    system: str | None
    token_ids: bytes  # int32, little endian
    lora: str | None
    cache_salt: str | None
    created_at: float
    was_ready: bool
    pinned_until: float | None
    tokenizer: bytes


class DocumentFolder:
    """The folder in which documents are stored. Only one thread at a time may use it; every method may block.

    A lock prevents two processes from using the folder at once. Otherwise, one process could remove a file that the
    other is writing, and would not see the other's changes.
    """

    def __init__(self, path: Path, cipher: Cipher | None, tokenizer: bytes) -> None:
        """Open the folder at *path*, or create it. *tokenizer* is the `tokenizer_digest` of the current tokenizer.

        Raises FolderInUse if another process has the folder open, and OSError if it cannot be opened.
        """
        self.path = path
        self._cipher = cipher
        self._tokenizer = tokenizer
        try:
            with ExitStack() as undo:
                self._folder = undo.enter_context(Folder.make(path))
                undo.callback(OwnerLock(self._folder).release)
                if self._folder.mode & (stat.S_IRWXG | stat.S_IRWXO):
                    log.warning("documents %s: other users may read the folder; chmod 700 it", path)
                for unfinished in self._folder.here.glob(f"*{SUFFIX}{_UNFINISHED}"):
                    unfinished.unlink(missing_ok=True)
                self._let_go = undo.pop_all()
        except FolderInUse:
            raise
        except OSError as error:
            raise OSError(f"documents {path}: {error.strerror}; give [documents] another path") from error

    def close(self) -> None:
        """Release the lock, so that another process can open the folder. A second call does nothing."""
        self._let_go.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, document: Document) -> None:
        """Write a document's file atomically and durably; raise OSError if that fails."""
        content = msgspec.msgpack.encode(
            _Record(
                document.id,
                document.tenant,
                document.form,
                document.text,
                document.system,
                document.token_ids.astype("<i4").tobytes(),
                document.lora,
                document.cache_salt,
                document.created_at,
                document.was_ready,
                document.pinned_until,
                self._tokenizer,
            )
        )
        name = file_name(document.tenant, document.id)
        file, unfinished = self._folder.here / name, self._folder.here / f"{name}{_UNFINISHED}"
        with open(unfinished, "wb", opener=open_private) as output:
            output.write(self._sealed(name, content))
            output.flush()
            os.fsync(output.fileno())
        unfinished.replace(file)
        sync_folder(self._folder.here)

    def remove(self, name: str) -> None:
        """Remove the file *name* if it exists; raise OSError if that fails."""
        with suppress(FileNotFoundError):
            (self._folder.here / name).unlink()
            sync_folder(self._folder.here)

    def names(self) -> list[str]:
        """Return the names of all document files; raise OSError if the folder cannot be read."""
        return sorted(file.name for file in self._folder.here.glob(f"*{SUFFIX}"))

    def read(self, name: str) -> tuple[Document, bool]:
        """Return the document in the file *name*, and whether its token ids are from the current tokenizer.

        Raises Damaged if the file cannot be read, or does not hold a document.
        """
        try:
            with open(self._folder.here / name, "rb", opener=open_private) as file:
                value = file.read()
        except OSError as error:
            raise Damaged(f"it cannot be read ({error.strerror})") from error
        try:
            record = msgspec.msgpack.decode(self._opened(name, value), type=_Record)
            document = Document(
                record.id,
                record.tenant,
                Form(record.form),
                record.text,
                record.system,
                np.frombuffer(record.token_ids, "<i4").astype(np.int32),
                record.lora,
                record.cache_salt,
                record.created_at,
                record.was_ready,
                record.pinned_until,
            )
        except Damaged:
            raise
        except (msgspec.DecodeError, ValueError) as error:
            raise Damaged("its content is not a document") from error
        if file_name(document.tenant, document.id) != name:
            raise Damaged("its name is that of another document's file; was it renamed or copied?")
        return document, record.tokenizer == self._tokenizer

    def _sealed(self, name: str, content: bytes) -> bytes:
        digest = xxhash.xxh3_128_digest(content)
        if self._cipher is None:
            return CLEAR + digest + content
        value = bytearray(len(content) + OVERHEAD_BYTES)
        self._cipher.encrypt(digest, memoryview(content), _context(name), memoryview(value))
        return ENCRYPTED + value

    def _opened(self, name: str, value: bytes) -> bytes:
        magic, value = value[: len(CLEAR)], value[len(CLEAR) :]
        if magic == ENCRYPTED and self._cipher is None:
            raise Damaged("it is encrypted, but [disk] has no encryption key; configure the key")
        if magic == CLEAR and self._cipher is not None:  # not trusted, because it can be written without the key
            raise Damaged("it is not encrypted, but [disk] has an encryption key; put the document again")
        if self._cipher is not None and magic == ENCRYPTED and len(value) >= OVERHEAD_BYTES:
            content = bytearray(len(value) - OVERHEAD_BYTES)
            try:
                digest = self._cipher.decrypt(memoryview(value), _context(name), memoryview(content))
            except ValueError as error:
                raise Damaged("it cannot be decrypted: the file was changed, or encrypted with another key") from error
        elif self._cipher is None and magic == CLEAR:
            digest, content = value[:DIGEST_BYTES], bytearray(value[DIGEST_BYTES:])
        else:
            raise Damaged("its first bytes are not those of a document's file")
        if xxhash.xxh3_128_digest(content) != digest:
            raise Damaged("it is corrupt: its bytes do not match their digest; put the document again")
        return bytes(content)


def file_name(tenant: str | None, document_id: str) -> str:
    """Return the name of a document's file. It consists of digests, which reveal neither the tenant nor the id."""
    return f"{tenant_prefix(tenant)}{_digest('id', document_id)}{SUFFIX}"


def tenant_prefix(tenant: str | None) -> str:
    """Return the prefix of the names of all files of a tenant."""
    return _digest("nobody" if tenant is None else "tenant", tenant or "")[:16] + "-"


def read_all(folder: DocumentFolder) -> Iterator[tuple[str, tuple[Document, bool] | Damaged]]:
    """Yield the name of each file, with the result of `DocumentFolder.read` or the `Damaged` error that it raised."""
    for name in folder.names():
        try:
            yield name, folder.read(name)
        except Damaged as damage:
            yield name, damage


def _digest(tag: str, text: str) -> str:
    content = f"kvtier document {tag}\0".encode() + text.encode("utf-8", "surrogatepass")
    return hashlib.sha256(content).hexdigest()[:40]


def _context(name: str) -> bytes:
    return ENCRYPTED + name.encode()
