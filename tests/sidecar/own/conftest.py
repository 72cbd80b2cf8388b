"""What tests of the own endpoint start from."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_bed import Bed, Engine, engine_bed


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    with engine_bed(tmp_path) as bed:
        yield bed


@pytest.fixture
def engine(bed: Bed) -> Iterator[Engine]:
    engine = Engine(bed)
    yield engine
    engine.close()
