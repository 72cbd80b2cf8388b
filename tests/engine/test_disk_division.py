"""The phrase that says what a disk tier's size is used for."""

import re

import pytest

from kvtier.engine.config import parse_bytes
from kvtier.engine.stores.disk_division import division_text
from kvtier.store.lmdb.data_file import capacity_within


@pytest.mark.parametrize("size", ["100MiB", "1GiB", "500GiB"])
def test_the_parts_add_up_to_the_size_that_was_asked_for(size: str) -> None:
    phrase = division_text(parse_bytes(size))

    parts = [parse_bytes(part) for part in re.findall(r"[\d.]+ [KMGT]iB", phrase)]
    assert len(parts) == 3
    assert parts[0] == pytest.approx(capacity_within(parse_bytes(size)), rel=0.01)
    assert sum(parts) == pytest.approx(parse_bytes(size), rel=0.01)


def test_a_size_without_room_for_a_block_is_told() -> None:
    assert division_text(1 << 20) == "too small for any block"
