"""How a store writes payloads to its files: past the page cache, or through it."""

from enum import StrEnum


class DiskWrites(StrEnum):
    """How payloads are written. Both settings store the same bytes.

    DIRECT    Past the page cache (O_DIRECT), which takes a third of the processor time. Use it if a tier of memory
              above the store keeps recent blocks: then the page cache would hold them a second time.
    BUFFERED  Through the page cache. Use it if blocks are read again soon after they were written: they are then
              copied from memory.

    A slot whose pages are in the page cache is written through the page cache with both settings. So is a payload that
    is not aligned, and every payload on a file system without O_DIRECT, such as tmpfs.
    """

    DIRECT = "direct"
    BUFFERED = "buffered"
