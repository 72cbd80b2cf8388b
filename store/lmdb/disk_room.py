"""`DiskRoom`: how much of its capacity a store may use, after its disk was found full."""

import logging
import os
from pathlib import Path

from kvtier.store.lmdb import data_file

_INDEX_ROOM_BYTES = 8 << 20  # given up at a time; as much as a change of the index may ask for

_log = logging.getLogger(__name__)


class DiskRoom:
    """The capacity of a store whose folder is *here*; touched by the writer only.

    It is *max_bytes*, or less from the moment that the disk was full until there is more room on it.
    """

    def __init__(self, name: Path, here: Path, max_bytes: int) -> None:
        self._name = name
        self._here = here
        self._max_bytes = max_bytes
        self._left_bytes = 0  # free on the disk when the store had shrunk
        self.capacity_bytes = max_bytes
        self.slab_bytes = data_file.slab_bytes(max_bytes)  # most bytes that all slots take

    def shrink(self, taken_bytes: int) -> bool:
        """Lower the capacity, as the disk is full while all slots take *taken_bytes*.

        They must take a little less, for the index: a quarter less at most. False, and nothing changes, if no capacity
        would be left: then other files fill the disk.
        """
        taken_bytes = min(self.slab_bytes, taken_bytes)
        slab_bytes = taken_bytes - min(_INDEX_ROOM_BYTES, taken_bytes // 4)
        capacity_bytes = data_file.capacity_of_slabs(slab_bytes)
        if not capacity_bytes:
            return False
        self.slab_bytes, self.capacity_bytes = slab_bytes, capacity_bytes
        _log.warning(
            "store %s: the disk is full; its capacity is %.1f MB until there is more room, %.1f MB then",
            *(self._name, self.capacity_bytes / 1e6, self._max_bytes / 1e6),
        )
        return True

    def on_shrunk(self) -> None:
        """The store has shrunk to the lowered capacity. It grows back only when the disk has more room than now."""
        self._left_bytes = self._free_bytes()

    def grow_back(self) -> None:
        """Return to the full capacity if the disk has more room than after the store shrank."""
        if self.capacity_bytes == self._max_bytes:
            return
        if self._free_bytes() >= self._left_bytes + 2 * _INDEX_ROOM_BYTES:
            self.capacity_bytes, self.slab_bytes = self._max_bytes, data_file.slab_bytes(self._max_bytes)
            _log.warning("store %s: the disk has room again", self._name)

    def _free_bytes(self) -> int:
        try:
            found = os.statvfs(self._here)
        except OSError:  # the next write will fail and say why
            return 0
        return found.f_bavail * found.f_frsize
