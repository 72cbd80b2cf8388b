"""Fetches: the fetches of `LocalTiers` that lease or wait for a block, and the news that their callers have not had."""

from collections.abc import Iterator

from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.lower.cold_reads import ColdReads
from kvtier.tiers.lower.local_fetch import LocalFetch
from kvtier.tiers.lower.lower_index import LowerIndex
from kvtier.tiers.lower.lower_tiers import OnFetched, Places
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.naming.tier import Reason


class Fetches:
    """The fetches that lease a block or wait for one; a fetch that does neither is over. Owned by the tiers' thread."""

    def __init__(self, index: LowerIndex, cold_reads: ColdReads) -> None:
        self._index = index
        self._cold_reads = cold_reads
        self._fetches: set[LocalFetch] = set()
        self._reading: set[LocalFetch] = set()  # those that wait for blocks wanted now
        self._news: list[tuple[LocalFetch, int, Reason | None]] = []

    def __iter__(self) -> Iterator[LocalFetch]:
        return iter(list(self._fetches))

    @property
    def any_reading(self) -> bool:
        """Whether a fetch waits for blocks that are wanted now."""
        return bool(self._reading)

    def begin(
        self, group_id: int, blocks: NamedBlocks, on_fetched: OnFetched, found: Places | None, now: bool
    ) -> LocalFetch:
        """Lease what is in host memory, have the rest read: *now*, or when nothing more urgent is."""
        fetch = LocalFetch(group_id, blocks, self._index, self._cold_reads, on_fetched, self._on_come, self._on_ended)
        fetch.lease(self._index.host[group_id].pool.find_all(blocks.names) if found is None else found)
        if fetch.num_leased < len(fetch.slots):
            if now:
                self._reading.add(fetch)
            fetch.read(now)
            self._cold_reads.pump()
        if fetch.num_leased or fetch.is_reading:
            self._fetches.add(fetch)
        return fetch

    def deliver(self) -> None:
        """Tell the callers which blocks have come since the last call, and which never will."""
        news, self._news = self._news, []
        for fetch, place, failure in news:
            if failure is not None or fetch.slots[place] != ABSENT:  # else its caller has released it meanwhile
                fetch.on_fetched(fetch, place, failure)

    def end_all(self) -> None:
        """Release all blocks of all fetches."""
        for fetch in self:
            fetch.release(range(len(fetch.slots)))

    def num_leased(self, group_id: int) -> int:
        """Host slots of the group that fetches lease."""
        return sum(fetch.num_leased for fetch in self._fetches if fetch.group_id == group_id)

    def check(self) -> None:
        """Raise AssertionError if a fetch is kept that leases and waits for nothing."""
        assert all(fetch.num_leased or fetch.is_reading for fetch in self._fetches), "a fetch that is over is kept"
        assert self._reading <= self._fetches, "a fetch that is over waits for something"

    def _on_come(self, fetch: LocalFetch, place: int, failure: Reason | None) -> None:
        self._news.append((fetch, place, failure))
        if not fetch.is_reading:
            self._reading.discard(fetch)
            if not fetch.num_leased:
                self._on_ended(fetch)

    def _on_ended(self, fetch: LocalFetch) -> None:
        self._fetches.discard(fetch)
        self._reading.discard(fetch)
