"""Fixtures: every kind of remote store."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from remote_cases import MemoryRemoteCase, ObjectRemoteCase, RemoteCase
from swift_server import BUCKET, CREDENTIALS, PROGRAMS, REGION, SwiftServer, swift_server

from kvtier.store.remote.object_settings import ObjectSettings
from kvtier.store.remote_store import RemoteStore

KINDS = ["memory", "object-files", pytest.param("object-s3", marks=pytest.mark.long)]


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteCase:
    if request.param == "object-files":
        return ObjectRemoteCase(ObjectSettings(f"file://{tmp_path}/objects"), mkdir=True)
    if request.param == "object-s3":
        settings: ObjectSettings = request.getfixturevalue("s3_place")
        client = {"allow_http": True}
        return ObjectRemoteCase(settings, endpoint=settings.endpoint, region=REGION, client_options=client)
    return MemoryRemoteCase()


@pytest.fixture
def store(case: RemoteCase) -> Iterator[RemoteStore]:
    with case.open() as opened:
        yield opened


@pytest.fixture(scope="session")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwiftServer]:
    if not (PROGRAMS / "swift-proxy-server").exists():
        pytest.skip("OpenStack Swift is not installed: make .venv/swift/installed")
    with swift_server(tmp_path_factory.mktemp("swift")) as server:
        yield server


@pytest.fixture
def s3_place(swift: SwiftServer, monkeypatch: pytest.MonkeyPatch) -> ObjectSettings:
    """A place of its own in the server's bucket, and the environment that lets its clients in."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    return ObjectSettings(url, swift.endpoint, REGION, allow_http=True, timeout_s=60)
