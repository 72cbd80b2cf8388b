"""Stores: chunks that engines write into the segment, from the room that is reserved until they can be found."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from kvtier.sidecar.layout import Layout
from kvtier.sidecar.layout_tiers import LayoutTiers
from kvtier.sidecar.lmcache.digest_lane import DigestLane
from kvtier.sidecar.lmcache.hybrid_layout import groups_of
from kvtier.sidecar.lmcache.registrations import Instance
from kvtier.sidecar.port import Client
from kvtier.sidecar.shares import Shares, Wanted
from kvtier.tiers.device.eviction_order import Row
from kvtier.tiers.lower.lower_tiers import NOWHERE, are_kept
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.naming.tenant import number_of

NOTHING_SKIPPED: Mapping[int, Collection[int]] = MappingProxyType({})


@dataclass(eq=False, slots=True)
class Store:
    """Some chunks of one prefix on their way in, in one group of the rank's. *places*: which of *blocks* the *slots*
    are for, ascending."""

    instance: Instance
    rank: int
    group_id: int
    request_id: str
    chunks: range
    blocks: NamedBlocks
    places: Sequence[int]
    slots: Sequence[int]
    begun_at: float
    digests: list[bytes] = field(default_factory=list)  # by place, those that have been taken
    num_taken: int = 0
    is_void: bool = False  # never to be found

    @property
    def tiers(self) -> LayoutTiers:
        """Where it is stored."""
        return self.instance.tiers

    @property
    def names(self) -> list[BlockName]:
        """Of the chunks that have slots."""
        return [self.blocks.names[place] for place in self.places]


@dataclass(slots=True)
class StoreCounts:
    """Totals since the start, in chunks."""

    num_stored: int = 0
    num_without_room: int = 0
    num_over_share: int = 0  # not taken since the client has its share of host memory leased
    num_given_up: int = 0  # reserved and never committed, or forgotten meanwhile


class Stores:
    """A worker reserves slots, writes, and commits; then their digests are taken beside this thread, and the chunks can
    be found. What was not committed never can.

    A reservation ends with its commit or with its worker's process, and never by time: a thread that is stopped in the
    middle of a copy goes on with it whenever it is woken up, also while other threads of its process are served.
    Owned by the endpoint's thread.
    """

    def __init__(self, lane: DigestLane, shares: Shares, clock: Callable[[], float]) -> None:
        self.counts = StoreCounts()
        self._clock = clock
        self._lane = lane
        self._shares = shares
        self._reserved: list[Store] = []
        self._committed: list[Store] = []
        self._coming: Counter[tuple[LayoutTiers, int, BlockName]] = Counter()  # by group; committed, not found yet

    def __iter__(self) -> Iterator[Store]:
        return iter([*self._reserved, *self._committed])

    def reserve(
        self,
        instance: Instance,
        rank: int,
        request_id: str,
        chunks: range,
        blocks: NamedBlocks,
        skipped: Mapping[int, Collection[int]] = NOTHING_SKIPPED,
    ) -> list[Store]:
        """Reserve slots for those of the *blocks*, the *chunks* of the request's prefix, that are nowhere below. The
        first ones get slots if there are not enough for all. *skipped*: by group, places of blocks that the worker does
        not have.

        Returns:
            One store for each group of the rank's that has slots. None at all while an earlier reservation of the same
            chunks for the same request stands: another thread of the worker may still write there, and its commit,
            which names no slots, would be taken for that of the new ones.
        """
        if self._find(instance, rank, request_id, chunks):
            return []
        groups, found = instance.layout.groups, []
        for group_id in groups_of(instance.layout, rank):
            own = blocks.of(groups[group_id], range(len(blocks.names)))
            store = self._reserve(instance, rank, group_id, request_id, chunks, own, skipped.get(group_id, ()))
            found += [] if store is None else [store]
        return found

    def _reserve(
        self,
        instance: Instance,
        rank: int,
        group_id: int,
        request_id: str,
        chunks: range,
        blocks: NamedBlocks,
        skipped: Collection[int],
    ) -> Store | None:
        """Return the reservation in one group; None if no slot is needed or free."""
        tiers = instance.tiers
        is_wanted = ~are_kept(tiers.tiers.find(group_id, blocks.names))
        is_wanted[list(skipped)] = False
        places = np.flatnonzero(is_wanted).tolist()
        if not places:
            return None
        memory, share = tiers.memories[group_id], self._shares.of(instance.client)
        num_affordable = share.num_affordable([Wanted(memory, np.full(len(places), NOWHERE))])
        slots = tiers.reserve(group_id, num_affordable)
        self.counts.num_over_share += len(places) - num_affordable
        self.counts.num_without_room += num_affordable - len(slots)
        if not slots:
            return None
        share.lease(memory, np.array(slots, np.intp))
        own = places[: len(slots)]
        store = Store(instance, rank, group_id, request_id, chunks, blocks, own, slots, self._clock())
        self._reserved.append(store)
        return store

    def commit(self, instance: Instance, rank: int, request_id: str, chunks: range) -> bool:
        """The worker has written what it reserved; False if it has reserved nothing, or has it no more."""
        found = self._find(instance, rank, request_id, chunks)
        for store in found:
            self._reserved.remove(store)
            self._committed.append(store)
            self._coming.update((store.tiers, store.group_id, name) for name in store.names)
            store.digests = [b""] * len(store.slots)
            self._lane.take(instance.client, store.tiers.memories[store.group_id], store.slots, _taker(self, store))
        return bool(found)

    def is_coming(self, tiers: LayoutTiers, group_id: int, name: BlockName) -> bool:
        """Whether the chunk has been committed, and can be found in a moment."""
        return (tiers, group_id, name) in self._coming

    def end_instance(self, instance: Instance) -> None:
        """Give up the reservations of a worker whose process has ended."""
        for store in [store for store in self._reserved if store.instance is instance]:
            self._give_up(store)

    def void(self, layouts: Collection[Layout]) -> None:
        """Nothing of these layouts that was begun before now may ever be found."""
        for store in self:
            store.is_void |= store.tiers.layout in layouts

    def is_written_by(self, client: Client[list[bytes]]) -> bool:
        """Return whether a worker of this connection has slots reserved."""
        return any(store.instance.client is client for store in self._reserved)

    def check(self) -> None:
        """Raise AssertionError if what is coming is miscounted."""
        coming = Counter((store.tiers, store.group_id, name) for store in self._committed for name in store.names)
        assert coming == self._coming, "what is coming is miscounted"

    def on_digests(self, store: Store, part: range, digests: Sequence[bytes] | None) -> None:
        """Digests of a part of it have been taken; with the last one its chunks can be found."""
        store.num_taken += len(part)
        if digests is None:  # the lane is closed, or the memory is gone
            store.is_void = True
        else:
            store.digests[part.start : part.stop] = digests
        if store.num_taken < len(store.slots):
            return
        self._committed.remove(store)
        self._coming -= Counter((store.tiers, store.group_id, name) for name in store.names)
        if store.is_void:
            self._abandon(store)
            return
        self.counts.num_stored += len(store.slots)
        self._end_lease(store)
        store.tiers.tiers.publish(
            store.group_id,
            np.array(store.slots[::-1], np.intp),
            _rows(store),
            store.digests[::-1],
            np.full(len(store.slots), number_of(store.blocks.tenant), np.uint64),
        )

    def _find(self, instance: Instance, rank: int, request_id: str, chunks: range) -> list[Store]:
        wanted = (instance, rank, request_id, chunks)
        return [s for s in self._reserved if (s.instance, s.rank, s.request_id, s.chunks) == wanted]

    def _give_up(self, store: Store) -> None:
        self._reserved.remove(store)
        self._abandon(store)

    def _abandon(self, store: Store) -> None:
        self.counts.num_given_up += len(store.slots)
        self._end_lease(store)
        store.tiers.tiers.abandon(store.group_id, np.array(store.slots, np.intp))

    def _end_lease(self, store: Store) -> None:
        share = self._shares.of(store.instance.client)
        share.release(store.tiers.memories[store.group_id], np.array(store.slots, np.intp))


def _taker(stores: Stores, store: Store) -> Callable[[range, Sequence[bytes] | None], None]:
    return lambda part, digests: stores.on_digests(store, part, digests)


def _rows(store: Store) -> list[Row]:
    """Its chunks as rows of such as follow each other, the last of all first, as `publish` takes them."""
    rows: list[Row] = []
    places = store.places[::-1]
    start = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[end - 1] - 1:
            names = [store.blocks.names[place] for place in places[start:end]]
            rows.append(Row(start, end, names, store.blocks.parents[places[end - 1]]))
            start = end
    return rows
