"""Encryption at rest: other users of the disk cannot read K/V data, and records that they write are rejected.

The names of blocks, their order and sizes, and the tenants are not encrypted. A name is a hash of token ids. So a
reader who guesses a prompt can see whether it was cached, unless the seed of the names or the request's salt is secret.
"""

import base64
import binascii
import hashlib
import os
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvtier.extras import extra
from kvtier.store.private_file import read_private
from kvtier.store.record import DIGEST_BYTES

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import Cipher as CipherContext
    from cryptography.hazmat.primitives.ciphers.modes import GCM

KEY_BYTES = 32
_NONCE_BYTES = 12
_TAG_BYTES = 16
OVERHEAD_BYTES = _NONCE_BYTES + DIGEST_BYTES + _TAG_BYTES  # bytes that encryption adds to a payload
_KEY_ID_TAG = b"kvtier encryption key id\x00"
_MAX_BYTES = 4096  # limit for a key file or the output of a command; a key has less than a hundred bytes
_HOW_TO_MAKE_ONE = "make one with: openssl rand -hex 32"


class Cipher:
    """Encryption of stored blocks with AES-256-GCM under one key. Thread-safe, and never shows the key.

    An encrypted value is: nonce (12 bytes) ‖ ciphertext of digest (16) ‖ payload ‖ tag (16). The tag detects changes of
    the stored bytes. The digest detects damage to the raw bytes before they were encrypted. The digest is encrypted
    too, because a plain digest would reveal which records hold the same text.

    Each value has a random nonce. That is safe for 2^32 values under one key (4 PiB in blocks of 1 MiB), so change the
    key before that many are written. *key_id* (8 bytes) identifies the key without revealing it, and must be part of
    the namespace. So after the key was changed, blocks stored under the old key are ordinary misses.

    One core encrypts or decrypts about 20 GB/s in blocks of 1 MiB and 9 GB/s in blocks of 64 KiB, plus 3 us per value.
    Needs the package `cryptography`. Versions before 50 hold the GIL while they encrypt or decrypt.
    """

    cipher_id = 1  # stored in every record; never reused for another scheme

    def __init__(self, key: bytes) -> None:
        """Create a cipher. Raises ValueError unless *key* has 32 bytes, and `MissingExtra` without `cryptography`."""
        if len(key) != KEY_BYTES:
            raise ValueError(f"encryption key of {len(key)} bytes; need {KEY_BYTES} bytes")
        self.key_id = hashlib.sha256(_KEY_ID_TAG + key).digest()[:8]
        self._key = key
        self._context = _context_of(key)

    def __reduce__(self) -> "tuple[type[Cipher], tuple[bytes]]":
        return type(self), (self._key,)  # pickled only for the store's process

    @classmethod
    def from_file(cls, path: Path) -> Self:
        """Return the cipher whose key is in the file *path*: 32 raw bytes, 64 hex digits, or base64.

        Raises ValueError if there is no valid key, or if users other than the owner may use the file. The message is
        one line that says what to do.
        """
        return cls(_parse_key(_read_key(path), f"encryption key {path}"))

    @classmethod
    def from_command(cls, command: str, timeout_s: float = 30) -> Self:
        """Run *command*, and return the cipher whose key it prints in one of the formats of `from_file`.

        The command runs without a shell and gets no input. Raises ValueError if it fails. The message is one line that
        says what to do. It shows neither output nor arguments, because they may be secret.
        """
        return cls(_parse_key(_output_of(command, timeout_s), "encryption key command"))

    def encrypt(self, digest: bytes, payload: memoryview, context: bytes, value: memoryview) -> None:
        """Encrypt *digest* and *payload* into *value*, which must be OVERHEAD_BYTES longer than *payload*.

        The value cannot be decrypted without the same *context*, which is not stored in it.
        """
        end = len(value) - _TAG_BYTES
        nonce = os.urandom(_NONCE_BYTES)
        value[:_NONCE_BYTES] = nonce

        encryptor = self._context(nonce).encryptor()
        encryptor.authenticate_additional_data(context)
        start = _NONCE_BYTES + encryptor.update_into(digest, value[_NONCE_BYTES:end])
        encryptor.update_into(payload, value[start:end])
        encryptor.finalize()
        value[end:] = encryptor.tag

    def decrypt(self, value: memoryview, context: bytes, payload: memoryview) -> bytes:
        """Decrypt *value* into *payload* and return the digest.

        Raises ValueError if the value was changed, or if the key or *context* is not the one used to encrypt it.
        *payload* then holds arbitrary bytes.
        """
        from cryptography.exceptions import InvalidTag

        if value.nbytes != payload.nbytes + OVERHEAD_BYTES:
            raise ValueError(f"encrypted value of {value.nbytes} bytes is wrong for a payload of {payload.nbytes}")
        start = _NONCE_BYTES + DIGEST_BYTES
        decryptor = self._context(bytes(value[:_NONCE_BYTES])).decryptor()
        decryptor.authenticate_additional_data(context)
        digest = decryptor.update(value[_NONCE_BYTES:start])
        decryptor.update_into(value[start:-_TAG_BYTES], payload)
        try:
            decryptor.finalize_with_tag(bytes(value[-_TAG_BYTES:]))
        except InvalidTag as error:
            raise ValueError("encrypted value is not authentic: it was changed, or the key is another one") from error
        return digest

    def __repr__(self) -> str:
        return f"Cipher(key_id={self.key_id.hex()})"


