"""No other user decides which files a store, or the documents, write to and read."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from store_cases import blob_of

from kvtier.server.documents.file import DocumentFolder
from kvtier.store.durability import Durability
from kvtier.store.folder import Folder
from kvtier.store.lmdb.lmdb_store import LmdbStore

CAPACITY_BYTES = 4 << 20
FOREIGN = b"nobody's business of a store's"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A closed store with ten blocks and every file that a store ever has."""
    with LmdbStore(tmp_path / "store", CAPACITY_BYTES, durability=Durability.INTERVAL, interval_s=3600.0) as store:
        store.put_many([blob_of(number) for number in range(10)])
        store.sync()
    return tmp_path / "store"


@pytest.mark.parametrize("name", ["boot_mark", "checkpoint", "data.mdb", "lock.mdb", "owner.lock", "slab-20480"])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_planted_link_is_refused_and_what_it_leads_to_stays(
    folder: Path, tmp_path: Path, name: str, link: Callable[[Path, Path], None]
) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(FOREIGN)
    (folder / name).unlink()
    link(foreign, folder / name)

    try:
        with LmdbStore(folder, CAPACITY_BYTES, durability=Durability.INTERVAL, interval_s=0.0) as store:
            store.put_many([blob_of(100)])
            store.sync()
    except OSError:
        pass

    assert foreign.read_bytes() == FOREIGN


@pytest.mark.parametrize("name", ["lock.mdb", "owner.lock", "data.mdb"])
def test_a_link_that_leads_nowhere_makes_no_file_there(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "to be made")

    with suppress(OSError), LmdbStore(folder, CAPACITY_BYTES) as store:
        assert name == "data.mdb"  # without it there is no store: all is removed first, the link too
        store.put_many([blob_of(1)])

    assert not (tmp_path / "to be made").exists()


def test_a_folder_that_is_a_link_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)

    with pytest.raises(OSError, match="is a symbolic link; give the folder itself"):
        LmdbStore(tmp_path / "link", CAPACITY_BYTES)
    with pytest.raises(OSError, match="is a symbolic link"):
        DocumentFolder(tmp_path / "link", None, b"")


def test_a_folder_in_which_others_may_write_is_refused(folder: Path) -> None:
    folder.chmod(0o770)

    with pytest.raises(PermissionError, match=r"other users may write in it \(mode 0770\); chmod 700"):
        LmdbStore(folder, CAPACITY_BYTES)
    with pytest.raises(OSError, match="other users may write in it"):
        DocumentFolder(folder, None, b"")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_folder_or_a_file_of_another_user_is_refused(folder: Path) -> None:
    os.chown(folder / "boot_mark", 12345, -1)
    with pytest.raises(PermissionError, match="not a regular file of this user"):
        LmdbStore(folder, CAPACITY_BYTES)

    os.chown(folder, 12345, -1)
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        LmdbStore(folder, CAPACITY_BYTES)


def test_a_folder_that_is_removed_and_made_again_gets_nothing(folder: Path) -> None:
    with LmdbStore(folder, CAPACITY_BYTES, durability=Durability.INTERVAL, interval_s=3600.0) as store:
        shutil.rmtree(folder)
        folder.mkdir(0o700)
        for number in range(100, 130):
            try:
                store.put_many([blob_of(number, 4096 * (1 + number % 5))])
                store.sync()
            except OSError:
                pass

    assert list(folder.iterdir()) == []


def test_documents_follow_no_link(tmp_path: Path) -> None:
    (tmp_path / "foreign").write_bytes(FOREIGN)
    (tmp_path / "documents").mkdir(0o700)
    for name in ("a.doc", "a.doc.new"):
        (tmp_path / "documents" / name).symlink_to(tmp_path / "foreign")

    with (
        DocumentFolder(tmp_path / "documents", None, b"") as folder,  # removes what a killed process left
        pytest.raises(ValueError, match="cannot be read"),
    ):
        folder.read("a.doc")

    assert (tmp_path / "foreign").read_bytes() == FOREIGN
    assert not (tmp_path / "documents" / "a.doc.new").is_symlink()


def test_an_open_folder_stays_the_same_one(tmp_path: Path) -> None:
    with Folder.make(tmp_path / "folder") as folder:
        (tmp_path / "folder").rename(tmp_path / "elsewhere")
        (tmp_path / "folder").mkdir()

        (folder.here / "file").touch()

    assert (tmp_path / "elsewhere" / "file").exists()
