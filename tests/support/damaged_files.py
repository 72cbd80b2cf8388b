"""Files of a store whose bytes are not what was written."""

import os
from pathlib import Path


def damage(folder: Path, content: bytes) -> None:
    """Flip a bit in the middle of the one place in the store's files that has this content."""
    (file,) = [file for file in folder.rglob("*") if file.is_file() and content in file.read_bytes()]
    with file.open("r+b") as data:
        data.seek(file.read_bytes().index(content) + len(content) // 2)
        byte = data.read(1)[0]
        data.seek(-1, os.SEEK_CUR)
        data.write(bytes([byte ^ 1]))
