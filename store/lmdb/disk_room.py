"""`DiskRoom`: how much of its capacity a store may use after its disk was full."""

import logging
import os
from pathlib import Path

from kvtier.store.lmdb import data_file

_INDEX_ROOM_BYTES = 8 << 20  # left to the index at a time; a change of the index may need this much

_log = logging.getLogger(__name__)


class DiskRoom:
    """The current capacity of a store whose folder is *here*. Only the writer uses it.

    The capacity is *max_bytes*. It is lower from the moment that the disk is full until there is more room on it.
    """

    def __init__(self, name: Path, here: Path, max_bytes: int) -> None:
        self._name = name
        self._here = here
        self._max_bytes = max_bytes
        self._left_bytes = 0  # free on the disk after the store shrank
        self.capacity_bytes = max_bytes
        self.slab_bytes = data_file.slab_bytes(max_bytes)  # limit on the bytes of all slots

    def shrink(self, taken_bytes: int) -> bool:
        """Lower the capacity, because the disk is full while all slots take *taken_bytes*.

        The slots must take a little less, to leave room for the index: at most a quarter less. Returns False and
        changes nothing if no capacity would be left, which means that other files fill the disk.
        """
        taken_bytes = min(self.slab_bytes, taken_bytes)
        slab_bytes = taken_bytes - min(_INDEX_ROOM_BYTES, taken_bytes // 4)
        capacity_bytes = data_file.capacity_of_slabs(slab_bytes)
        if not capacity_bytes:
            return False
        self.slab_bytes, self.capacity_bytes = slab_bytes, capacity_bytes
        _log.warning(
            "store %s: the disk is full; its capacity is lowered to %.1f MB until there is room for %.1f MB",
            *(self._name, self.capacity_bytes / 1e6, self._max_bytes / 1e6),
        )
        return True

    def on_shrunk(self) -> None:
        """Note that the store has shrunk. It grows back only when the disk has more free space than now."""
        self._left_bytes = self._free_bytes()

    def grow_back(self) -> None:
        """Restore the full capacity if the disk has more free space than after the store shrank."""
        if self.capacity_bytes == self._max_bytes:
            return
        if self._free_bytes() >= self._left_bytes + 2 * _INDEX_ROOM_BYTES:
            self.capacity_bytes, self.slab_bytes = self._max_bytes, data_file.slab_bytes(self._max_bytes)
            _log.warning("store %s: the disk has room again; its full capacity is restored", self._name)

    def _free_bytes(self) -> int:
        try:
            found = os.statvfs(self._here)
        except OSError:  # the next write will fail and say why
            return 0
        return found.f_bavail * found.f_frsize
