"""Promises: chunks that an engine was told it can load, leased and verified until it has loaded them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.engine.sidecar.layout_tiers import LayoutTiers
from kvtier.engine.sidecar.lmcache.digest_lane import DigestLane
from kvtier.engine.sidecar.lmcache.registrations import Instance
from kvtier.engine.sidecar.lmcache.stores import Stores
from kvtier.engine.sidecar.lmcache.verifier import Checked, Verifier
from kvtier.engine.sidecar.port import Client
from kvtier.engine.sidecar.shared_fetch import SharedFetch, within_share
from kvtier.engine.sidecar.shares import Share, Shares
from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.lower.inquiry import AllOf, Inquiry
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.tiers.up.promotion import Misses

MOST_PROMISES = 4096
NO_MISSES = Misses(())
INDEXING_S = 2.0  # so long a lookup waits for the disk's index, which is read when a layout is seen for the first time
LOOKUP_S = 10.0  # after that the prefix that has come counts …
RETRIEVE_S = 3.0  # … where a worker stands still meanwhile: less than what a client waits for any answer
IDLE_S = 60.0  # a promise lasts so long without a word of its request
COMING_BYTES = 256 << 20  # while so much is read from disk for a client, its other lookups wait: then the others'


@dataclass(frozen=True, slots=True)
class Reading:
    """A worker copies these chunks out of the segment, until it says that it has, or its process has ended. No time
    ends it: a thread that is stopped in the middle of a copy goes on with it whenever it is woken up."""

    instance: Instance
    chunks: range
    begun_at: float


@dataclass(slots=True)
class Counts:
    """Totals since the start, in chunks."""

    num_asked: int = 0
    num_promised: int = 0
    num_loaded: int = 0
    num_corrupt: int = 0
    num_late: int = 0  # left out since they had not come in time
    num_over_share: int = 0  # left out since the client has its share of host memory leased


class RankChunks:
    """One rank's chunks of a promise, by place. A chunk is leased while it is wanted, or being verified or read; then
    its lease ends, the tail's first."""

    def __init__(
        self, rank: int, tiers: LayoutTiers, blocks: NamedBlocks, num_readers: int, verifier: Verifier, share: Share
    ) -> None:
        self.rank = rank
        self.num_good = 0  # the first so many are verified, of those that count
        self.num_corrupt = 0
        self.num_late = 0  # left out since the disk hangs
        self.end = len(blocks.names)  # chunks from here on do not count any more
        self.readings: list[Reading] = []
        self._tiers = tiers
        self._names = blocks.names
        self._verifier = verifier
        self._checked: dict[int, Checked] = {}  # by place
        self._share = share
        self._num_readers = num_readers
        self._have_read: set[int] = set()  # instances
        self._is_held = np.ones(self.end, np.bool_)  # leased, or waited for
        self._is_wanted = np.ones(self.end, np.bool_)
        self._is_being_verified = np.zeros(self.end, np.bool_)
        self._is_good = np.zeros(self.end, np.bool_)
        self._depths = np.full(self.end, Tier.HOST.depth, np.uint8)  # of the tiers that they came from
        self._arrived: list[int] = []
        self._fetch = SharedFetch(tiers, rank, blocks, share, self._on_fetched)
        self._arrived += np.flatnonzero(self._fetch.slots != ABSENT).tolist()

    @property
    def names(self) -> Sequence[BlockName]:
        """Of the chunks, all of which were there."""
        return self._names

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is leased or waited for."""
        return not self._is_held.any()

    def has(self, chunks: range) -> bool:
        """Whether these are still kept for who loads them."""
        own = slice(chunks.start, chunks.stop)
        return chunks.stop <= self.end and bool((self._is_wanted[own] & self._is_held[own]).all())

    def depths(self, num_chunks: int) -> npt.NDArray[np.uint8]:
        """For each of the first so many chunks `Tier.depth` of the tier that it came from."""
        return self._depths[:num_chunks]

    def slots(self, chunks: range) -> list[int]:
        """Where they are."""
        return [int(slot) for slot in self._fetch.slots[chunks.start : chunks.stop]]

    def verify_arrived(self) -> None:
        """Have what has come since the last call verified."""
        places = [place for place in self._arrived if place < self.end and self._is_held[place]]
        self._arrived = []
        if not places:
            return
        slots = [self._fetch.slots.item(place) for place in places]
        known = [self._fetch.digest(place) for place in places]
        self._is_being_verified[places] = True

        def on_verified(part: Sequence[int], are_good: Sequence[bool | None]) -> None:
            self._on_verified([places[i] for i in part], are_good)

        memory = self._tiers.memories[self.rank]
        checked = self._verifier.verify(self._share, memory, slots, known, on_verified)
        self._checked.update(zip(places, checked, strict=True))
        good = [place for place, each in zip(places, checked, strict=True) if each.is_good]
        self._on_verified(good, [True] * len(good))

    @property
    def checked(self) -> list[Checked]:
        """What it has of the verifier."""
        return list(self._checked.values())

    def cut(self, end: int) -> None:
        """Chunks from *end* on do not count any more."""
        self.end = min(self.end, end)
        self.let_go()

    def do_not_want(self, chunks: range) -> None:
        """These are not loaded from this promise."""
        self._is_wanted[chunks.start : chunks.stop] = False
        self.let_go()

    def begin_reading(self, instance: Instance, chunks: range, now: float) -> list[int]:
        """The worker copies these out from now on; where they are."""
        self.readings.append(Reading(instance, chunks, now))
        return self.slots(chunks)

    def end_reading(self, reading: Reading) -> None:
        """The worker has copied them, or never will."""
        self.readings.remove(reading)
        self._have_read.add(reading.instance.instance_id)
        if len(self._have_read) >= self._num_readers:
            self._is_wanted[:] = False
        self.let_go()
        places = range(reading.chunks.stop - 1, reading.chunks.start - 1, -1)
        names = [self._names[place] for place in places]
        self._tiers.tiers.refresh(self.rank, names, [bool(self._depths[place] == Tier.DISK.depth) for place in places])

    def let_go(self) -> None:
        """End the leases that nothing needs any more."""
        needed = self._is_wanted.copy()
        needed[self.end :] = False
        needed |= self._is_being_verified
        for reading in self.readings:
            needed[reading.chunks.start : reading.chunks.stop] = True
        going = np.flatnonzero(self._is_held & ~needed)
        if len(going):
            self._is_held[going] = False
            self._verifier.release([self._checked.pop(p) for p in going.tolist() if p in self._checked])
            self._fetch.release(going[::-1])

    def _on_fetched(self, place: int, failure: Reason | None) -> None:
        if failure is None:
            self._depths[place] = self._fetch.tier(place).depth
            self._arrived.append(place)
        elif place < self.end:
            self.num_late += self.end - place if failure is Reason.DEADLINE else 0
            self.end = place

    def _on_verified(self, places: Sequence[int], are_good: Sequence[bool | None]) -> None:
        self._is_being_verified[places] = False
        self._is_good[places] = [bool(is_good) for is_good in are_good]
        bad = np.flatnonzero(~self._is_good[self.num_good :])
        self.num_good = self.num_good + int(bad[0]) if len(bad) else len(self._is_good)
        for place, is_good in zip(places, are_good, strict=True):
            if is_good:
                continue
            self.end = min(self.end, place)
            if is_good is False:
                self.num_corrupt += 1
                name = self._names[place]
                if self._tiers.tiers.find(self.rank, [name])[0] == self._fetch.slots[place]:  # else it was stored anew
                    self._tiers.tiers.forget(self.rank, [name])
        self.let_go()


@dataclass(eq=False, slots=True)
class Promise:
    """Chunks of one prefix, from number *first* on, on its way to be a promise; it is one once it is settled. Then the
    first `num_chunks` of them are in host memory, leased and verified, for each of its ranks.

    The chunks *before* them have to be here too, and are not leased: their engine has them itself. If some are not
    here, nothing is promised, and the engine, which is told where they end, stores them again.
    """

    client: Client[list[bytes]]  # whose request it is
    request_id: str
    tiers: LayoutTiers
    blocks: NamedBlocks
    first: int
    ranks: Sequence[int]
    num_readers: int
    begun_at: float
    give_up_at: float
    heard_at: float
    on_settled: "Callable[[Promise], None]"
    before: Sequence[BlockName] = ()
    num_before: int = 0  # of them that are here
    misses: Misses = NO_MISSES  # why chunks cannot be loaded, in chunks
    chunks: list[RankChunks] = field(default_factory=list)  # empty while it waits for stores
    inquiry: Inquiry | None = None  # to tiers that cannot tell at once what they have
    is_begun: bool = False
    is_settled: bool = False
    num_chunks: int = 0  # that can be loaded, once it is settled
    is_ended: bool = False  # no more is loaded from it than is being read now

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is leased, and nothing will be."""
        return self.is_ended and all(own.is_over for own in self.chunks)

    @property
    def hit_end(self) -> int:
        """What a lookup is told: where the hit ends, in chunks from the beginning of the prefix."""
        is_whole = self.num_before == len(self.before)
        return self.num_before + self.num_chunks if is_whole else self.num_before

    @property
    def depths(self) -> bytes:
        """For each chunk that can be loaded `Tier.depth` of the coldest tier that a rank's part came from."""
        depths = np.full(self.num_chunks, Tier.HOST.depth, np.uint8)
        for own in self.chunks:
            np.maximum(depths, own.depths(self.num_chunks), out=depths)
        return depths.tobytes()

    def has_asked(self, missing: Sequence[BlockName]) -> bool:
        """Whether tiers that cannot tell at once have been asked about the chunks that nothing nearer has, and have
        answered."""
        if self.inquiry is None:
            self.inquiry = AllOf([self.tiers.tiers.inquire(rank, missing) for rank in self.ranks])
        return self.inquiry.is_done

    def of_rank(self, rank: int) -> RankChunks | None:
        """The rank's part of it."""
        return next((own for own in self.chunks if own.rank == rank), None)

    def has(self, rank: int, chunks: range, last_name: BlockName) -> bool:
        """Whether it keeps these chunks of the prefix for the rank; the name of the last stands for all of them."""
        own, here = self.of_rank(rank), self.places(chunks)
        return own is not None and here.start >= 0 and own.has(here) and self.blocks.names[here.stop - 1] == last_name

    def places(self, chunks: range) -> range:
        """The chunks of the prefix, counted from the promise's first."""
        return range(chunks.start - self.first, chunks.stop - self.first)

    def end(self) -> None:
        """Nothing more is loaded from it."""
        self.is_ended = self.is_settled = True
        self.num_chunks = self.num_before = 0
        for own in self.chunks:
            own.do_not_want(range(len(self.blocks.names)))


