"""What tests of LMCache's endpoint start from."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from lmcache_bed import FORMS, Bed, RawClient, lmcache_bed


@pytest.fixture(params=FORMS)
def bed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bed]:
    """An endpoint whose clients speak one form of the protocol."""
    with lmcache_bed(tmp_path, form=request.param) as bed:
        yield bed


@pytest.fixture
def client(bed: Bed) -> Iterator[RawClient]:
    """A client with a worker's registration as instance 1."""
    client = RawClient(bed)
    client.register()
    yield client
    client.socket.close(0)
