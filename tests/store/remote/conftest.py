"""Fixtures: every kind of remote store."""

from collections.abc import Iterator

import pytest
from remote_cases import MemoryRemoteCase, RemoteCase

from kvtier.store.remote_store import RemoteStore


@pytest.fixture(params=["memory"])
def case(request: pytest.FixtureRequest) -> RemoteCase:
    return {"memory": MemoryRemoteCase}[request.param]()


@pytest.fixture
def store(case: RemoteCase) -> Iterator[RemoteStore]:
    with case.open() as opened:
        yield opened
