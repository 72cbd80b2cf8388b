"""The file that the dashboard's history is saved to. Rows are written in place, each with a checksum."""

import fcntl
import json
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from kvtier.store.folder import open_private
from kvtier.web.dashboard.history import NEVER, History, Place, Resolution

MAGIC = b"kvtier history 1"
_PAGE_BYTES = 4096
_HEAD = struct.Struct(f"<{len(MAGIC)}sII")  # magic, length of the following JSON in bytes, its CRC-32
_MAX_HEADER_BYTES = 1 << 20


class BadFile(ValueError):
    """An error for a file that is not a history, or whose header is damaged."""


class Shape:
    """The layout of a file for a history with these columns and resolutions."""

    def __init__(self, columns: Sequence[str], resolutions: Sequence[Resolution]) -> None:
        self.columns, self.resolutions = tuple(columns), tuple(resolutions)
        text = json.dumps({"columns": self.columns, "resolutions": self.resolutions}).encode()
        head = _HEAD.pack(MAGIC, len(text), zlib.crc32(text)) + text
        self.header = head + bytes(-len(head) % _PAGE_BYTES)
        # Rows that were never written are all zeros. They are not valid, because the CRC of zeros is not zero.
        self.record = np.dtype([("stamp", "<i8"), ("row", "<f4", len(self.columns)), ("crc", "<u4")])
        self._starts = [len(self.header)]
        for resolution in self.resolutions:
            self._starts.append(self._starts[-1] + resolution.num_rows * self.record.itemsize)

    @classmethod
    def read(cls, content: bytes) -> Self:
        """Read the layout of a dashboard's history file from its *content*. Raise `BadFile` for an invalid header."""
        try:
            magic, num_bytes, crc = _HEAD.unpack_from(content)
            text = content[_HEAD.size : _HEAD.size + num_bytes]
            if magic != MAGIC or num_bytes > _MAX_HEADER_BYTES or zlib.crc32(text) != crc:
                raise BadFile("the file's header is damaged")
            told = json.loads(text)
            return cls(told["columns"], [Resolution(*each) for each in told["resolutions"]])
        except (struct.error, ValueError, TypeError, KeyError) as error:
            raise BadFile("the file is not a history" if not isinstance(error, BadFile) else str(error)) from None

    @property
    def num_bytes(self) -> int:
        """Size in bytes of a file with this layout."""
        return self._starts[-1]

    def offset(self, place: Place) -> int:
        """Return the byte offset of a row in the file. *place* is its ring buffer, and its index in that buffer."""
        return self._starts[place.ring] + place.line * self.record.itemsize

    def encoded(self, history: History, place: Place) -> bytes:
        """Return the bytes that the file stores for the row *place* of *history*, with a checksum."""
        ring = history.rings[place.ring]
        content: bytes = ring.stamps[place.line].tobytes() + ring.rows[place.line].tobytes()
        return content + struct.pack("<I", zlib.crc32(content))

    def decoded(self, content: bytes) -> tuple[History, int]:
        """Return the dashboard's history in a file's *content*, and how many time steps are left out as damaged."""
        history, num_damaged = History(self.columns, self.resolutions), 0
        content = content.ljust(self.num_bytes, b"\0")
        for number, ring in enumerate(history.rings):
            num_rows, start = ring.resolution.num_rows, self._starts[number]
            records = np.frombuffer(content, self.record, num_rows, start)
            for index, record in enumerate(records):
                raw = record.tobytes()
                if not any(raw):
                    continue
                stamp = int(record["stamp"])
                is_whole = zlib.crc32(raw[:-4]) == record["crc"] and stamp > NEVER and stamp % num_rows == index
                num_damaged += not is_whole
                if is_whole:
                    ring.stamps[index], ring.rows[index] = stamp, record["row"]
        return history, num_damaged


class RingFile:
    """A file with a dashboard's history, locked while it is open. Not thread-safe. Every call may block on the disk."""

    def __init__(self, path: Path, shape: Shape) -> None:
        """Open the file, or create it if there is none.

        Raises:
            BlockingIOError: Another process has the file open.
            OSError: The file cannot be opened, belongs to another user, or is a link.
        """
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._shape = shape
        self._file = open_private(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise

    def read(self) -> tuple[History, int]:
        """Return the history in the file, which is empty for a new file, and the number of damaged rows.

        If the file has another layout, return its history, but overwrite the file with an empty history of this layout.
        If the file is not a history, overwrite it too, and raise `BadFile`.
        """
        content = os.pread(self._file, os.fstat(self._file).st_size, 0)
        is_new = not content
        if content[: len(self._shape.header)] != self._shape.header:
            self._begin()
        if is_new:
            return History(self._shape.columns, self._shape.resolutions), 0
        return Shape.read(content).decoded(content)

    def write(self, rows: Iterable[tuple[int, bytes]]) -> None:
        """Write rows, given as pairs of an offset and the row's bytes."""
        for offset, content in rows:
            os.pwrite(self._file, content, offset)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self) -> None:
        """Replace the content by an empty history. Write the header last, so that a crash leaves no partial history."""
        os.ftruncate(self._file, 0)
        os.ftruncate(self._file, self._shape.num_bytes)
        os.pwrite(self._file, self._shape.header, 0)
