"""Fixtures: every kind of remote store."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from remote_cases import MemoryRemoteCase, ObjectRemoteCase, RemoteCase

from kvtier.store.remote.object_settings import ObjectSettings
from kvtier.store.remote_store import RemoteStore


@pytest.fixture(params=["memory", "object-files"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteCase:
    if request.param == "memory":
        return MemoryRemoteCase()
    return ObjectRemoteCase(ObjectSettings(f"file://{tmp_path}/objects"), mkdir=True)


@pytest.fixture
def store(case: RemoteCase) -> Iterator[RemoteStore]:
    with case.open() as opened:
        yield opened