class Promises:
    """Makes and keeps promises. What a worker may be copying is not given up while its process may still run: else it
    would copy what another engine has written there. All else ends after `IDLE_S`. Owned by the door's thread."""

    def __init__(
        self,
        lane: DigestLane,
        stores: Stores,
        shares: Shares,
        clock: Callable[[], float],
        on_loaded: Callable[[Promise, int, int, float], None] = lambda promise, rank, num_chunks, seconds: None,
    ) -> None:
        """*on_loaded*: a worker of that rank has loaded so many chunks of a promise, in so many seconds."""
        self.counts = Counts()
        self._on_loaded = on_loaded
        self._verifier = Verifier(lane, clock)
        self._stores = stores
        self._shares = shares
        self._clock = clock
        self._promises: dict[str, list[Promise]] = {}  # by request

    def __iter__(self) -> Iterator[Promise]:
        return iter([promise for promises in self._promises.values() for promise in promises])

    def __len__(self) -> int:
        return sum(map(len, self._promises.values()))

    def begin(
        self,
        client: Client[list[bytes]],
        request_id: str,
        tiers: LayoutTiers,
        blocks: NamedBlocks,
        ranks: Sequence[int],
        num_readers: int,
        first: int = 0,
        most_s: float = LOOKUP_S,
        on_settled: Callable[[Promise], None] = lambda promise: None,
        before: Sequence[BlockName] = (),
    ) -> Promise:
        """Find out how many of the *blocks*, from chunk *first* of their prefix on, can be loaded by *num_readers*
        workers for each of the ranks; none if one of the chunks *before* is not here. After *most_s*, or the time that
        a read may take, what has come counts. *on_settled* is called once that is known; not if the request ends
        before."""
        now = self._clock()
        give_up_at = now + min(most_s, tiers.read_timeout_s)
        promise = Promise(
            client, request_id, tiers, blocks, first, ranks, num_readers, now, give_up_at, now, on_settled, before
        )
        self._promises.setdefault(request_id, []).append(promise)
        self.counts.num_asked += len(blocks.names)
        self._go_on(promise)
        return promise

    def of_request(self, request_id: str) -> list[Promise]:
        """All promises to the request that have not ended, newest first. It was heard of just now."""
        promises = [promise for promise in self._promises.get(request_id, ()) if not promise.is_ended]
        for promise in promises:
            promise.heard_at = self._clock()
        return promises[::-1]

    def free(self, client: Client[list[bytes]], request_id: str, chunks: range) -> None:
        """These chunks of the request's prefix are not loaded from what this client was promised."""
        for promise in self.of_request(request_id):
            if promise.client is not client:
                continue
            here = promise.places(chunks)
            for own in promise.chunks:
                own.do_not_want(range(max(0, here.start), max(0, here.stop)))

    def loaded(self, request_id: str, rank: int, instance: Instance, chunks: range) -> None:
        """The worker has loaded these chunks of the request's prefix, or will not. This ends one load, the oldest of
        these chunks: another one of the same may be under way."""
        found = self._oldest_reading(request_id, rank, instance, chunks)
        if found is not None:
            promise, own, reading = found
            self.counts.num_loaded += len(chunks)
            own.end_reading(reading)
            self._on_loaded(promise, rank, len(chunks), self._clock() - reading.begun_at)
            self._forget_those_over()

    def end_request(self, client: Client[list[bytes]], request_id: str) -> None:
        """The client's request is over; what a worker is copying for it stays until that is done. Other engines may
        have a request of that name."""
        for promise in self._promises.get(request_id, ()):
            if promise.client is client:
                promise.end()
        self._forget_those_over()

    def is_read_by(self, client: Client[list[bytes]]) -> bool:
        """Return whether a worker of this connection copies chunks out of the segment."""
        return any(
            reading.instance.client is client for promise in self for own in promise.chunks for reading in own.readings
        )

    def end_instance(self, instance: Instance) -> None:
        """End the loads of a worker whose process has ended."""
        self._end_readings(lambda reading: reading.instance is instance)

    def end_client(self, client: Client[list[bytes]]) -> None:
        """Its connection has ended."""
        for promise in self:
            if promise.client is client:
                promise.end()
        self._forget_those_over()

    def tick(self) -> None:
        """Go on with all that are not settled, and end those whose time is over."""
        now = self._clock()
        for promise in self:
            if not promise.is_settled:
                self._go_on(promise)
            if not promise.is_settled and now >= promise.give_up_at:
                self._time_out(promise)
            if not promise.is_ended and now - promise.heard_at > IDLE_S:
                promise.end()
        self._forget_those_over()

    def check(self) -> None:
        """Raise AssertionError if what is verified and what is held disagree."""
        self._verifier.check(checked for promise in self for own in promise.chunks for checked in own.checked)

    def _go_on(self, promise: Promise) -> None:
        if not promise.is_begun and not self._begin_chunks(promise):
            return
        for own in promise.chunks:
            own.verify_arrived()
        end = min((own.end for own in promise.chunks), default=0)
        if all(own.num_good >= end for own in promise.chunks):
            self._settle(promise, end)
        else:
            self._cut(promise, end)

    def _settle(self, promise: Promise, num_chunks: int) -> None:
        self._cut(promise, num_chunks)
        promise.is_settled = True
        promise.num_chunks = num_chunks
        self.counts.num_promised += num_chunks
        promise.on_settled(promise)

    def _cut(self, promise: Promise, end: int) -> None:
        """What one rank does not have is of no use to the others."""
        for own in promise.chunks:
            if own.num_corrupt or own.num_late:
                why = Reason.CORRUPT if own.num_corrupt else Reason.DEADLINE
                promise.misses = promise.misses.cut(len(own.names), why)
            self.counts.num_corrupt += own.num_corrupt
            self.counts.num_late += own.num_late
            own.num_corrupt = own.num_late = 0
            own.cut(end)

    def _begin_chunks(self, promise: Promise) -> bool:
        """Lease what is there for all ranks, within the client's share; False if a chunk that is missing may be there
        in a moment."""
        tiers = promise.tiers
        promise.num_before = min(len(tiers.tiers.find_run(rank, promise.before)) for rank in promise.ranks)
        if promise.num_before < len(promise.before):
            missing = promise.before[promise.num_before]
            if self._may_come(promise, [*promise.before[promise.num_before :], *promise.blocks.names]):
                return False
            promise.is_begun = True
            promise.misses = Misses(((len(promise.blocks.names), tiers.why_missing(missing)),))
            return True
        share = self._shares.of(promise.client)
        within = within_share(tiers, promise.ranks, promise.blocks.names, share)
        names = within.names
        if within.is_read and share.num_coming_bytes >= COMING_BYTES and self._clock() < promise.give_up_at:
            return False
        num_there = min(tiers.find_run(rank, names) for rank in promise.ranks)
        if num_there < len(names) and self._may_come(promise, names[num_there:]):
            return False
        promise.is_begun = True
        for rank in promise.ranks if promise.before else ():
            tiers.refresh(rank, promise.before[::-1], ())
        self.counts.num_over_share += within.num_beyond
        promise.misses = Misses(((len(promise.blocks.names), Reason.CAPACITY),))
        if num_there < len(names):
            promise.misses = promise.misses.cut(len(names), tiers.why_missing(names[num_there]))
        if num_there:
            blocks = NamedBlocks(names[:num_there], promise.blocks.parents[:num_there], promise.blocks.tenant)
            promise.chunks = [
                RankChunks(rank, tiers, blocks, promise.num_readers, self._verifier, share) for rank in promise.ranks
            ]
        return True

    def _may_come(self, promise: Promise, missing: Sequence[BlockName]) -> bool:
        """Return whether the first of these chunks, which is not there, may be in a moment."""
        now, tiers = self._clock(), promise.tiers
        if now >= promise.give_up_at:
            return False
        if tiers.is_being_indexed and now < promise.begun_at + INDEXING_S:
            return True
        if not promise.has_asked(missing):
            return True
        return any(self._stores.is_coming(tiers, rank, missing[0]) for rank in promise.ranks)

    def _time_out(self, promise: Promise) -> None:
        """Its time is over: what is verified for all ranks counts. The disk may have a long queue, and hang or not."""
        promise.is_begun = True
        end = min((own.num_good for own in promise.chunks), default=0)
        self.counts.num_late += max((own.end - end for own in promise.chunks), default=0)
        promise.misses = promise.misses.cut(max((own.end for own in promise.chunks), default=0), Reason.DEADLINE)
        self._settle(promise, end)

    def _oldest_reading(
        self, request_id: str, rank: int, instance: Instance, chunks: range
    ) -> tuple[Promise, RankChunks, Reading] | None:
        found = [
            (promise, own, reading)
            for promise in self._promises.get(request_id, ())
            for own in promise.chunks
            for reading in own.readings
            if own.rank == rank and reading.instance is instance and reading.chunks == promise.places(chunks)
        ]
        return min(found, key=lambda each: each[2].begun_at, default=None)

    def _end_readings(self, is_over: Callable[[Reading], bool]) -> None:
        for promise in self:
            for own in promise.chunks:
                for reading in [reading for reading in own.readings if is_over(reading)]:
                    own.end_reading(reading)
        self._forget_those_over()

    def _forget_those_over(self) -> None:
        for request_id, promises in list(self._promises.items()):
            left = [promise for promise in promises if not promise.is_over]
            if left:
                self._promises[request_id] = left
            else:
                del self._promises[request_id]
