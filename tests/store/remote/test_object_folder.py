"""Who may read the objects of a `file://` store: keys and values are the prompts."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from remote_cases import put_blocks

from kvtier.engine.config import RemoteConfig
from kvtier.engine.stores.remote_store import remote_store


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def put(folder: Path) -> None:
    with remote_store(RemoteConfig(url=f"file://{folder}")) as store:
        assert all(put_blocks(store, 2))


def modes(folder: Path) -> tuple[set[int], set[int]]:
    """Of all folders from this one on, and of all files."""
    found = [folder, *folder.rglob("*")]
    mode_of = {path: stat.S_IMODE(path.stat().st_mode) for path in found}
    return {mode_of[path] for path in found if path.is_dir()}, {mode_of[path] for path in found if path.is_file()}


def test_objects_are_their_users_alone(tmp_path: Path) -> None:
    put(tmp_path / "objects")

    assert modes(tmp_path / "objects") == ({0o700}, {0o600})


def test_folders_that_an_earlier_version_has_made_are_closed(tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    put(folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)

    put(folder)

    assert stat.S_IMODE(folder.stat().st_mode) == 0o755  # the operator's
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o700}


def test_a_folder_that_its_group_may_write_is_shared_with_the_group_and_nobody_else(tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    folder.mkdir()
    folder.chmod(0o775)

    put(folder)

    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o770}
    assert modes(folder)[1] == {0o660}


def test_a_folder_that_cannot_be_made_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ValueError, match="Not a directory; give a folder that can be written to"):
        remote_store(RemoteConfig(url=f"file://{tmp_path}/file/objects"))
