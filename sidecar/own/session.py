"""Session: the leases and requests of one attached engine."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.engine.attached import wire
from kvtier.engine.attached.wire import Malformed
from kvtier.sidecar.endpoint import Lease, LeaseUse
from kvtier.sidecar.layout_tiers import LayoutTiers
from kvtier.sidecar.shares import Share, Wanted
from kvtier.store.blob_store import TENANT_BYTES
from kvtier.tiers.device.eviction_order import NamedSpan
from kvtier.tiers.device.slot_ids import ABSENT, Ids
from kvtier.tiers.lower.local_tiers import LocalFetch
from kvtier.tiers.lower.lower_tiers import NOWHERE, ON_REMOTE, Fetch, Inquiry, LowerTiers, Places, ReadPriority
from kvtier.tiers.lower.name_set import NAME_BYTES
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.naming.tier import Reason

MAX_BLOCKS = 1 << 20  # that one engine may have leased or wait for; fetches beyond this limit fail
MAX_FETCHES = 1 << 16  # per engine
MAX_INQUIRIES = 1 << 10  # per engine
FREE, RESERVED, VOID = 0, 1, 2  # states of a slot for one engine; VOID: reserved before the layout was cleared


@dataclass(slots=True)
class SessionCounts:
    """Totals of all engines since the start, in blocks."""

    num_asked: int = 0
    num_leased: int = 0
    num_loaded: int = 0  # leased and then released
    num_stored: int = 0
    num_failed: int = 0  # requested but not available
    num_late: int = 0  # those of `num_failed` whose reads hung
    num_without_room: int = 0  # slots that could not be reserved
    num_over_share: int = 0  # blocks and slots refused because the engine's share of host memory was leased
    num_given_up: int = 0  # reserved slots to which nothing was published
    landed_at: float = float("-inf")  # when the last read for an engine ended, with or without success


@dataclass(eq=False, slots=True)
class Fetched:
    """A fetch of the engine: blocks to be leased in host memory, after they are read from disk if necessary.

    *is_open* is True for each block that is leased or being waited for, and False after it was released or has failed.
    """

    fetch: LocalFetch
    is_open: npt.NDArray[np.bool_]
    num_open: int
    begun_at: float
    is_for_later: bool
    landed: list[int] = field(default_factory=list)  # places not reported to the engine yet
    failed: list[tuple[int, Reason]] = field(default_factory=list)


class Asked(NamedTuple):
    """An inquiry that is not answered yet: the engine asks which of these blocks the remote tier has."""

    inquiry: Inquiry
    group_id: int
    names: Sequence[BlockName]


class Session:
    """The requests of one engine, and its leases on blocks and slots in host memory. Owned by the sidecar's thread.

    Every method that takes a message checks the message before it does anything. It raises `Malformed` for a message
    that no correct engine sends.
    """

    def __init__(self, tiers: LayoutTiers, counts: SessionCounts, share: Share, clock: Callable[[], float]) -> None:
        """Start without leases. *share* counts the engine's leases, and limits the host memory that it may lease."""
        self.tiers = tiers
        self._share = share
        self.since = clock()
        self._clock = clock
        self._counts = counts
        self._lower: LowerTiers = tiers.tiers
        self._fetches: dict[int, Fetched] = {}
        self._inquiries: dict[int, Asked] = {}
        self._num_open = 0  # of all fetches
        self._states = [np.zeros(num_slots, np.uint8) for num_slots in self._lower.status.num_slots]  # [group][slot]
        self._num_reserved = [0 for _ in self._states]
        self._reserved_at = self.since

    @property
    def is_waiting(self) -> bool:
        """True if the engine waits for blocks that it needs at once, or for the answer to an inquiry."""
        return bool(self._inquiries) or any(
            each.fetch.is_reading and not each.is_for_later for each in self._fetches.values()
        )

    @property
    def waits_since(self) -> float:
        """Time at which the engine began to wait for blocks that it needs at once; infinity if it waits for none.

        If it waits for several fetches, the oldest one counts.
        """
        waiting = (each for each in self._fetches.values() if each.fetch.is_reading and not each.is_for_later)
        return min((each.begun_at for each in waiting), default=float("inf"))

    def leases(self) -> Iterator[Lease]:
        """Yield the current leases."""
        for fetched in self._fetches.values():
            if fetched.fetch.num_leased:
                yield Lease(LeaseUse.READ, fetched.fetch.group_id, fetched.fetch.num_leased, fetched.begun_at)
        for group_id, num_slots in enumerate(self._num_reserved):
            if num_slots:
                yield Lease(LeaseUse.WRITTEN, group_id, num_slots, self._reserved_at)

    def fetch(self, message: wire.Fetch) -> Iterator[wire.Fetched]:
        """Lease the blocks that are in host memory and start to read the rest; yield what can be reported at once."""
        names = self._names(message.group, message.names)
        if message.number in self._fetches:
            raise Malformed(f"a fetch has the number {message.number}, which another fetch has already")
        if len(set(names)) < len(names):
            raise Malformed("a fetch names a block twice")
        if len(message.tenant) not in (0, TENANT_BYTES):
            raise Malformed(f"a tenant has {len(message.tenant)} bytes, not {TENANT_BYTES}")
        blocks = NamedBlocks(names, wire.parents_in(names, message.starts), message.tenant)
        self._counts.num_asked += len(names)
        if len(names) + self._num_open > MAX_BLOCKS or len(self._fetches) == MAX_FETCHES:
            self._counts.num_failed += len(names)
            yield wire.Fetched(message.number, b"", b"", b"", b"", [(i, Reason.CAPACITY) for i in range(len(names))])
            return

        def on_fetched(_: Fetch, place: int, failure: Reason | None) -> None:
            self._on_fetched(fetched, place, failure)

        places = self._lower.find(message.group, names)
        num_within = self._num_within_share(message.group, names, places)
        beyond = dict.fromkeys(range(num_within, len(names)), Reason.CAPACITY)
        if beyond:
            blocks = NamedBlocks(names[:num_within], blocks.parents[:num_within], message.tenant)
        priority = ReadPriority.LATER if message.is_for_later else ReadPriority.NOW
        fetch = self.tiers.fetch_any(message.group, blocks, places[:num_within], on_fetched, priority)
        fetched = Fetched(fetch, np.ones(len(names), np.bool_), len(names), self._clock(), message.is_for_later)
        self._fetches[message.number] = fetched
        self._num_open += len(names)
        fetched.landed = np.flatnonzero(fetch.slots != ABSENT).tolist()
        self._share.lease(self.tiers.memories[message.group], fetch.slots[fetched.landed].astype(np.intp))
        failures = {**fetch.failures, **beyond}
        fetched.failed = list(failures.items())
        self._close(fetched, np.array(list(failures), np.intp))
        yield from self._told(message.number, fetched)

    def inquire(self, message: wire.Inquire) -> None:
        """Ask the remote tier which of these blocks it has."""
        names = self._names(message.group, message.names)
        if message.number in self._inquiries:
            raise Malformed(f"an inquiry has the number {message.number}, which another inquiry has already")
        if len(self._inquiries) == MAX_INQUIRIES:
            return  # the engine continues without an answer
        inquiry = self._lower.hints.inquire(message.group, names)
        self._inquiries[message.number] = Asked(inquiry, message.group, names)

    def take_inquired(self) -> Iterator[wire.Inquired]:
        """Yield the answers to inquiries that have become ready since the last call."""
        for number, asked in list(self._inquiries.items()):
            if asked.inquiry.is_done:
                del self._inquiries[number]
                is_remote = self._lower.find(asked.group_id, asked.names) == ON_REMOTE
                yield wire.Inquired(number, wire.joined(list(compress(asked.names, is_remote.tolist()))))

    def take_fetched(self) -> Iterator[wire.Fetched]:
        """Yield, for each fetch, a message about the blocks that have arrived or failed since its last message."""
        for number, fetched in list(self._fetches.items()):
            if fetched.landed or fetched.failed:
                yield from self._told(number, fetched)

    def release(self, message: wire.Release) -> None:
        """End the leases on these blocks of a fetch, or stop waiting for them. Do nothing if the fetch is over."""
        fetched = self._fetches.get(message.number)
        if fetched is None:
            return
        places = wire.numbers_in(message.places, len(fetched.is_open))
        if len(np.unique(places)) < len(places):
            raise Malformed("a release names a block twice")
        self._release(fetched, places[fetched.is_open[places]])
        self._end_if_over(message.number, fetched)

    def reserve(self, message: wire.Reserve) -> wire.Reserved:
        """Reserve as many of the requested slots as are available, for the engine to write to."""
        self._check_group(message.group)
        if not 0 <= message.num_slots <= wire.MAX_BLOCKS:
            raise Malformed(f"a reservation of {message.num_slots} slots; the maximum is {wire.MAX_BLOCKS}")
        memory = self.tiers.memories[message.group]
        num_within = self._share.num_affordable([Wanted(memory, np.full(message.num_slots, NOWHERE))])
        slots = np.array(self.tiers.reserve(message.group, num_within), np.intp)
        self._share.lease(memory, slots)
        self._counts.num_over_share += message.num_slots - num_within
        self._counts.num_without_room += num_within - len(slots)
        self._states[message.group][slots] = RESERVED
        self._num_reserved[message.group] += len(slots)
        self._reserved_at = self._clock()
        return wire.Reserved(message.group, message.num_slots, wire.packed(slots))

    def take_in(self, message: wire.Publish | wire.Abandon | wire.Refresh | wire.Forget) -> None:
        """Process a message that needs no answer."""
        match message:
            case wire.Publish():
                self.publish(message)
            case wire.Abandon():
                self.abandon(message)
            case wire.Refresh():
                self.refresh(message)
            case wire.Forget():
                self.forget(message)

    def publish(self, message: wire.Publish) -> None:
        """Make the blocks in these slots visible to lookups, unless the layout was cleared since the reservation."""
        slots = self._reserved(message.group, message.slots)
        names = self._names(message.group, message.names)
        digests = wire.digests_in(message.digests, len(slots))
        owners = wire.owners_in(message.owners, len(slots))
        rows = _rows(message.chains, names, len(slots))
        traced = list(_traced(message.traced, names))
        is_void = bool((self._states[message.group][slots] == VOID).any())
        self._no_longer_reserved(message.group, slots)
        if is_void:
            self._counts.num_given_up += len(slots)
            self._lower.abandon(message.group, slots)
            return
        self._counts.num_stored += len(slots)
        for traceparent, own in traced:
            self.tiers.add_traced(traceparent, own)
        self._lower.publish(message.group, slots, rows, digests, owners)

    def abandon(self, message: wire.Abandon) -> None:
        """Free these slots, to which nothing was written."""
        slots = self._reserved(message.group, message.slots)
        self._no_longer_reserved(message.group, slots)
        self._counts.num_given_up += len(slots)
        self._lower.abandon(message.group, slots)

    def refresh(self, message: wire.Refresh) -> None:
        """Record that these blocks were used."""
        names = self._names(message.group, message.names)
        if len(message.were_read) not in (0, len(names)):
            raise Malformed(f"a Refresh has {len(names)} blocks, but {len(message.were_read)} values in were_read")
        were_read = dict(zip(names, map(bool, message.were_read), strict=False))
        names = list(dict.fromkeys(names))
        self.tiers.refresh(message.group, names, [were_read[name] for name in names] if were_read else ())

    def forget(self, message: wire.Forget) -> None:
        """Forget these blocks, whose bytes in host memory are wrong."""
        self._lower.forget(message.group, list(dict.fromkeys(self._names(message.group, message.names))))

    def void(self) -> None:
        """Void all reserved slots, so that no lookup ever finds the blocks that the engine is writing to them now."""
        for states in self._states:
            states[states == RESERVED] = VOID

    def time_out(self) -> None:
        """Report as failed the blocks that the engine needs at once but that are still being read or wait for a slot.

        Called when no read has ended for too long.
        """
        for fetched in self._fetches.values():
            fetch = fetched.fetch
            if not fetch.is_reading or fetched.is_for_later:
                continue
            fetch.time_out()
            is_waiting = fetched.is_open & (fetch.slots == ABSENT)
            is_waiting[list(fetch.failures)] = False  # reported by the next poll
            places = np.flatnonzero(is_waiting)
            fetch.release(places)
            fetched.failed += [(place, Reason.CAPACITY) for place in places.tolist()]
            self._close(fetched, places)

    def give_up(self, message: wire.TimeOut) -> None:
        """Time out a fetch that the engine considers hung."""
        if (fetched := self._fetches.get(message.number)) is not None:
            fetched.fetch.time_out()

    def stop_listening(self) -> None:
        """Stop waiting for blocks, and end the leases that the engine has not been told of.

        Leases that the engine knows of stay until `end`, because one of its processes may be copying from or to their
        slots.
        """
        self._inquiries.clear()
        for number, fetched in list(self._fetches.items()):
            is_unknown = fetched.is_open.copy()
            is_unknown[np.flatnonzero(fetched.fetch.slots != ABSENT)] = False
            is_unknown[fetched.landed] = fetched.is_open[fetched.landed]
            self._release(fetched, np.flatnonzero(is_unknown)[::-1])
            fetched.landed, fetched.failed = [], []
            self._end_if_over(number, fetched)

    def end(self) -> None:
        """End all leases. Call this only if no process of the engine can still copy, or if the sidecar ends."""
        for fetched in self._fetches.values():
            self._release(fetched, np.flatnonzero(fetched.is_open)[::-1])
        self._fetches.clear()
        for group_id, states in enumerate(self._states):
            if self._num_reserved[group_id]:
                slots = np.flatnonzero(states)
                self._no_longer_reserved(group_id, slots)
                self._counts.num_given_up += len(slots)
                self._lower.abandon(group_id, slots)

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        for group_id, states in enumerate(self._states):
            slots = np.flatnonzero(states)
            assert len(slots) == self._num_reserved[group_id], "an engine's reserved slots were miscounted"
            pool = self.tiers.tiers.index.host[group_id].pool
            assert pool.num_leased(slots) == len(slots), "an engine has reserved a slot that is not leased"
            assert not pool.are_named(slots).any(), "an engine may write to a slot with a block"
        for fetched in self._fetches.values():
            assert np.count_nonzero(fetched.is_open) == fetched.num_open, "an engine's fetch was miscounted"
            assert fetched.num_open or fetched.failed, "a fetch is kept that is over"
        num_open = sum(fetched.num_open for fetched in self._fetches.values())
        assert num_open == self._num_open, "what an engine leases and waits for was miscounted"

    def _told(self, number: int, fetched: Fetched) -> Iterator[wire.Fetched]:
        fetch, failures = fetched.fetch, fetched.failed
        places = np.array(fetched.landed, np.intp)
        places = places[fetched.is_open[places]]  # the others were released meanwhile
        fetched.landed, fetched.failed = [], []
        self._counts.num_leased += len(places)
        self._counts.num_failed += len(failures)
        if len(places) or failures or not len(fetched.is_open):
            yield wire.Fetched(
                number,
                wire.packed(places),
                wire.packed(fetch.slots[places]),
                fetch.digests(places),
                fetch.owners(places).astype("<u8").tobytes(),
                failures,
            )
        self._end_if_over(number, fetched)

    def _on_fetched(self, fetched: Fetched, place: int, failure: Reason | None) -> None:
        self._counts.landed_at = self._clock()
        if not fetched.is_open[place]:  # it was reported at once, or released
            return
        if failure is None:
            self._share.lease(
                self.tiers.memories[fetched.fetch.group_id], np.array([fetched.fetch.slots.item(place)], np.intp)
            )
            fetched.landed.append(place)
        else:
            fetched.failed.append((place, failure))
            self._counts.num_late += failure is Reason.DEADLINE
            self._close(fetched, np.array([place]))

    def _end_if_over(self, number: int, fetched: Fetched) -> None:
        if not fetched.num_open and not fetched.failed:
            del self._fetches[number]

    def _num_within_share(self, group_id: int, names: Sequence[BlockName], places: Places) -> int:
        """Return how many of these blocks, counted from the first, fit into the engine's share of host memory."""
        num_within = self._share.num_affordable([Wanted(self.tiers.memories[group_id], places, names)]) if names else 0
        self._counts.num_over_share += len(names) - num_within
        return num_within

    def _release(self, fetched: Fetched, places: Ids) -> None:
        """End the leases on these blocks, or stop waiting for them."""
        slots = fetched.fetch.slots[places]
        leased = slots[slots != ABSENT].astype(np.intp)
        self._share.release(self.tiers.memories[fetched.fetch.group_id], leased)
        self._counts.num_loaded += len(leased)
        self._close(fetched, places)
        fetched.fetch.release(places)

    def _close(self, fetched: Fetched, places: Ids) -> None:
        """Record that the blocks at these places are neither leased nor awaited any more."""
        num_closed = int(np.count_nonzero(fetched.is_open[places]))
        fetched.num_open -= num_closed
        self._num_open -= num_closed
        fetched.is_open[places] = False

    def _check_group(self, group_id: int) -> None:
        if not 0 <= group_id < len(self._states):
            raise Malformed(f"there is no group {group_id}; the layout has {len(self._states)} groups")

    def _names(self, group_id: int, data: bytes) -> list[BlockName]:
        self._check_group(group_id)
        return wire.names_in(data)

    def _reserved(self, group_id: int, data: bytes) -> Ids:
        """Return the slots that a message names. Raise `Malformed` unless all are reserved, and none is named twice."""
        self._check_group(group_id)
        slots = wire.numbers_in(data, len(self._states[group_id]))
        if (self._states[group_id][slots] == FREE).any() or len(np.unique(slots)) < len(slots):
            raise Malformed("a slot that the engine has not reserved, or that the message names twice")
        return slots

    def _no_longer_reserved(self, group_id: int, slots: Ids) -> None:
        self._share.release(self.tiers.memories[group_id], slots)
        self._states[group_id][slots] = FREE
        self._num_reserved[group_id] -= len(slots)


