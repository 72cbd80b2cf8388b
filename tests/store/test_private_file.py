"""Which files are private, and what is said of others."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.store.private_file import is_private, read_private

USER, GROUP, OTHER = 10001, 10002, 10003  # none of them is root
ROOT = 0


def properties(mode: int, user: int, group: int) -> os.stat_result:
    return os.stat_result((0o100000 | mode, 1, 1, 1, user, group, 1, 0, 0, 0))


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_file_that_only_its_owner_may_use_is_private(mode: int) -> None:
    assert is_private(properties(mode, USER, GROUP), USER, {GROUP})
    assert is_private(properties(mode, ROOT, ROOT), ROOT, {ROOT})


@pytest.mark.parametrize("mode", [0o440, 0o640])
def test_a_secret_that_kubernetes_has_mounted_for_the_pods_group_is_private(mode: int) -> None:
    assert is_private(properties(mode, ROOT, GROUP), USER, {USER, GROUP})


@pytest.mark.parametrize(
    ("mode", "owner", "group", "user"),
    [
        (0o444, ROOT, GROUP, USER),  # all may read it
        (0o460, ROOT, GROUP, USER),  # the group may write it
        (0o450, ROOT, GROUP, USER),
        (0o404, ROOT, GROUP, USER),
        (0o440, OTHER, GROUP, USER),  # it is somebody's who may let others in
        (0o440, USER, GROUP, USER),  # it is ours, and we can do better
        (0o440, ROOT, GROUP, ROOT),  # so can root
        (0o440, ROOT, OTHER, USER),  # a group of others'
    ],
)
def test_a_file_that_others_may_use_is_not_private(mode: int, owner: int, group: int, user: int) -> None:
    assert not is_private(properties(mode, owner, group), user, {GROUP})


def test_a_file_is_read_whatever_its_permissions_and_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "the key"
    path.write_bytes(b"secret words")
    path.chmod(0o644)

    open_to_all = read_private(path)
    path.chmod(0o600)
    private = read_private(path, max_bytes=6)

    assert open_to_all.content == b"secret words"
    assert open_to_all.exposure == f"other users may use it (mode 0644); run: chmod 600 '{path}'"
    assert (private.content, private.exposure) == (b"secret", None)


@pytest.fixture
def mounted() -> Iterator[Path]:
    """A secret as Kubernetes mounts it: root's, read by a group, and found through a link."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # pytest's own folders are for root alone
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "..data").mkdir()
        key = folder / "..data" / "encryption.key"
        key.write_text("1" * 64)
        key.chmod(0o440)
        os.chown(key, ROOT, GROUP)
        (folder / "encryption.key").symlink_to("..data/encryption.key")
        yield folder / "encryption.key"


@pytest.mark.skipif(os.geteuid() != ROOT, reason="only root can become others")
def test_a_process_in_the_group_takes_the_key_that_another_cannot_read(mounted: Path) -> None:
    assert as_another_user(mounted, groups=[GROUP]) == "private"
    assert as_another_user(mounted, groups=[OTHER]) == "Permission denied"


def as_another_user(path: Path, groups: list[int]) -> str:
    """What a process of another user in those groups says of the file."""
    theirs, ours = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups(groups)
            os.setgid(USER)
            os.setuid(USER)
            said = read_private(path).exposure or "private"
        except OSError as error:
            said = str(error.strerror)
        os.write(ours, said.encode())
        os._exit(0)
    os.close(ours)
    with os.fdopen(theirs) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said
