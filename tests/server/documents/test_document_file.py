"""Files of documents: whatever happens to a file, reading it gives the document or says that it is damaged."""

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from kvtier.server.documents.document import Document, Form
from kvtier.server.documents.file import Damaged, DocumentFolder, file_name
from kvtier.store.codec.cipher import Cipher

CIPHERS = [None, Cipher(bytes(range(32)))]
TOKENIZER = b"of these tests"


def document_of(text: str = "some text", tenant: str | None = "ann") -> Document:
    tokens = np.arange(20, dtype=np.int32)
    return Document("report", tenant, Form.CHAT, text, "Be brief.", tokens, "adapter", "salt", 12.5, True, 99.5)


@pytest.mark.parametrize("cipher", CIPHERS)
def test_what_is_written_is_read(tmp_path: Path, cipher: Cipher | None) -> None:
    folder, document = DocumentFolder(tmp_path / "a" / "b", cipher, TOKENIZER), document_of()

    folder.write(document)
    found, is_of_tokenizer = folder.read(file_name("ann", "report"))

    assert is_of_tokenizer
    assert found.has_content_of(document)
    assert (found.id, found.tenant, found.created_at, found.was_ready) == ("report", "ann", 12.5, True)
    assert found.pinned_until == 99.5
    assert folder.names() == [file_name("ann", "report")]
    folder.close()
    with DocumentFolder(folder.path, cipher, b"other") as other:
        assert not other.read(other.names()[0])[1]
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder.path / file_name("ann", "report")).stat().st_mode) == 0o600


@pytest.mark.parametrize("field", ["form", "text", "system", "lora", "cache_salt", "token_ids"])
def test_content_is_another_if_any_part_of_it_is(field: str) -> None:
    document, other = document_of(), document_of()
    assert document.has_content_of(other)

    setattr(other, field, np.arange(21, dtype=np.int32) if field == "token_ids" else "another")

    assert not document.has_content_of(other)
    assert not other.has_content_of(document)


@pytest.mark.parametrize("cipher", CIPHERS)
def test_every_changed_byte_and_every_cut_is_noticed(tmp_path: Path, cipher: Cipher | None) -> None:
    folder, name = DocumentFolder(tmp_path, cipher, TOKENIZER), file_name("ann", "report")
    folder.write(document_of())
    whole = (tmp_path / name).read_bytes()
    damaged = [
        whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :] for place in range(len(whole))
    ]
    damaged += [whole[:length] for length in range(len(whole))] + [whole + b"\0"]

    for content in damaged:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(Damaged):
            folder.read(name)
    folder.close()


@pytest.mark.parametrize("cipher", CIPHERS)
def test_one_document_s_file_is_no_other_s(tmp_path: Path, cipher: Cipher | None) -> None:
    with DocumentFolder(tmp_path, cipher, TOKENIZER) as folder:
        folder.write(document_of())

        (tmp_path / file_name("bob", "report")).write_bytes((tmp_path / file_name("ann", "report")).read_bytes())

        with pytest.raises(Damaged):
            folder.read(file_name("bob", "report"))


def test_with_a_key_nothing_of_it_can_be_read_and_nothing_in_clear_is_believed(tmp_path: Path) -> None:
    cipher, name = Cipher(bytes(range(32))), file_name("ann", "report")
    with DocumentFolder(tmp_path, cipher, TOKENIZER) as encrypted:
        encrypted.write(document_of("a secret"))

    assert b"secret" not in (tmp_path / name).read_bytes()
    with DocumentFolder(tmp_path, None, TOKENIZER) as clear:
        with pytest.raises(Damaged, match="configure the key"):
            clear.read(name)
        clear.write(document_of("a forgery"))
    with DocumentFolder(tmp_path, cipher, TOKENIZER) as encrypted, pytest.raises(Damaged, match="not encrypted"):
        encrypted.read(name)


def test_names_tell_nothing_and_never_meet() -> None:
    pairs = [(tenant, name) for tenant in (None, "ann", "an", "") for name in ("report", "nreport", "r")]

    names = {file_name(tenant, name) for tenant, name in pairs}

    assert len(names) == len(pairs)
    assert not any("report" in name or "ann" in name for name in names)


def test_what_was_being_written_when_a_process_died_is_removed(tmp_path: Path) -> None:
    name = file_name("ann", "report")
    with DocumentFolder(tmp_path, None, TOKENIZER) as folder:
        folder.write(document_of())
    (tmp_path / f"{name}.new").write_bytes(b"half")

    with DocumentFolder(tmp_path, None, TOKENIZER) as folder:
        found, _ = folder.read(name)

    assert found.text == "some text"
    assert sorted(os.listdir(tmp_path)) == [name, "owner.lock"]


def test_a_folder_that_cannot_be_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(OSError, match="give \\[documents\\] another path"):
        DocumentFolder(tmp_path / "file", None, TOKENIZER)


def test_a_folder_that_others_may_look_into_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o755)

    DocumentFolder(tmp_path, None, TOKENIZER).close()

    assert "chmod 700" in caplog.text
