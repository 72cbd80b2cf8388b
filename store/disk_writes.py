"""How a store writes payloads to its files: past the page cache, or through it."""

from enum import StrEnum


class DiskWrites(StrEnum):
    """How payloads are written. Both settings store the same bytes.

    DIRECT    Past the page cache (O_DIRECT), which takes a third of the processor time. Use it if a memory tier above
              the store keeps recent blocks, because BUFFERED would keep them a second time in the page cache.
    BUFFERED  Through the page cache. Use it if no memory tier is above the store, and blocks are read again soon: the
              page cache then serves them from memory.

    DIRECT still writes through the page cache in three cases: the slot's pages are already in it, the payload's memory
    is not aligned as O_DIRECT requires, or the file system has no O_DIRECT, such as tmpfs.
    """

    DIRECT = "direct"
    BUFFERED = "buffered"
