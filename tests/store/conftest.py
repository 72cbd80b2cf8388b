"""Fixtures: every store with every kind of codec."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_cases import LmdbCase, MemoryCase, ProcessCase, StoreCase

from kvtier.store.blob_store import BlobStore
from kvtier.store.codec.codec import CODECS


@pytest.fixture(params=["memory-none", "memory-zstd-plane-2", "lmdb-none", "lmdb-zstd-plane-2", "process-none"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> StoreCase:
    kind, _, codec = request.param.partition("-")
    if kind == "memory":
        return MemoryCase(CODECS[codec])
    return {"lmdb": LmdbCase, "process": ProcessCase}[kind](CODECS[codec], tmp_path / "store")


@pytest.fixture
def store(case: StoreCase) -> Iterator[BlobStore]:
    with case.open() as opened:
        yield opened
        opened.check()
