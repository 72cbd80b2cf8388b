"""DriveLife: the part of the drive's endurance that the shared store of all layouts has used."""

import time
from collections.abc import Callable

from kvtier.engine.stores.reopening_store import ReopeningStore
from kvtier.tiers.lower.ssd_life import TERABYTE, SsdLife, SsdLifeStatistics


class DriveLife:
    """An `SsdLife` of a store that may open later, or again. Owned by the sidecar's thread.

    Uses the store's own total of written bytes, because each layout knows only of its own writes.
    """

    def __init__(
        self, endurance_bytes: int, store: ReopeningStore, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._life = SsdLife(endurance_bytes / TERABYTE, clock, store.statistics().written_bytes_total)
        self._opening = 0

    def statistics(self) -> SsdLifeStatistics:
        """Return the used share of the endurance, and the years left at the write rate since the store was opened."""
        written_bytes = self._store.statistics().written_bytes_total
        opening = self._store.opening()
        if opening not in (0, self._opening):
            self._opening = opening
            self._life.begin(written_bytes)
        return self._life.statistics(written_bytes)
