"""Files that are written for the operator: never another file behind a link, never another user's."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.engine.config import RequestLogConfig
from kvtier.engine.observability.explain.seen_contents import SeenContents, Way
from kvtier.engine.observability.records.request_log import open_request_log
from kvtier.web.dashboard.history import RESOLUTIONS
from kvtier.web.dashboard.ring_file import RingFile, Shape
from kvtier.web.operating.audit_log import AuditLog

OTHERS = b"another file, which must stay as it is"
NOBODY = 65534


def write_history(path: Path) -> None:
    RingFile(path, Shape(["a"], RESOLUTIONS)).close()


def write_audit(path: Path) -> None:
    AuditLog(str(path)).close()


def write_requests(path: Path) -> None:
    log = open_request_log(RequestLogConfig(path=str(path)))
    assert log is not None
    log.close()


WRITE = {"history": write_history, "audit": write_audit, "requests": write_requests}


@pytest.fixture(params=list(WRITE))
def write(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    return WRITE[request.param]


def test_a_new_file_is_its_users_alone(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path / "file")

    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_is_not_followed(
    tmp_path: Path, write: Callable[[Path], None], link: Callable[[Path, Path], None]
) -> None:
    other = tmp_path / "other"
    other.write_bytes(OTHERS)
    link(other, tmp_path / "file")

    with pytest.raises(OSError, match="file"):
        write(tmp_path / "file")

    assert other.read_bytes() == OTHERS


def test_a_link_to_nothing_makes_nothing(tmp_path: Path, write: Callable[[Path], None]) -> None:
    (tmp_path / "file").symlink_to(tmp_path / "other")

    with pytest.raises(OSError, match="file"):
        write(tmp_path / "file")

    assert not (tmp_path / "other").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_another_users_file_is_refused(tmp_path: Path, write: Callable[[Path], None]) -> None:
    (tmp_path / "file").write_bytes(OTHERS)
    os.chown(tmp_path / "file", NOBODY, NOBODY)

    with pytest.raises(OSError, match="file"):
        write(tmp_path / "file")

    assert (tmp_path / "file").read_bytes() == OTHERS


def seen_file(path: Path) -> None:
    contents = SeenContents(bytes(16))
    contents.add_namespace("one", {})
    contents.add(b"a", Way(b"", "", "one", None))
    contents.save(path)


def test_what_explain_has_seen_is_not_read_through_a_link(tmp_path: Path) -> None:
    seen_file(tmp_path / "other")
    (tmp_path / "link").symlink_to(tmp_path / "other")
    key = bytes(range(16))

    assert SeenContents.load(tmp_path / "other", key).num_added == 1
    assert SeenContents.load(tmp_path / "link", key).num_added == 0
    assert SeenContents.load(tmp_path / "link", key).key == key


def test_what_explain_has_seen_is_not_written_through_a_link(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(OTHERS)
    (tmp_path / "seen").symlink_to(other)
    (tmp_path / "seen.new").symlink_to(other)

    seen_file(tmp_path / "seen")

    assert other.read_bytes() == OTHERS
    assert not (tmp_path / "seen").is_symlink()
    assert (tmp_path / "seen").stat().st_mode & 0o777 == 0o600
