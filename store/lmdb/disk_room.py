"""`DiskRoom`: how much a store may take on its disk, which is less while the disk is full."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from kvtier.store.lmdb import data_file

_INDEX_ROOM_BYTES = 8 << 20  # disk space that a lowered capacity leaves to the index; one change may need this much

_log = logging.getLogger(__name__)


class DiskRoom:
    """The current capacity of a store, which is lower than *max_bytes* while the disk is full.

    Independently of the capacity, the files grow only while the disk has more than *reserve_bytes* free, which the
    store leaves to other programs. *name* is the path of the store's folder, for messages. *here* is a path to the same
    folder that stays valid if the folder is renamed. Only a thread with the writer's lock may use this object.
    """

    def __init__(self, name: Path, here: Path, max_bytes: int, reserve_bytes: int = 0) -> None:
        self._name = name
        self._here = here
        self._max_bytes = max_bytes
        self._reserve_bytes = reserve_bytes
        self._left_bytes = 0  # free on the disk after the store shrank
        self.capacity_bytes = max_bytes
        self.slab_bytes = data_file.slab_bytes(max_bytes)  # limit on the bytes of all slots
        self.num_shrunk = 0  # how often the capacity was lowered

    def slab_limit(self, taken_bytes: Callable[[], int]) -> int:
        """Return the limit on the bytes of all slots. *taken_bytes* returns how many bytes they take now.

        If at most the reserve is free on the disk, the limit is the disk space that the slots take now. So new blocks
        are stored in the place of evicted ones.
        """
        if not self._reserve_bytes:
            return self.slab_bytes
        return min(self.slab_bytes, taken_bytes() + max(0, self._free_bytes() - self._reserve_bytes))

    def shrink(self, taken_bytes: int) -> bool:
        """Lower the capacity to what fits into *taken_bytes*, the disk space that the store's slots take now.

        `_INDEX_ROOM_BYTES` of this space, but at most a quarter of it, is left to the index. If no capacity would be
        left, because other files fill the disk, this changes nothing and returns False.
        """
        taken_bytes = min(self.slab_bytes, taken_bytes)
        slab_bytes = taken_bytes - min(_INDEX_ROOM_BYTES, taken_bytes // 4)
        capacity_bytes = data_file.capacity_of_slabs(slab_bytes)
        if not capacity_bytes:
            return False
        self.slab_bytes, self.capacity_bytes = slab_bytes, capacity_bytes
        self.num_shrunk += 1
        _log.warning(
            "store %s: the disk is full; the capacity is lowered to %.1f MB until the disk has space for %.1f MB",
            *(self._name, self.capacity_bytes / 1e6, self._max_bytes / 1e6),
        )
        return True

    def on_shrunk(self) -> None:
        """Record how much disk space is free right after the store shrank, so that `grow_back` can see an increase."""
        self._left_bytes = self._free_bytes()

    def grow_back(self) -> None:
        """Restore the full capacity if the disk has clearly more free space than right after the store shrank."""
        if self.capacity_bytes == self._max_bytes:
            return
        if self._free_bytes() >= self._left_bytes + 2 * _INDEX_ROOM_BYTES:
            self.capacity_bytes, self.slab_bytes = self._max_bytes, data_file.slab_bytes(self._max_bytes)
            _log.warning("store %s: the disk has free space again; the full capacity is restored", self._name)

    def _free_bytes(self) -> int:
        try:
            found = os.statvfs(self._here)
        except OSError:  # the next write will fail and say why
            return 0
        return found.f_bavail * found.f_frsize
