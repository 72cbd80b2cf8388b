"""Stores: the store operations of engines, from the reservation of slots until lookups find the stored chunks."""

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
from kvtier.tiers.device.eviction_order import NamedSpan
from kvtier.tiers.lower.lower_tiers import NOWHERE, are_kept
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.named_blocks import NamedBlocks, number_of

NOTHING_SKIPPED: Mapping[int, Collection[int]] = MappingProxyType({})


@dataclass(eq=False, slots=True)
class Store:
    """A store operation in progress: a worker writes chunks of one prompt into slots, in one group.

    `slots[i]` is for the chunk with the index `places[i]` in *blocks*. The places are in ascending order.
    """

    instance: Instance
    rank: int
    group_id: int
    request_id: str
    chunks: range
    blocks: NamedBlocks
    places: Sequence[int]
    slots: Sequence[int]
    begun_at: float
    digests: list[bytes] = field(default_factory=list)  # of the chunks in the slots; empty until computed
    num_taken: int = 0  # number of digests computed
    is_void: bool = False  # whether lookups must never find the chunks

    @property
    def tiers(self) -> LayoutTiers:
        """Tiers of the layout in which the chunks are stored."""
        return self.instance.tiers

    @property
    def names(self) -> list[BlockName]:
        """Names of the chunks that have a slot."""
        return [self.blocks.names[place] for place in self.places]


@dataclass(slots=True)
class StoreCounts:
    """Numbers of chunks in all store operations since the sidecar's start."""

    num_stored: int = 0
    num_without_room: int = 0
    num_over_share: int = 0  # not stored because the client's share of host memory was leased
    num_given_up: int = 0  # reserved but never committed, or cleared meanwhile


class Stores:
    """The store operations in progress, in which a worker reserves slots, writes to them, and commits.

    After the commit, other threads compute the chunks' digests, and then lookups can find the chunks. Uncommitted
    chunks are never found.

    A reservation ends with its commit or with its worker's process. It never times out, because a stopped thread may
    continue its copy at any later time, even if other threads of the process have sent requests meanwhile.

    Owned by the endpoint's thread.
    """

    def __init__(self, lane: DigestLane, shares: Shares, clock: Callable[[], float]) -> None:
        self.counts = StoreCounts()
        self._clock = clock
        self._lane = lane
        self._shares = shares
        self._reserved: list[Store] = []
        self._committed: list[Store] = []
        self._coming: Counter[tuple[LayoutTiers, int, BlockName]] = (
            Counter()
        )  # by group; committed, but not visible to lookups yet

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
        """Reserve slots for those *blocks* that are neither in host memory nor on disk; return a `Store` per group.

        *chunks* has the numbers of the *blocks* in the prompt. *skipped* has for each group the indices in *blocks* of
        the blocks that the worker will not store. If there are not enough slots, the first blocks get them.

        Returns an empty list if slots are already reserved for the same chunks of the same request. A commit names the
        chunks but not the slots, so it could not tell two reservations apart.
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
        """Reserve slots in one group. Return None if no slot is needed, or none is available."""
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
        """Record that the worker has written to the slots reserved for *chunks*. Return whether any were reserved."""
        found = self._find(instance, rank, request_id, chunks)
        for store in found:
            self._reserved.remove(store)
            self._committed.append(store)
            self._coming.update((store.tiers, store.group_id, name) for name in store.names)
            store.digests = [b""] * len(store.slots)
            self._lane.take(instance.client, store.tiers.memories[store.group_id], store.slots, _taker(self, store))
        return bool(found)

    def is_coming(self, tiers: LayoutTiers, group_id: int, name: BlockName) -> bool:
        """Return whether the chunk has been committed, but is not visible to lookups yet."""
        return (tiers, group_id, name) in self._coming

    def end_instance(self, instance: Instance) -> None:
        """Give up the reservations of a worker whose process has ended."""
        for store in [store for store in self._reserved if store.instance is instance]:
            self._give_up(store)

    def void(self, layouts: Collection[Layout]) -> None:
        """Ensure that no lookup ever finds the chunks of these layouts that workers are storing now."""
        for store in self:
            store.is_void |= store.tiers.layout in layouts

    def is_written_by(self, client: Client[list[bytes]]) -> bool:
        """Return whether a worker of this connection has slots reserved."""
        return any(store.instance.client is client for store in self._reserved)

    def check(self) -> None:
        """Raise AssertionError if the committed chunks are miscounted."""
        coming = Counter((store.tiers, store.group_id, name) for store in self._committed for name in store.names)
        assert coming == self._coming, "the committed chunks are miscounted"

    def on_digests(self, store: Store, part: range, digests: Sequence[bytes] | None) -> None:
        """Add digests of chunks that a worker has stored. After the last part, make the chunks visible to lookups."""
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


def _rows(store: Store) -> list[NamedSpan]:
    rows: list[NamedSpan] = []
    places = store.places[::-1]  # `publish` expects the last chunk first
    start = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[end - 1] - 1:
            names = [store.blocks.names[place] for place in places[start:end]]
            rows.append(NamedSpan(start, end, names, store.blocks.parents[places[end - 1]]))
            start = end
    return rows
