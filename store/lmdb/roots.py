"""Checks the two roots of an LMDB file (LMDB 0.9, 64 bit, little-endian) before the file is opened.

LMDB keeps the roots in the first two pages, without a checksum, and trusts what they say about the other pages. So a
damaged root does further damage. If it names a last page far beyond the file, LMDB extends the file to that page. If it
has an older transaction number, LMDB overwrites pages of the newer root.
"""

import os
import struct
from pathlib import Path
from typing import NamedTuple

import lmdb

from kvtier.store.folder import open_private
from kvtier.store.slab import PAGE_BYTES

_META = struct.Struct("<II8xQ" + 2 * "IHH32xQ" + "QQ")
_META_AT = 16  # offset of a root, after the header of its page
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_INTEGER_KEYS = 0x08  # flags of the list of free pages; the main tree has none
_NO_PAGE = (1 << 64) - 1
_MAX_LEVELS = 16  # limit on the depth of a tree; a tree of 4096 pages of 4 KiB has three levels


class _Root(NamedTuple):
    magic: int
    version: int
    map_bytes: int
    page_bytes: int  # LMDB keeps it in the record of the list of free pages
    free_flags: int
    free_depth: int
    free_root: int
    main_pad: int
    main_flags: int
    main_depth: int
    main_root: int
    last_page: int
    transaction: int

    def is_of_lmdb(self, number: int) -> bool:
        # LMDB writes root 0 with even transaction numbers, and root 1 with odd ones.
        return (self.magic, self.version, self.transaction % 2) == (_MAGIC, _VERSION, number)

    def is_plausible(self, num_pages: int) -> bool:
        """Return whether the root and its trees can belong to a file of *num_pages* pages."""
        return (
            (self.page_bytes, self.free_flags, self.main_pad, self.main_flags) == (PAGE_BYTES, _INTEGER_KEYS, 0, 0)
            and self.map_bytes % PAGE_BYTES == 0
            and 1 <= self.last_page < num_pages
            and all(
                (root == _NO_PAGE and depth == 0) or (2 <= root <= self.last_page and 0 < depth <= _MAX_LEVELS)
                for root, depth in ((self.free_root, self.free_depth), (self.main_root, self.main_depth))
            )
        )


def check(data_file: Path) -> None:
    """Raise CorruptedError unless LMDB can safely use the two roots (meta pages) of *data_file*.

    Both must have the supported format and consecutive transaction numbers. In the newer one, the page size must be
    4 KiB, and all page numbers must be within the file. The page numbers of the older root's trees are not checked.
    LMDB never follows them, and they may be wrong in an intact file: after a failed write of a root, LMDB restores only
    the root's transaction number and last page.
    """
    with open(data_file, "rb", opener=open_private) as file:
        head, num_pages = file.read(2 * PAGE_BYTES), os.fstat(file.fileno()).st_size // PAGE_BYTES
    starts = (0, PAGE_BYTES) if len(head) == 2 * PAGE_BYTES else ()
    roots = [_Root(*_META.unpack_from(head, start + _META_AT)) for start in starts]
    follows = bool(roots) and abs(roots[0].transaction - roots[1].transaction) == 1
    newest = max(roots, key=lambda root: root.transaction, default=None)
    is_sound = newest is not None and newest.is_plausible(num_pages)
    if not (follows and is_sound and all(root.is_of_lmdb(number) for number, root in enumerate(roots))):
        raise lmdb.CorruptedError("a root of its index makes no sense (the meta pages at the start of data.mdb)")
