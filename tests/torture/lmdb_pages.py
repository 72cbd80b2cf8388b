"""The kinds of the pages of an LMDB file, found by reading the file itself (LMDB 0.9, 64 bit, little-endian)."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PAGE_BYTES = 4096
_PAGE = struct.Struct("<QHHHH")  # page number, padding, flags, lower, upper; of overflow pages the last two: how many
_DB = struct.Struct("<IHHQQQQQ")  # padding, flags, depth, branch, leaf and overflow pages, entries, root
_NODE = struct.Struct("<HHHH")  # low and high half of the size or page, flags, key's length
_META_DBS = 24  # where the two roots stand behind a meta page's header, after magic, version, address and map size
_META_END = _META_DBS + 2 * _DB.size
_LAST_AND_TXN = struct.Struct("<QQ")  # last page used, and the transaction that wrote this root
_BRANCH = 0x01
_SUB_DB = 0x02
_NO_PAGE = (1 << 64) - 1


@dataclass
class Pages:
    """Numbers of a file's pages, by what damage to them means."""

    meta: list[int] = field(default_factory=lambda: [0, 1])
    index: list[int] = field(default_factory=list)  # branches, leaves, and the list of free pages
    num_pages: int = 0  # later pages were never used


def used_bytes(folder: Path) -> int:
    """Bytes of the file up to the last page that was ever used."""
    with (folder / "data.mdb").open("rb") as file:
        start = _newest_root(data := file.read(2 * PAGE_BYTES))
    return PAGE_BYTES * (1 + int(_LAST_AND_TXN.unpack_from(data, start + _META_END)[0]))


def map_pages(data: bytes) -> Pages:
    """The pages reachable from the newest root of the file *data*."""
    start = _newest_root(data)
    pages = Pages(num_pages=1 + _LAST_AND_TXN.unpack_from(data, start + _META_END)[0])
    _walk(data, _root(data, start + _META_DBS), pages)
    _walk(data, _root(data, start + _META_DBS + _DB.size), pages)
    return pages


def rows_in(data: bytes, page: int) -> list[int]:
    """Offsets of the rows in a leaf; none in a branch. A row begins with four bytes that say how long its value is."""
    _, _, flags, lower, _ = _PAGE.unpack_from(data, page * PAGE_BYTES)
    return [] if flags & _BRANCH else list(_nodes(data, page, lower))


def _newest_root(data: bytes) -> int:
    """Offset of the newer of the two meta pages, behind its page header."""
    starts = (_PAGE.size, PAGE_BYTES + _PAGE.size)
    return max(starts, key=lambda start: int(_LAST_AND_TXN.unpack_from(data, start + _META_END)[1]))


def _root(data: bytes, offset: int) -> int:
    return int(_DB.unpack_from(data, offset)[7])


def _walk(data: bytes, page: int, pages: Pages) -> None:
    """Add the pages of a tree whose values are all small."""
    if page == _NO_PAGE:
        return
    pages.index.append(page)
    _, _, flags, lower, _ = _PAGE.unpack_from(data, page * PAGE_BYTES)
    for offset in _nodes(data, page, lower):
        low, high, node_flags, key_length = _NODE.unpack_from(data, offset)
        value = offset + _NODE.size + key_length
        if flags & _BRANCH:
            _walk(data, low | high << 16 | node_flags << 32, pages)
        elif node_flags & _SUB_DB:
            _walk(data, _root(data, value), pages)


def _nodes(data: bytes, page: int, lower: int) -> Iterator[int]:
    start = page * PAGE_BYTES
    for place in range((lower - _PAGE.size) // 2):
        (offset,) = struct.unpack_from("<H", data, start + _PAGE.size + 2 * place)
        yield start + offset
