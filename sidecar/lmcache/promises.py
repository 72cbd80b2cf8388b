"""Promises: hits that were reported to engines, whose chunks stay leased until the engines have loaded them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from kvtier.sidecar.layout_tiers import LayoutTiers
from kvtier.sidecar.lmcache.digest_lane import DigestLane
from kvtier.sidecar.lmcache.hybrid_layout import groups_of
from kvtier.sidecar.lmcache.registrations import Instance
from kvtier.sidecar.lmcache.stores import Stores
from kvtier.sidecar.lmcache.verifier import Checked, Verifier
from kvtier.sidecar.port import Client
from kvtier.sidecar.shared_fetch import SharedFetch
from kvtier.sidecar.shared_hit import SharedHit, longest_of, misses_behind, needed
from kvtier.sidecar.shares import Share, Shares
from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.lower.lower_tiers import AllOf, Inquiry
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.tiers.up.promotion import Misses

MAX_PROMISES = 4096
NO_MISSES = Misses(())
INDEXING_S = 2.0  # longest wait of a lookup for the disk's index, which is read when a layout is first seen
LOOKUP_S = 10.0  # time limit of a lookup; then the prefix that has arrived is the hit
RETRIEVE_S = 3.0  # time limit of reads for which a worker waits; less than the client's timeout for an answer
IDLE_S = 60.0  # a promise ends after this long without a message about its request
COMING_BYTES = 256 << 20  # while this much is being read from disk for a client, its other lookups wait


@dataclass(frozen=True, slots=True)
class Reading:
    """A worker's copy, in flight, of one group's *chunks* out of the segment (the sidecar's host memory).

    The copy counts as ended when the worker reports that it has loaded all chunks of *load*, or when the worker's
    process has ended. It never times out, because a stopped thread may continue its copy at any later time.
    """

    instance: Instance
    load: range
    chunks: range
    begun_at: float


@dataclass(slots=True)
class Counts:
    """Numbers of chunks in all lookups and loads since the sidecar's start."""

    num_asked: int = 0
    num_promised: int = 0  # leased in host memory, and reported to the engine
    num_loaded: int = 0
    num_corrupt: int = 0
    num_late: int = 0  # left out because they had not arrived in time
    num_over_share: int = 0  # left out because the client's share of host memory was leased


class LoadState(Enum):
    """What is known about a load of chunks from a `Promise` (a hit reported to an engine)."""

    PENDING = auto()  # some chunks are still being read or verified
    VERIFIED = auto()  # a worker may copy the chunks
    BROKEN = auto()  # a chunk of the hit was damaged, or its lease has ended
    BEYOND = auto()  # the hit does not have all of the chunks


class GroupChunks:
    """The chunks of one KV cache group of one rank in a `Promise` (a hit reported to an engine), and their leases.

    A chunk's place is its index in the promise's *blocks*. A chunk stays leased while a worker may load or copy it. In
    a group with a sliding window or recurrent states, only the last chunks of the hit are leased.
    """

    def __init__(
        self,
        group_id: int,
        group: AttentionGroup,
        tiers: LayoutTiers,
        blocks: NamedBlocks,
        num_chunks: int,
        num_readers: int,
        verifier: Verifier,
        share: Share,
    ) -> None:
        """Lease the chunks that the group needs for a hit of the first *num_chunks* of the *blocks*.

        The leases end after *num_readers* workers have loaded the chunks.
        """
        own = needed(group, num_chunks)
        self.group_id = group_id
        self.first = own.start  # chunks before it are not needed
        self.num_arrived = own.start  # length of the prefix whose chunks are in host memory or not needed
        self.num_corrupt = 0
        self.num_late = 0  # left out because the disk hangs
        self.lost: list[int] = []  # chunks that could not be read
        self.end = num_chunks  # chunks from this place on are no longer part of the hit
        self.readings: list[Reading] = []
        self._group = group
        self._tiers = tiers
        self._names = blocks.names[:num_chunks]
        self._verifier = verifier
        self._checked: dict[int, Checked] = {}  # by place
        self._share = share
        self._num_readers = num_readers
        self._have_read: set[int] = set()  # ids of the workers that have loaded chunks
        self._is_held = np.arange(num_chunks) >= self.first  # leased, or waited for
        self._is_wanted = self._is_held.copy()
        self._has_arrived = ~self._is_held  # in host memory, or not needed
        self._is_good = np.zeros(self.end, np.bool_)  # verified
        self._depths = np.full(self.end, Tier.HOST.depth, np.uint8)  # of the tiers from which they came
        self._unverified: list[int] = []  # chunks that have arrived in host memory since the last call of `verify`
        self._fetch = SharedFetch(tiers, group_id, blocks.of(group, own), share, self._on_fetched)
        self._on_arrived((self.first + np.flatnonzero(self._fetch.slots != ABSENT)).tolist())

    @property
    def num_chunks(self) -> int:
        """Length in chunks of the hit as it was leased, even if `cut` has shortened it since."""
        return len(self._names)

    @property
    def have_arrived(self) -> npt.NDArray[np.bool_]:
        """Array that says for each chunk of the original hit whether the chunk is in host memory."""
        return self._has_arrived & (np.arange(self.num_chunks) >= self.first)

    @property
    def is_over(self) -> bool:
        """True if no chunk is leased or being fetched any more."""
        return not self._is_held.any()

    def needed_of(self, chunks: range) -> range:
        """Return those of *chunks* that the group needs so that the computation can continue after the last one."""
        return range(max(chunks.start, needed(self._group, chunks.stop).start), chunks.stop)

    def has(self, load: range) -> bool:
        """Return whether a worker can load the chunks *load*: each of them that the group needs is still leased."""
        chunks = self.needed_of(load)
        own = slice(chunks.start, chunks.stop)
        return chunks.stop <= self.end and bool((self._is_wanted[own] & self._is_held[own]).all())

    def has_verified(self, load: range) -> bool:
        """Return whether each of the chunks *load* that the group needs is verified."""
        chunks = self.needed_of(load)
        return bool(self._is_good[chunks.start : chunks.stop].all())

    def depths(self, num_chunks: int) -> npt.NDArray[np.uint8]:
        """Return for each of the first *num_chunks* chunks the `Tier.depth` of the tier from which it came."""
        return self._depths[:num_chunks]

    def slots(self, chunks: range) -> list[int]:
        """Return the slots of these chunks."""
        return [int(slot) for slot in self._fetch.slots[chunks.start - self.first : chunks.stop - self.first]]

    def verify(self) -> None:
        """Start to verify the chunks of a settled hit. Further calls do nothing."""
        places = [place for place in self._unverified if self._is_held[place]]
        self._unverified = []
        if not places:
            return
        slots = self._fetch.slots[np.array(places) - self.first].tolist()
        known = [self._fetch.digest(place - self.first) for place in places]

        def on_verified(part: Sequence[int], are_good: Sequence[bool | None]) -> None:
            self._on_verified([places[i] for i in part], are_good)

        memory = self._tiers.memories[self.group_id]
        checked = self._verifier.verify(self._share, memory, slots, known, on_verified)
        self._checked.update(zip(places, checked, strict=True))
        self._is_good[[place for place, each in zip(places, checked, strict=True) if each.is_good]] = True

    @property
    def checked(self) -> list[Checked]:
        """The `Verifier`'s record of each leased chunk that it has verified or is verifying."""
        return list(self._checked.values())

    def cut(self, end: int) -> None:
        """Shorten the hit to the first *end* chunks."""
        self.end = min(self.end, end)
        self.let_go()

    def unwant(self, chunks: range) -> None:
        """Release *chunks*, which no further load needs. Those being copied are released afterwards."""
        self._is_wanted[chunks.start : chunks.stop] = False
        self.let_go()

    def begin_reading(self, instance: Instance, load: range, now: float) -> list[int]:
        """Record that the worker begins to copy the chunks that it needs for *load*; return their slots."""
        chunks = self.needed_of(load)
        self.readings.append(Reading(instance, load, chunks, now))
        return self.slots(chunks)

    def end_reading(self, reading: Reading) -> None:
        """Record that a worker's copy of chunks (*reading*) has ended, or will never take place."""
        self.readings.remove(reading)
        self._have_read.add(reading.instance.instance_id)
        if len(self._have_read) >= self._num_readers:
            self._is_wanted[:] = False
        self.let_go()
        places = range(reading.chunks.stop - 1, reading.chunks.start - 1, -1)
        names = [self._names[place] for place in places]
        were_read = [bool(self._depths[place] == Tier.DISK.depth) for place in places]
        self._tiers.tiers.refresh(self.group_id, names, were_read)

    def let_go(self) -> None:
        """End the leases on chunks that no load or copy needs any more, the last chunk first.

        If such a chunk is being verified, the result will be ignored.
        """
        needed = self._is_wanted.copy()
        needed[self.end :] = False
        for reading in self.readings:
            needed[reading.chunks.start : reading.chunks.stop] = True
        going = np.flatnonzero(self._is_held & ~needed)
        if len(going):
            self._is_held[going] = False
            self._verifier.release([self._checked.pop(p) for p in going.tolist() if p in self._checked])
            self._fetch.release(going[::-1] - self.first)

    def _on_fetched(self, number: int, failure: Reason | None) -> None:
        place = self.first + number
        if failure is None:
            self._depths[place] = self._fetch.tier(number).depth
            self._on_arrived([place])
            return
        self.lost.append(place)
        if place < self.end:
            self.num_late += self.end - place if failure is Reason.DEADLINE else 0
            self.end = place

    def _on_arrived(self, places: Sequence[int]) -> None:
        self._unverified += places
        self._has_arrived[places] = True
        holes = np.flatnonzero(~self._has_arrived[self.num_arrived :])
        self.num_arrived = self.num_arrived + int(holes[0]) if len(holes) else self.num_chunks

    def _on_verified(self, places: Sequence[int], are_good: Sequence[bool | None]) -> None:
        for place, is_good in zip(places, are_good, strict=True):
            if not self._is_held[place]:  # its lease has ended meanwhile, so another chunk may be in its slot
                continue
            self._is_good[place] = bool(is_good)
            if is_good:
                continue
            self.end = min(self.end, place)
            if is_good is False:
                self.num_corrupt += 1
                name, slot = self._names[place], self._fetch.slots[place - self.first]
                if self._tiers.tiers.find(self.group_id, [name])[0] == slot:  # otherwise the chunk was stored anew
                    self._tiers.tiers.forget(self.group_id, [name])
        self.let_go()


@dataclass(eq=False, slots=True)
class Promise:
    """A promise to an engine that its workers can load chunks of one prompt, from chunk number *first* on.

    The promise is settled as soon as the first `num_chunks` of *blocks* are in host memory and leased, for each of the
    promise's ranks. Chunks are verified before a worker may copy them, see `Promises.verify`.

    *before* names the chunks before *first*, which the engine itself has. They must be cached too, but are not leased.
    If some of them are missing, nothing is promised. Then the engine is told where the cached chunks end, and stores
    the missing ones again.
    """

    client: Client[list[bytes]]  # client that has sent the request
    request_id: str
    tiers: LayoutTiers
    blocks: NamedBlocks
    first: int
    groups: Mapping[int, AttentionGroup]  # of the ranks that load, by number
    num_readers: int
    begun_at: float
    give_up_at: float
    heard_at: float
    on_settled: "Callable[[Promise], None]"
    before: Sequence[BlockName] = ()
    num_before: int = 0  # how many of the first chunks of *before* are cached
    misses: Misses = NO_MISSES  # why chunks cannot be loaded; positions are in chunks
    chunks: list[GroupChunks] = field(default_factory=list)  # empty until chunks are leased
    lost: set[tuple[int, int]] = field(
        default_factory=set
    )  # chunks that could not be read, as pairs of group and place
    inquiry: Inquiry | None = None  # to tiers that cannot answer a lookup at once
    is_begun: bool = False
    is_settled: bool = False
    num_chunks: int = 0  # number of chunks that can be loaded, once the promise is settled
    is_ended: bool = False  # no load starts from it any more

    @property
    def is_over(self) -> bool:
        """True if no load can begin from this hit, and none of its chunks is leased or being fetched any more."""
        return self.is_ended and all(own.is_over for own in self.chunks)

    @property
    def forgets(self) -> bool:
        """True if a group needs only the last chunks of a hit (sliding window), so a shorter hit needs other chunks."""
        return any(group.forgets for group in self.groups.values())

    @property
    def hit_end(self) -> int:
        """Length of the hit that the engine is told, in chunks from the beginning of the prompt."""
        is_whole = self.num_before == len(self.before)
        return self.num_before + self.num_chunks if is_whole else self.num_before

    @property
    def depths(self) -> bytes:
        """Tiers of the chunks that can be loaded, as one byte (`Tier.depth`) per chunk: the slowest that had a part."""
        depths = np.full(self.num_chunks, Tier.HOST.depth, np.uint8)
        for own in self.chunks:
            np.maximum(depths, own.depths(self.num_chunks), out=depths)
        return depths.tobytes()

    def has_asked(self, missing: Mapping[int, Sequence[BlockName]]) -> bool:
        """Query the slow tiers, such as the remote one, for missing chunks; return whether they have answered.

        *missing* has for each group the chunks that no faster tier has. Only the first call sends the query. Later
        calls only check for the answers.
        """
        if self.inquiry is None:
            self.inquiry = AllOf(
                [self.tiers.tiers.hints.inquire(group_id, names) for group_id, names in missing.items()]
            )
        return self.inquiry.is_done

    def of_groups(self, group_ids: range) -> list[GroupChunks]:
        """Return the leased chunks of each group in *group_ids* (one rank's groups); empty unless each has some."""
        found = [own for own in self.chunks if own.group_id in group_ids]
        return found if len(found) == len(group_ids) else []

    def has(self, group_ids: range, chunks: range, last_name: BlockName) -> bool:
        """Return whether this hit still leases these chunks of the prompt in all these groups, so they can be loaded.

        *last_name* is the name of the last chunk. No other name is compared, because a chunk's name depends on all
        chunks before it.
        """
        parts, here = self.of_groups(group_ids), self.places(chunks)
        are_kept = bool(parts) and here.start >= 0 and all(own.has(here) for own in parts)
        return are_kept and self.blocks.names[here.stop - 1] == last_name

    def load_state(self, group_ids: range, chunks: range) -> LoadState:
        """Return whether these chunks of the prompt can be loaded from this hit in all these groups."""
        parts, here = self.of_groups(group_ids), self.places(chunks)
        if not self.is_settled:
            return LoadState.PENDING
        if not parts or here.stop > self.num_chunks:
            return LoadState.BEYOND
        if not all(own.has(here) for own in parts):
            return LoadState.BROKEN
        return LoadState.VERIFIED if all(own.has_verified(here) for own in parts) else LoadState.PENDING

    def places(self, chunks: range) -> range:
        """Return the indices in *blocks* (this promise's chunks) of *chunks*, counted from the prompt's start."""
        return range(chunks.start - self.first, chunks.stop - self.first)

    def end(self) -> None:
        """End this hit: no further load can begin, and its leased chunks are released.

        A chunk that is being copied is released once that has ended.
        """
        self.is_ended = self.is_settled = True
        self.num_chunks = self.num_before = 0
        for own in self.chunks:
            own.unwant(range(len(self.blocks.names)))


class Promises:
    """All hits that were reported to engines, as `Promise` objects. Owned by the endpoint's thread.

    A promise leases its chunks, so that they stay in their slots in host memory. A slot from which a worker may be
    copying stays leased until the worker reports that it is done, or until its process has ended. Otherwise the worker
    could copy bytes that another engine has written to the slot meanwhile. All other leases end at the latest `IDLE_S`
    seconds after the last message about their request.

    An engine is told of a hit before its chunks are verified, because that takes longer than everything else in a
    lookup. The chunks are verified while the engine schedules the request, and no worker gets a chunk before.
    """

    def __init__(
        self,
        lane: DigestLane,
        stores: Stores,
        shares: Shares,
        clock: Callable[[], float],
        on_loaded: Callable[[Promise, int, int, float], None] = lambda promise, rank, num_chunks, seconds: None,
    ) -> None:
        """Create the object, without any promise (a hit reported to an engine, with leases on its chunks).

        *on_loaded* is called after each load, with the promise, the rank, the number of chunks and the duration in
        seconds.
        """
        self.counts = Counts()
        self._on_loaded = on_loaded
        self._verifier = Verifier(lane, clock)
        self._stores = stores
        self._shares = shares
        self._clock = clock
        self._promises: dict[str, list[Promise]] = {}  # by request
        self._to_verify: list[Promise] = []

    def __iter__(self) -> Iterator[Promise]:
        return iter([promise for promises in self._promises.values() for promise in promises])

    def __len__(self) -> int:
        return sum(map(len, self._promises.values()))

    def begin(
        self,
        client: Client[list[bytes]],
        request_id: str,
        like: Instance,
        blocks: NamedBlocks,
        ranks: Sequence[int],
        num_readers: int,
        first: int = 0,
        max_s: float = LOOKUP_S,
        on_settled: Callable[[Promise], None] = lambda promise: None,
        before: Sequence[BlockName] = (),
    ) -> Promise:
        """Lease those *blocks* that are cached, and read them into host memory, from where workers load them.

        Args:
            client: Client that has sent the request.
            request_id: Id of the request.
            like: A worker with the request's layout (model and KV format). Only its layout matters.
            blocks: Chunks to load.
            ranks: Ranks whose workers will load the chunks.
            num_readers: Number of workers that load the chunks of each rank.
            first: Index in the prompt of the first chunk in *blocks*, that is, the number of chunks before it.
            max_s: Time limit in seconds; the disk's read timeout also applies. At the limit, the hit is shortened to
                the chunks that have been read.
            on_settled: Called when the number of loadable chunks is known, unless the request ends earlier.
            before: Names of the prompt's chunks before the *blocks*. If one of them is not cached, nothing is leased.
        """
        now = self._clock()
        tiers, every = like.tiers, like.layout.groups
        give_up_at = now + min(max_s, tiers.read_timeout_s)
        groups = {group_id: every[group_id] for rank in ranks for group_id in groups_of(like.layout, rank)}
        promise = Promise(
            client, request_id, tiers, blocks, first, groups, num_readers, now, give_up_at, now, on_settled, before
        )
        self._promises.setdefault(request_id, []).append(promise)
        self.counts.num_asked += len(blocks.names)
        self._go_on(promise)
        return promise

    def of_request(self, request_id: str) -> list[Promise]:
        """Return the request's hits from which workers can still load, newest first, and restart their idle timeout."""
        promises = [promise for promise in self._promises.get(request_id, ()) if not promise.is_ended]
        for promise in promises:
            promise.heard_at = self._clock()
        return promises[::-1]

    def want_verified(self, promise: Promise) -> None:
        """Have the hit's chunks verified by `verify`, once they are in host memory."""
        self._to_verify.append(promise)

    def verify(self) -> None:
        """Start to verify the chunks of the settled hits that were passed to `want_verified`.

        A separate method, so that an engine is told of a hit before threads begin to use the processors for it.
        """
        promises, self._to_verify = self._to_verify, []
        for promise in promises:
            if not promise.is_settled:
                self._to_verify.append(promise)
                continue
            for own in promise.chunks:
                own.verify()

    def free(self, client: Client[list[bytes]], request_id: str, chunks: range) -> None:
        """Record that no worker will load these chunks of the prompt for this request of this client."""
        for promise in self.of_request(request_id):
            if promise.client is not client:
                continue
            here = promise.places(chunks)
            for own in promise.chunks:
                own.unwant(range(max(0, here.start), max(0, here.stop)))

    def loaded(self, request_id: str, rank: int, instance: Instance, chunks: range) -> None:
        """Record that the worker has loaded these chunks of the request's prompt, or has given up.

        This ends only the oldest load of these chunks, because another load of the same chunks may be in flight.
        """
        found = self._oldest_load(request_id, groups_of(instance.layout, rank), instance, chunks)
        if found is not None:
            promise, readings = found
            self.counts.num_loaded += len(chunks)
            for own, reading in readings:
                own.end_reading(reading)
            self._on_loaded(promise, rank, len(chunks), self._clock() - readings[0][1].begun_at)
            self._forget_those_over()

    def end_request(self, client: Client[list[bytes]], request_id: str) -> None:
        """Release the chunks leased for this client's request; a chunk that a worker is copying is released later.

        A request of another engine with the same id is not affected.
        """
        for promise in self._promises.get(request_id, ()):
            if promise.client is client:
                promise.end()
        self._forget_those_over()

    def is_read_by(self, client: Client[list[bytes]]) -> bool:
        """Return whether a worker of this connection may be copying chunks out of the segment."""
        return any(
            reading.instance.client is client for promise in self for own in promise.chunks for reading in own.readings
        )

    def end_instance(self, instance: Instance) -> None:
        """End the loads of a worker whose process has ended."""
        self._end_readings(lambda reading: reading.instance is instance)

    def end_client(self, client: Client[list[bytes]]) -> None:
        """Release the chunks leased for a client whose connection has ended, except those that a worker is copying."""
        for promise in self:
            if promise.client is client:
                promise.end()
        self._forget_those_over()

    def tick(self) -> None:
        """Continue the lookups and loads that wait for chunks, and release the chunks of requests that are idle."""
        now = self._clock()
        for promise in self:
            if promise.is_settled:
                self._count_lost(promise)
            else:
                self._go_on(promise)
            if not promise.is_settled and now >= promise.give_up_at:
                self._time_out(promise)
            if not promise.is_ended and now - promise.heard_at > IDLE_S:
                promise.end()
        self._forget_those_over()

    def check(self) -> None:
        """Raise AssertionError if the records of chunks' verification do not match the chunks leased for hits."""
        self._verifier.check(checked for promise in self for own in promise.chunks for checked in own.checked)

    def _go_on(self, promise: Promise) -> None:
        if not promise.is_begun and not self._begin_chunks(promise):
            return
        end = min((own.end for own in promise.chunks), default=0)
        if promise.forgets and any(own.end < own.num_chunks for own in promise.chunks):
            self._begin_again(promise)
        elif all(own.num_arrived >= end for own in promise.chunks):
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
        self._count_lost(promise)
        for own in promise.chunks:  # a chunk that one group lacks is useless to the other groups
            own.cut(end)

    def _count_lost(self, promise: Promise) -> None:
        for own in promise.chunks:
            if own.num_late:
                promise.misses = promise.misses.cut(own.num_chunks, Reason.DEADLINE)
            self.counts.num_corrupt += own.num_corrupt
            self.counts.num_late += own.num_late
            own.num_corrupt = own.num_late = 0

    def _begin_again(self, promise: Promise) -> None:
        """Lease the chunks of the next shorter hit, because a chunk of the current hit cannot be loaded.

        A group with a sliding window or recurrent states needs the last chunks of a hit, so a shorter hit may need
        other chunks. Chunks that both hits need stay leased.
        """
        self._count_lost(promise)
        promise.lost |= {(own.group_id, place) for own in promise.chunks for place in own.lost}
        left = promise.chunks
        share = self._shares.of(promise.client)
        self._lease(promise, SharedHit(promise.tiers, promise.groups, promise.blocks.names, share, promise.lost))
        for own in left:
            own.unwant(range(own.num_chunks))

    def _lease(self, promise: Promise, hit: SharedHit) -> None:
        num_chunks = hit.within_room()
        share = self._shares.of(promise.client)
        promise.chunks = [
            GroupChunks(
                group_id, group, promise.tiers, promise.blocks, num_chunks, promise.num_readers, self._verifier, share
            )
            for group_id, group in promise.groups.items()
            if num_chunks
        ]

    def _begin_chunks(self, promise: Promise) -> bool:
        """Lease the cached chunks of all groups, as far as the client's share of host memory allows.

        Returns False, and leases nothing, if the caller should try again later. This is the case if a missing chunk may
        soon be cached, or if many other chunks are being read from disk for the client.
        """
        tiers, names = promise.tiers, promise.blocks.names
        lasting = [group_id for group_id, group in promise.groups.items() if not group.forgets]
        runs = [len(tiers.tiers.find_run(group_id, promise.before)) for group_id in lasting if promise.before]
        promise.num_before = min(runs, default=len(promise.before))
        if promise.num_before < len(promise.before):
            missing = [*promise.before[promise.num_before :], *names]
            if self._may_come(promise, dict.fromkeys(lasting, missing)):
                return False
            promise.is_begun = True
            promise.misses = Misses(((len(names), tiers.miss_reason(missing[0])),))
            return True
        share = self._shares.of(promise.client)
        hit = SharedHit(tiers, promise.groups, names, share)
        if hit.is_read and share.pending_bytes >= COMING_BYTES and self._clock() < promise.give_up_at:
            return False
        num_beyond = hit.num_there - hit.num_chunks
        if hit.num_there < len(names) and not num_beyond and self._may_come(promise, hit.missing()):
            return False
        promise.is_begun = True
        for group_id in lasting if promise.before else ():
            tiers.refresh(group_id, promise.before[::-1], ())
        self.counts.num_over_share += num_beyond
        missed = misses_behind(hit.num_there, hit.num_lasting, names, tiers)
        promise.misses = Misses(((hit.num_there, Reason.CAPACITY), *missed))  # chunks of the hit itself lack only room
        self._lease(promise, hit)
        return True

    def _may_come(self, promise: Promise, missing: Mapping[int, Sequence[BlockName]]) -> bool:
        """Return whether some of these missing chunks, given by group, may soon be cached.

        In a group that needs all chunks of a prefix, only the first missing chunk counts.
        """
        now, tiers = self._clock(), promise.tiers
        if now >= promise.give_up_at:
            return False
        if tiers.is_being_indexed and now < promise.begun_at + INDEXING_S:
            return True
        if not promise.has_asked(missing):
            return True
        return any(
            self._stores.is_coming(tiers, group_id, name)
            for group_id, names in missing.items()
            for name in (names if promise.groups[group_id].forgets else names[:1])
        )

    def _time_out(self, promise: Promise) -> None:
        promise.is_begun = True
        end = self._longest_arrived(promise)
        self.counts.num_late += max((own.end - end for own in promise.chunks), default=0)
        promise.misses = promise.misses.cut(max((own.end for own in promise.chunks), default=0), Reason.DEADLINE)
        self._settle(promise, end)

    def _longest_arrived(self, promise: Promise) -> int:
        """Return the length of the longest prefix for which all chunks that each group needs are in host memory."""
        if not promise.chunks:
            return 0
        limit = min(own.end for own in promise.chunks)
        groups = [promise.groups[own.group_id] for own in promise.chunks]
        return longest_of(groups, [own.have_arrived for own in promise.chunks], limit)

    def _oldest_load(
        self, request_id: str, group_ids: range, instance: Instance, chunks: range
    ) -> tuple[Promise, list[tuple[GroupChunks, Reading]]] | None:
        found = []
        for promise in self._promises.get(request_id, ()):
            load = promise.places(chunks)
            readings = [
                (own, reading)
                for own in promise.of_groups(group_ids)
                for reading in [each for each in own.readings if each.instance is instance and each.load == load][:1]
            ]
            if readings:
                found.append((promise, readings))
        return min(found, key=lambda each: each[1][0][1].begun_at, default=None)

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
