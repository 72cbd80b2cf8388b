"""How much of its capacity a store may use: all of it, or what the disk has."""

import logging
import os
from pathlib import Path

from kvtier.store.lmdb import data_file

_INDEX_ROOM_BYTES = 8 << 20  # given up at a time, and what a change of the index may ask for

_log = logging.getLogger(__name__)


class DiskRoom:
    """The capacity of a store whose folder is *here*: smaller than *most_bytes* since the disk was full, until others
    have given some of it back. The writer's."""

    def __init__(self, name: Path, here: Path, most_bytes: int) -> None:
        self._name = name
        self._here = here
        self._most_bytes = most_bytes
        self._left_bytes = 0  # on the disk, once the store had found its new size
        self.capacity_bytes = most_bytes
        self.slab_bytes = data_file.slab_bytes(most_bytes)  # what all slots may take

    def shrink(self, taken_bytes: int) -> bool:
        """The disk is full, with slots that take so many bytes: they must take a little less, for the index; a quarter
        at most. False, and nothing changes, if that is next to nothing: the room went to others."""
        taken_bytes = min(self.slab_bytes, taken_bytes)
        slab_bytes = taken_bytes - min(_INDEX_ROOM_BYTES, taken_bytes // 4)
        capacity_bytes = data_file.capacity_of_slabs(slab_bytes)
        if not capacity_bytes:
            return False
        self.slab_bytes, self.capacity_bytes = slab_bytes, capacity_bytes
        _log.warning(
            "store %s: the disk is full; its capacity is %.1f MB until there is more room, %.1f MB then",
            *(self._name, self.capacity_bytes / 1e6, self._most_bytes / 1e6),
        )
        return True

    def on_shrunk(self) -> None:
        """The store has shrunk to that size: what the disk has left now is not enough to grow again."""
        self._left_bytes = self._free_bytes()

    def grow_back(self) -> None:
        """Have all of the capacity again, if others have made room since."""
        if self.capacity_bytes == self._most_bytes:
            return
        if self._free_bytes() >= self._left_bytes + 2 * _INDEX_ROOM_BYTES:
            self.capacity_bytes, self.slab_bytes = self._most_bytes, data_file.slab_bytes(self._most_bytes)
            _log.warning("store %s: the disk has room again", self._name)

    def _free_bytes(self) -> int:
        try:
            found = os.statvfs(self._here)
        except OSError:  # the next write says so
            return 0
        return found.f_bavail * found.f_frsize