def _traced(traced: Sequence[wire.Traced], names: Sequence[BlockName]) -> Iterator[tuple[str, list[BlockName]]]:
    if len(traced) > wire.MAX_TRACED:
        raise Malformed(f"{len(traced)} traced requests; the maximum is {wire.MAX_TRACED}")
    for each in traced:
        yield each.traceparent, [names[place] for place in wire.numbers_in(each.places, len(names)).tolist()]


def _rows(chains: Sequence[wire.Chain], names: Sequence[BlockName], num_blocks: int) -> list[NamedSpan]:
    """Convert a message's *chains*. Raise `Malformed` unless they have all *num_blocks* blocks, each of them once."""
    rows, end = [], 0
    for each in chains:
        if each.start != end or not end < each.end <= len(names):
            raise Malformed("a chain does not begin where the previous one ends, or is empty or too long")
        if each.parent is not None and len(each.parent) != NAME_BYTES:
            raise Malformed(f"the name of a parent has {len(each.parent)} bytes, not {NAME_BYTES}")
        end = each.end
        parent = None if each.parent is None else BlockName(each.parent)
        rows.append(NamedSpan(each.start, end, list(names[each.start : end]), parent))
    if not end == len(names) == num_blocks:
        raise Malformed(f"{num_blocks} slots, {len(names)} names and chains of {end} blocks; the numbers must be equal")
    return rows
