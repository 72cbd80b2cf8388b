"""What a newcomer opens to follow one block: the tracer that says so sees the whole way."""

from pathlib import Path

from block_trip import trip


def test_a_block_is_followed_down_and_up_again(tmp_path: Path) -> None:
    legs = trip(tmp_path / "store")

    assert "tiers/lower/disk_spill.py" in legs["spill to host and disk"].files
    assert "store/lmdb/reader.py" in legs["look up, promote, release"].files
    assert "store/lmdb/reader.py" not in legs["compute, commit, release"].files
