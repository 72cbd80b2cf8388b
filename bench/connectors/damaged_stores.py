"""Stores of KV on disk, and how each is damaged while nothing has it open. Only bytes at rest are changed."""

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

FAULTS: Mapping[str, str] = {
    "a flipped bit": "flip",
    "a truncated file": "truncate",
    "an index of before": "put_index_back",
}
"""What happens, and the method of `Store` that does it."""
QUICK_FAULTS = {"a flipped bit": "flip"}
"""The faults of a quick run."""


class Store(ABC):
    """A store in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def payloads(self) -> list[Path]:
        """The files with the bytes of blocks."""

    @abstractmethod
    def keep_index(self) -> None:
        """Keep what says which block is where, as it is now."""

    @abstractmethod
    def put_index_back(self) -> None:
        """Put what was kept in its place, and leave the bytes of blocks alone."""

    def flip(self) -> None:
        """Change one bit of one block: of a number of four bytes its exponent's highest."""
        path = self.payloads()[0]
        with open(path, "r+b") as file:
            file.seek(path.stat().st_size // 8192 * 4096 + 2051)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 64]))

    def truncate(self) -> None:
        """Cut one file short in its middle."""
        path = self.payloads()[0]
        os.truncate(path, path.stat().st_size // 2)


class FilePerBlock(Store):
    """LMCache's `fs` and `fs_native`, vLLM's `fs`: a block is a file, and its name is the index. So an index of an
    earlier time is a name of then with the bytes of a later file, as after a crash in which names and bytes were not
    written in order."""

    def payloads(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file() and path.stat().st_size > 4096)

    def keep_index(self) -> None:
        self._names = self.payloads()

    def put_index_back(self) -> None:
        later = [path for path in self.payloads() if path not in self._names]
        for name, bytes_of in zip(self._names, later, strict=False):
            bytes_of.replace(name)


class OurStore(Store):
    """kvtier's: an index beside files with the bytes of many blocks."""

    def payloads(self) -> list[Path]:
        return sorted(self.folder.glob("slab-*"))

    def keep_index(self) -> None:
        self._kept = self.folder.with_name("kept index")
        shutil.copytree(self.folder, self._kept, ignore=shutil.ignore_patterns("slab-*"))

    def put_index_back(self) -> None:
        shutil.copytree(self._kept, self.folder, dirs_exist_ok=True)