def _context_of(key: bytes) -> "Callable[[bytes], CipherContext[GCM]]":
    """Return a function that creates a streaming AES-GCM context for a nonce.

    The simpler class `AESGCM` would need digest and payload in one buffer.
    """
    with extra("crypto", "encryption at rest"):
        from cryptography.hazmat.primitives.ciphers import Cipher as CipherContext
        from cryptography.hazmat.primitives.ciphers.algorithms import AES256
        from cryptography.hazmat.primitives.ciphers.modes import GCM
    algorithm = AES256(key)
    return lambda nonce: CipherContext(algorithm, GCM(nonce))


def _parse_key(text: bytes, source: str) -> bytes:
    if len(text) == KEY_BYTES:
        return text
    for decode in (binascii.unhexlify, partial(base64.b64decode, validate=True)):
        try:
            key = decode(text.strip())
        except ValueError:
            continue
        if len(key) == KEY_BYTES:
            return key
    raise ValueError(
        f"{source}: {len(text)} bytes are not a key; need 32 raw bytes, 64 hex digits or base64 of 32 bytes; "
        f"{_HOW_TO_MAKE_ONE}"
    )


def _read_key(path: Path) -> bytes:
    try:
        file = read_private(path, _MAX_BYTES)
    except OSError as error:
        raise ValueError(f"encryption key {path}: {error.strerror}; {_HOW_TO_MAKE_ONE}") from error
    if file.exposure is not None:
        raise ValueError(f"encryption key {path}: {file.exposure}")
    return file.content


def _output_of(command: str, timeout_s: float) -> bytes:
    """Return what *command* prints. Errors name only the program, because its arguments may be secret."""
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"encryption key command: {error}; close the quotation") from None
    if not arguments:
        raise ValueError("encryption key command: the command is empty; give one that prints the key")
    name = f"encryption key command {arguments[0]}"
    try:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that killing the group ends its children too, which hold the pipe
        )
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}; give the full path of a program") from None
    with process:
        give_up_at = time.monotonic() + timeout_s
        output = b""
        try:
            while piece := _read_piece(process, give_up_at):
                output += piece
                if len(output) > _MAX_BYTES:
                    os.killpg(process.pid, signal.SIGKILL)
                    raise ValueError(f"{name}: prints more than {_MAX_BYTES} bytes; let it print the key only")
            process.wait(max(0.0, give_up_at - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGKILL)
            raise ValueError(f"{name}: not finished after {timeout_s} s; run it by hand to see why") from None
    if process.returncode != 0:
        raise ValueError(f"{name}: exit status {process.returncode}; run it by hand to see why")
    return output


def _read_piece(process: "subprocess.Popen[bytes]", give_up_at: float) -> bytes:
    """Return the next bytes that *process* prints, or b"" at the end. Raises TimeoutError at *give_up_at*."""
    assert process.stdout is not None
    readable = select.poll()
    readable.register(process.stdout, select.POLLIN)
    if not readable.poll(max(0.0, give_up_at - time.monotonic()) * 1000):
        raise TimeoutError
    return os.read(process.stdout.fileno(), _MAX_BYTES)
