"""What tests of several rooms start from."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from mounts import Mount, mounting


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Mounts a file system with `mount(*arguments)`; see `mounting`."""
    point = tmp_path / "mounted"
    point.mkdir()
    with mounting(point) as mount:
        yield mount
