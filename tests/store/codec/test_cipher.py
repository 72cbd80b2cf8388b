"""Keys: where they come from, and that they are never shown. Values: only what was encrypted is decrypted."""

import base64
import builtins
import os
import random
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from waiting import wait_for

from kvtier.store.codec.cipher import OVERHEAD_BYTES, Cipher

KEY = bytes(range(100, 132))
DIGEST = bytes(range(16))


def encrypted(cipher: Cipher, payload: bytes, context: bytes = b"context") -> bytearray:
    value = bytearray(len(payload) + OVERHEAD_BYTES)
    cipher.encrypt(DIGEST, memoryview(payload), context, memoryview(value))
    return value


def decrypted(cipher: Cipher, value: bytes, num_bytes: int, context: bytes = b"context") -> tuple[bytes, bytes]:
    payload = bytearray(num_bytes)
    return cipher.decrypt(memoryview(value), context, memoryview(payload)), bytes(payload)


def key_file(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "a key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def one_line_of(error: pytest.ExceptionInfo[ValueError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    for written in (KEY.hex(), base64.b64encode(KEY).decode(), repr(KEY)[2:-1]):
        assert written not in text
    return text


@pytest.mark.parametrize("num_bytes", [0, 1, 100_000])
def test_what_was_encrypted_is_decrypted(num_bytes: int) -> None:
    payload = os.urandom(num_bytes)

    assert decrypted(Cipher(KEY), encrypted(Cipher(KEY), payload), num_bytes) == (DIGEST, payload)


def test_every_byte_of_a_value_is_guarded() -> None:
    cipher = Cipher(KEY)
    value = encrypted(cipher, b"payload")
    for position in range(len(value)):
        damaged = bytearray(value)
        damaged[position] ^= 1

        with pytest.raises(ValueError, match="not authentic"):
            decrypted(cipher, damaged, 7)


def test_a_value_decrypts_under_its_own_key_and_context_only() -> None:
    value = encrypted(Cipher(KEY), b"payload")

    with pytest.raises(ValueError, match="not authentic"):
        decrypted(Cipher(KEY[::-1]), value, 7)
    with pytest.raises(ValueError, match="not authentic"):
        decrypted(Cipher(KEY), value, 7, b"Context")


@pytest.mark.parametrize("length", [0, 11, OVERHEAD_BYTES - 1, OVERHEAD_BYTES, OVERHEAD_BYTES + 6, OVERHEAD_BYTES + 8])
def test_a_value_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="for a payload of 7"):
        decrypted(Cipher(KEY), bytes(length), 7)


def test_the_same_block_is_never_encrypted_the_same_way() -> None:
    cipher = Cipher(KEY)
    values = [bytes(encrypted(cipher, bytes(64))) for _ in range(100)]

    for part in (slice(12), slice(12, 28), slice(28, -16), slice(-16, None)):
        assert len({value[part] for value in values}) == 100


def test_a_key_is_known_by_eight_bytes_that_never_change() -> None:
    assert Cipher(bytes(32)).key_id.hex() == "05ae1bbde4803eb9"  # in records and namespaces: for ever
    assert Cipher(KEY).key_id != Cipher(bytes(32)).key_id


def test_a_cipher_shows_no_key() -> None:
    cipher = Cipher(KEY)

    assert repr(cipher) == str(cipher) == f"Cipher(key_id={cipher.key_id.hex()})"


@pytest.mark.parametrize("length", [0, 16, 31, 33])
def test_a_key_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"key of {length} bytes; need 32"):
        Cipher(bytes(length))


@pytest.mark.parametrize(
    "content",
    [
        KEY,
        KEY.hex().encode(),
        KEY.hex().upper().encode() + b"\n",
        base64.b64encode(KEY),
        b" " + base64.b64encode(KEY) + b"\r\n",
        bytes(KEY[:-1] + b"\n"),
    ],
)
def test_a_key_file_holds_the_key_raw_in_hex_or_in_base64(tmp_path: Path, content: bytes) -> None:
    expected = content if len(content) == 32 else KEY

    assert Cipher.from_file(key_file(tmp_path, content)).key_id == Cipher(expected).key_id


@pytest.mark.parametrize(
    "content",
    [b"", b"secret", KEY + b"\n", KEY.hex().encode()[:-2], base64.b64encode(KEY[:-1]), b"?" + base64.b64encode(KEY)],
)
def test_a_file_that_holds_no_key_says_how_to_make_one(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ValueError, match="openssl rand -hex 32") as error:
        Cipher.from_file(key_file(tmp_path, content))

    text = one_line_of(error)
    assert f"{len(content)} bytes are not a key" in text
    assert "secret" not in text


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o610])
def test_a_key_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, KEY, mode)

    with pytest.raises(ValueError, match=re.escape(f"chmod 600 '{path}'")) as error:
        Cipher.from_file(path)

    assert f"mode {mode:04o}" in one_line_of(error)


def test_a_key_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file") as error:
        Cipher.from_file(tmp_path / "none")
    one_line_of(error)

    with pytest.raises(ValueError, match="Is a directory"):
        Cipher.from_file(tmp_path)


def test_a_command_prints_the_key() -> None:
    assert Cipher.from_command(f"echo '{KEY.hex()}'").key_id == Cipher(KEY).key_id
    assert Cipher.from_command(f'sh -c "echo oh >&2; echo {KEY.hex()}"').key_id == Cipher(KEY).key_id


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("", "the command is empty"),
        (f"echo '{KEY.hex()}", "close the quotation"),
        (f"no-such-program {KEY.hex()}", "no-such-program: No such file"),
        (f"sh -c 'echo {KEY.hex()}; exit 3'", "sh: exit status 3"),
        (f"echo {KEY.hex()}0", "66 bytes are not a key"),
        ("true", "0 bytes are not a key"),
    ],
)
def test_a_command_that_fails_says_why_and_shows_no_secret(command: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        Cipher.from_command(command)

    one_line_of(error)


@pytest.mark.parametrize("command", ["yes", f"sh -c 'yes & echo {KEY.hex()}; wait'"])
def test_a_command_that_prints_without_end_is_ended(command: str) -> None:
    with pytest.raises(ValueError, match="prints more than 4096 bytes") as error:
        Cipher.from_command(command, timeout_s=60)

    one_line_of(error)


def runs(argument: str) -> bool:
    """Whether any process has that argument."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if argument.encode() in (process / "cmdline").read_bytes().split(b"\0"):
                return True
    return False


def test_a_command_that_does_not_end_is_ended_with_its_children() -> None:
    seconds = f"3600.{random.randrange(1 << 40)}"

    with pytest.raises(ValueError, match=r"sh: not finished after 1 s") as error:
        Cipher.from_command(f"sh -c 'sleep {seconds} & wait; echo {KEY.hex()}'", timeout_s=1)

    one_line_of(error)
    wait_for(lambda: not runs(seconds))


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("cryptography.hazmat.primitives")]:
        monkeypatch.delitem(sys.modules, name)
    really_import: Callable[..., object] = builtins.__import__

    def refuse(name: str, *others: object) -> object:
        if name.startswith("cryptography"):
            raise ModuleNotFoundError(name)
        return really_import(name, *others)

    monkeypatch.setattr(builtins, "__import__", refuse)

    with pytest.raises(ImportError, match=re.escape("pip install 'kvtier[crypto]'")):
        Cipher(KEY)
