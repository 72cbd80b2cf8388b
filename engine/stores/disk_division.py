"""How the configured size of a disk tier divides into blocks, index and reserve, in words for people."""

from kvtier.engine.config import size_text
from kvtier.store.lmdb.data_file import capacity_within, index_bytes


def division_text(disk_bytes: int) -> str:
    """Return a phrase such as "773.1 MiB for blocks, 104.6 MiB for the index, 146.2 MiB in reserve".

    *disk_bytes* is the configured maximum of the folder. The reserve is for slots that are freed and cannot be reused
    yet, and for blocks that are being written.
    """
    block_bytes = capacity_within(disk_bytes)
    index = index_bytes(block_bytes)
    reserve = disk_bytes - block_bytes - index
    return (
        f"{size_text(block_bytes)} for blocks, {size_text(index)} for the index, {size_text(reserve)} in reserve"
        if block_bytes
        else "too small for any block"
    )
