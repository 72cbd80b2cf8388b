"""Tiers below that answer as a process behind a socket would: late, in any order, by what they knew, and that die."""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from kvtier.tiers.device.eviction_order import NamedSpan
from kvtier.tiers.device.slot_ids import ABSENT, Ids
from kvtier.tiers.lower.local_tiers import LocalTiers
from kvtier.tiers.lower.lower_tiers import (
    NOTHING_TO_ASK,
    NOWHERE,
    Clearing,
    Fetch,
    Inquiry,
    Lost,
    LowerHints,
    LowerStatistics,
    OnFetched,
    Places,
    ReadPriority,
    SpillProgress,
)
from kvtier.tiers.lower.purge import Purge, PurgeOrder
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.named_blocks import NamedBlocks, OwnerNumbers
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.transfer.lane import LaneSpeed

STALE = 0.1  # of all questions are answered by what was known some time ago
AT_ONCE = 0.3  # of all messages arrive in the call that sends them
SOON = 0.5  # of those on their way arrive in a poll


class LateFetch:
    """See `Fetch`. What the tiers below have leased is not known here before their answer has arrived."""

    def __init__(self, tiers: "UnreliableTiers", group_id: int, blocks: NamedBlocks, on_fetched: OnFetched) -> None:
        self.group_id = group_id
        self.slots: Places = np.full(len(blocks.parents), ABSENT, np.int32)
        self.failures: dict[int, Reason] = {}
        self.on_fetched = on_fetched
        self.inner: Fetch | None = None  # once the question has arrived
        self.open = set(range(len(self.slots)))  # neither here nor failed nor released
        self._tiers = tiers

    @property
    def num_leased(self) -> int:
        return int(np.count_nonzero(self.slots != ABSENT))

    def digest(self, place: int) -> bytes:
        assert self.inner is not None, "asked before anything has come"
        return self.inner.digest(place)

    def tenant(self, place: int) -> bytes:
        assert self.inner is not None, "asked before anything has come"
        return self.inner.tenant(place)

    def release(self, places: Sequence[int] | npt.NDArray[np.int64]) -> None:
        self.slots[np.asarray(places, np.int64)] = ABSENT
        self.open.difference_update(np.asarray(places, np.int64).tolist())
        if self.inner is not None:
            self.inner.release(places)
        self._tiers.released(self)

    def time_out(self) -> None:
        self._tiers.time_out(self)


class UnreliableStatus:
    """The state of `UnreliableTiers`; implements `LowerStatus`."""

    def __init__(self, tiers: "UnreliableTiers") -> None:
        self._tiers = tiers

    @property
    def num_slots(self) -> Sequence[int]:
        return self._tiers.inner.status.num_slots

    @property
    def host_bytes(self) -> int:
        return self._tiers.inner.status.host_bytes if self._tiers.is_alive else 0

    @property
    def num_changes(self) -> int:
        return self._tiers.inner.status.num_changes + self._tiers.num_deaths

    @property
    def epoch(self) -> int:
        return self._tiers.inner.status.epoch + self._tiers.num_deaths

    @property
    def is_indexed(self) -> bool:
        return self._tiers.inner.status.is_indexed

    @property
    def is_readable(self) -> bool:
        return self._tiers.is_alive and self._tiers.inner.status.is_readable

    @property
    def is_making_room(self) -> bool:
        return self._tiers.is_alive and self._tiers.inner.status.is_making_room

    @property
    def clearing(self) -> Clearing:
        return self._tiers.inner.status.clearing

    def read_speed(self, tier: Tier) -> LaneSpeed:
        return self._tiers.inner.status.read_speed(tier)

    def queued_read_bytes(self, tier: Tier) -> int:
        return self._tiers.inner.status.queued_read_bytes(tier)

    def spill_progress(self) -> SpillProgress:
        alive = self._tiers.is_alive
        return self._tiers.inner.status.spill_progress() if alive else SpillProgress(has_target=True)

    def statistics(self) -> LowerStatistics:
        return self._tiers.inner.status.statistics()

    def check(self) -> None:
        self._tiers.inner.status.check()
        for fetch in self._tiers.fetches:
            assert fetch.open or fetch.num_leased, "a fetch that is over is kept"


