"""DriveLife: how much of the drive's endurance the one store of all layouts has written."""

import time
from collections.abc import Callable

from kvtier.engine.stores.reopening_store import ReopeningStore
from kvtier.tiers.lower.ssd_life import TERABYTE, SsdLife, SsdLifeStatistics


class DriveLife:
    """An `SsdLife` of a store that may open later, and anew: it goes by the store's own total, as each layout knows of
    its own writes only. Owned by the sidecar's thread."""

    def __init__(
        self, endurance_bytes: int, store: ReopeningStore, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._life = SsdLife(endurance_bytes / TERABYTE, clock, store.statistics().written_bytes_total)
        self._opening = 0

    def statistics(self) -> SsdLifeStatistics:
        """The share used, and the years left at the rate since the store was opened."""
        written_bytes = self._store.statistics().written_bytes_total
        opening = self._store.opening()
        if opening not in (0, self._opening):
            self._opening = opening
            self._life.begin(written_bytes)
        return self._life.statistics(written_bytes)