class UnreliableHints(LowerHints):
    """The hints that `UnreliableTiers` follow while they are alive. `evict_last` names a slot found some time ago."""

    def __init__(self, tiers: "UnreliableTiers") -> None:
        self._tiers = tiers

    @property
    def can_ask(self) -> bool:
        return self._tiers.is_alive and self._tiers.inner.hints.can_ask

    def inquire(self, group_id: int, names: Sequence[BlockName]) -> Inquiry:
        return self._tiers.inner.hints.inquire(group_id, names) if self._tiers.is_alive else NOTHING_TO_ASK

    def spill(self) -> None:
        if self._tiers.is_alive:
            self._tiers.inner.hints.spill()

    def make_room(self) -> None:
        if self._tiers.is_alive:
            self._tiers.inner.hints.make_room()


class UnreliableTiers:
    """See `LowerTiers`. Everything is done by *inner*, but for the messages to and from it.

    It may `die`: what it was asked and has not answered fails, nothing is found, nothing taken. It comes back empty but
    for its disk once all that was leased of it has been let go, as a new process would have a memory of its own.
    """

    def __init__(self, inner: LocalTiers, rng: random.Random) -> None:
        self.inner = inner
        self.status = UnreliableStatus(self)
        self.hints = UnreliableHints(self)
        self.is_alive = True
        self.num_deaths = 0
        self._rng = rng
        self.fetches: list[LateFetch] = []
        self._inbox: list[Callable[[], None]] = []  # messages on their way down
        self._outbox: list[Callable[[], None]] = []  # and up
        self._reserved: set[tuple[int, int]] = set()  # group and slot
        self._known: dict[tuple[int, BlockName], int] = {}  # where blocks were some time ago
        self._to_tell: list[Callable[[], None]] = []
        self._lost: list[Lost] = []

    def die(self) -> None:
        """Have nothing, from now on."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.num_deaths += 1
        self._outbox.clear()
        self._known.clear()
        self._lost.clear()
        for message in self._take(self._inbox):  # of what has been reserved or released it learns before it ends
            message()
        self._outbox.clear()
        for fetch in list(self.fetches):
            for place in sorted(fetch.open):
                fetch.failures[place] = Reason.FAILED
                self._to_tell.append(self._telling(fetch, place, Reason.FAILED))
            self._give_back(fetch, sorted(fetch.open))
            fetch.open.clear()
            self.released(fetch)

    @property
    def is_quiet(self) -> bool:
        """Whether no message is on its way, nor a new process that could start."""
        is_waiting = self._inbox or self._outbox or self._to_tell
        return not is_waiting and bool(self.is_alive or self.fetches or self._reserved)

    def find(self, group_id: int, names: Sequence[BlockName]) -> Places:
        if not self.is_alive:
            return np.full(len(names), NOWHERE, np.int32)
        places = self.inner.find(group_id, names).copy()
        is_stale = self._rng.random() < STALE
        for i, (name, place) in enumerate(zip(names, places.tolist(), strict=True)):
            if is_stale:
                places[i] = self._known.get((group_id, name), place)
            else:
                self._known[group_id, name] = place
        return places

    def find_run(self, group_id: int, names: Sequence[BlockName]) -> Places:
        places = self.find(group_id, names)
        nowhere = np.flatnonzero(places == NOWHERE)
        return places[: nowhere[0]] if len(nowhere) else places

    def fetch(
        self,
        group_id: int,
        blocks: NamedBlocks,
        on_fetched: OnFetched,
        found: Places | None = None,
        priority: ReadPriority = ReadPriority.NOW,
    ) -> LateFetch:
        return self._fetch(
            group_id, blocks, on_fetched, lambda answer: self.inner.fetch(group_id, blocks, answer, priority=priority)
        )

    def time_out(self, fetch: LateFetch) -> None:
        """A fetch is late."""

        def arrive() -> None:
            if fetch.inner is not None and fetch.open and self.is_alive:
                fetch.inner.time_out()

        self._send(arrive)

    def released(self, fetch: LateFetch) -> None:
        """A fetch may be over."""
        if not fetch.open and not fetch.num_leased:
            with suppress(ValueError):
                self.fetches.remove(fetch)

    def reserve(self, group_id: int, num_slots: int) -> list[int]:
        if not self.is_alive:
            return []
        slots = self.inner.reserve(group_id, self._rng.choice([num_slots, num_slots, num_slots // 2]))
        self._reserved.update((group_id, slot) for slot in slots)
        return slots

    def publish(
        self, group_id: int, slots: Ids, rows: Sequence[NamedSpan], digests: Sequence[bytes], owners: OwnerNumbers
    ) -> None:
        def arrive() -> None:
            if self.is_alive:
                self._unreserve(group_id, slots)
                self.inner.publish(group_id, slots, rows, digests, owners)
            else:
                self.abandon(group_id, slots)

        self._send(arrive)

    def abandon(self, group_id: int, slots: Ids) -> None:
        self._unreserve(group_id, slots)
        self.inner.abandon(group_id, slots)

    def refresh(self, group_id: int, names: Sequence[BlockName], were_read: Sequence[bool]) -> None:
        self._send(lambda: self.inner.refresh(group_id, names, were_read))

    def forget(self, group_id: int, names: Sequence[BlockName]) -> None:
        self._send(lambda: self.inner.forget(group_id, names))

    def clear(self) -> bool:
        if not self.is_alive or self._inbox or not self.inner.clear():
            return False
        self._known.clear()
        for fetch in list(self.fetches):
            fetch.release(range(len(fetch.slots)))
        return True

    def purge(self, order: PurgeOrder) -> Purge:
        return self.inner.purge(order)

    def poll(self) -> None:
        self.inner.poll()
        if not self.is_alive and not self.fetches and not self._reserved:
            self._begin_again()
        for box in (self._inbox, self._outbox):
            for message in self._take(box):
                if self._rng.random() < SOON:
                    message()
                else:
                    box.append(message)
        for tell in self._take(self._to_tell):
            tell()

    def pop_lost(self) -> Sequence[Lost]:
        self._lost += self.inner.pop_lost() if self.is_alive else ()
        if self._rng.random() < SOON:
            return ()
        lost, self._lost = self._lost, []
        return lost

    def _fetch(
        self, group_id: int, blocks: NamedBlocks, on_fetched: OnFetched, ask: Callable[[OnFetched], Fetch]
    ) -> LateFetch:
        fetch = LateFetch(self, group_id, blocks, on_fetched)
        if not self.is_alive:
            for place in sorted(fetch.open):
                fetch.failures[place] = Reason.FAILED
                self._to_tell.append(self._telling(fetch, place, Reason.FAILED))
            fetch.open.clear()
            return fetch

        def arrive() -> None:
            if not fetch.open or not self.is_alive:
                return  # nobody waits for it any more
            fetch.inner = ask(lambda _, place, failure: self._answer(fetch, place, failure))
            gone = sorted(set(range(len(fetch.slots))) - fetch.open)
            self._give_back(fetch, gone)
            for place in np.flatnonzero(fetch.inner.slots != ABSENT).tolist():
                self._answer(fetch, place, None)

        self.fetches.append(fetch)
        self._send(arrive)
        return fetch

    def _answer(self, fetch: LateFetch, place: int, failure: Reason | None) -> None:
        def arrive() -> None:
            if place not in fetch.open:
                return
            assert fetch.inner is not None, "an answer to what was not asked"
            if failure is None and fetch.inner.slots[place] == ABSENT:
                return  # the tiers below were cleared meanwhile
            fetch.open.discard(place)
            if failure is None:
                fetch.slots[place] = fetch.inner.slots[place]
            else:
                fetch.failures[place] = failure
            self.released(fetch)
            self._to_tell.append(self._telling(fetch, place, failure))

        self._outbox.append(arrive)

    def _telling(self, fetch: LateFetch, place: int, failure: Reason | None) -> Callable[[], None]:
        def tell() -> None:
            if failure is not None or fetch.slots[place] != ABSENT:
                fetch.on_fetched(fetch, place, failure)

        return tell

    def _give_back(self, fetch: LateFetch, places: Sequence[int]) -> None:
        if fetch.inner is not None and places:
            fetch.inner.release(places)

    def _unreserve(self, group_id: int, slots: Ids) -> None:
        gone = {(group_id, slot) for slot in slots.tolist()}
        assert gone <= self._reserved, "a slot that was not reserved"
        self._reserved -= gone

    def _begin_again(self) -> None:
        index = self.inner.index
        if not self._inbox and all(slots.pool.num_leases == 0 for slots in index.host):
            index.clear_host(is_event=False)
            self._outbox.clear()
            self.is_alive = True
            self.num_deaths += 1  # what was known of the one before is void

    def _send(self, message: Callable[[], None]) -> None:
        if not self._inbox and self._rng.random() < AT_ONCE:
            message()
        else:
            self._inbox.append(message)

    def _take(self, box: list[Callable[[], None]]) -> list[Callable[[], None]]:
        """All of them; the caller puts back what has still to wait. In any order, what waits included."""
        messages = box[:]
        box.clear()
        self._rng.shuffle(messages)
        return messages
