"""Feed: the messages to all engines of one layout about insertions, evictions and the state of the tiers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby

import numpy as np

from kvtier.engine.attached.wire import (
    MAX_BLOCKS,
    InHost,
    LeftDisk,
    LeftHost,
    OnDisk,
    ReadState,
    TiersState,
    Told,
    frame_of,
    joined,
    packed,
)
from kvtier.sidecar.layout_tiers import LayoutTiers
from kvtier.sidecar.port import Client, Port
from kvtier.tiers.device.slot_ids import ABSENT
from kvtier.tiers.lower.lower_tiers import LowerStatus
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.events import BlockRemoved, BlockStored, EventLog
from kvtier.tiers.naming.tier import EvictionCause, Tier

PAGE_BLOCKS = 1024  # blocks of host memory per frame for an engine that has just attached
MAX_SLOTS_PER_PAGE = 1 << 16  # slots examined per such frame
MAX_UNREAD_BYTES = 256 << 10  # backpressure for such frames; the port's own limit is higher
STATE_S = 0.5  # interval at which engines are sent the tiers' state even if its flags have not changed


class Feed:
    """The feed of one layout, which tells each engine which blocks are cached and where.

    From the moment at which an engine attaches, it is told of every change. Meanwhile, lists (pages) of the blocks that
    were cached before are sent to it, as fast as it reads them. Changes and pages both state what is true when they are
    sent, for example "this block is in that slot now", so their order does not matter. Owned by the sidecar's thread.
    """

    def __init__(self, tiers: LayoutTiers, events: EventLog, port: Port[bytes], capacity_bytes: int) -> None:
        """Start without engines.

        *events* are the insertions and evictions in *tiers*, and this feed is their only consumer. *capacity_bytes* is
        the size of the host memory that all layouts share.
        """
        self.tiers = tiers
        self._capacity_bytes = capacity_bytes
        self._events = events
        self._port = port
        self._clients: dict[Client[bytes], Iterator[bytes] | None] = {}  # with the pages still to be sent
        self._flags = (False, False, False)
        self._stated_at = float("-inf")

    def attach(self, client: Client[bytes]) -> None:
        """Begin to tell this engine which blocks are cached: those cached now, and every later change."""
        self._clients[client] = self._all_there_is()
        self._port.send(client, frame_of(self.state()))

    def detach(self, client: Client[bytes]) -> None:
        """Stop sending to this engine."""
        del self._clients[client]

    def tell(self) -> None:
        """Report to all engines which blocks have entered or left the tiers since the last call."""
        events = self._events.take()
        if self._clients:
            for frame in self._frames(events):
                self._send(frame)

    def go_on(self) -> None:
        """Send the next part of the list of cached blocks to each engine that lacks parts and reads fast enough."""
        for client, pages in list(self._clients.items()):
            if pages is None or not _may_be_told(client):
                continue
            page = next(pages, None)
            if page is None:
                self._clients[client] = None
                page = frame_of(Told())
            if page:
                self._port.send(client, page)

    @property
    def has_more(self) -> bool:
        """True if `go_on` can send a part of the list of cached blocks now."""
        return any(pages is not None and _may_be_told(client) for client, pages in self._clients.items())

    def tell_state(self, now: float) -> None:
        """Send engines the tiers' state every `STATE_S` seconds, and at once if a flag (such as `is_indexed`) changes.

        If no flag has changed, engines with unread messages are skipped, so that no messages pile up for them.
        """
        status = self.tiers.tiers.status
        flags = (status.is_indexed, status.is_readable, status.is_making_room)
        if not self._clients or (flags == self._flags and now - self._stated_at < STATE_S):
            return
        frame = frame_of(self.state())
        for client in list(self._clients):
            if flags != self._flags or not client.unread:
                self._port.send(client, frame)
        self._flags, self._stated_at = flags, now

    def state(self) -> TiersState:
        """Return the current state of the tiers."""
        status = self.tiers.tiers.status
        statistics = status.statistics()
        host = replace(statistics.tiers[Tier.HOST], capacity_bytes=self._capacity_bytes)
        return TiersState(
            status.is_indexed,
            status.is_readable,
            status.is_making_room,
            {tier: _read_state(status, tier) for tier in (Tier.DISK, Tier.REMOTE)},
            {**statistics.tiers, Tier.HOST: host},
            statistics.disk,
            statistics.remote,
            list(statistics.host_tenants.items()),
        )

    def _send(self, frame: bytes) -> None:
        for client in list(self._clients):
            self._port.send(client, frame)

    def _frames(self, events: Sequence[object]) -> Iterator[bytes]:
        """Yield the frames of these events. Consecutive events of one kind share a frame."""
        blocks = [event for event in events if isinstance(event, BlockStored | BlockRemoved)]
        assert len(blocks) == len(events), "an event that these tiers do not have"
        for (tier, group_id, cause), run in groupby(blocks, _kind_of):
            names = list(chain.from_iterable(event.names for event in run))
            for start in range(0, len(names), MAX_BLOCKS):
                yield self._frame(tier, group_id, cause, names[start : start + MAX_BLOCKS])

    def _frame(self, tier: Tier, group_id: int, cause: EvictionCause | None, names: Sequence[BlockName]) -> bytes:
        if cause is not None:
            gone = LeftHost if tier is Tier.HOST else LeftDisk
            return frame_of(gone(group_id, joined(names), cause))
        if tier is Tier.DISK:
            return frame_of(OnDisk(group_id, joined(names)))
        # Skip blocks that have been evicted since: the events of their evictions follow.
        slots = self.tiers.tiers.index.host[group_id].pool.find_all(names)
        there = np.flatnonzero(slots != ABSENT)
        if len(there) < len(names):
            names = [names[i] for i in there.tolist()]
        return frame_of(InHost(group_id, joined(names), packed(slots[there])))

    def _all_there_is(self) -> Iterator[bytes]:
        """Yield the list of cached blocks in parts (frames), some of which are empty.

        Blocks that are stored or evicted meanwhile may be missing.
        """
        index = self.tiers.tiers.index
        for group_id, host in enumerate(index.host):
            start = 0
            while start < host.pool.num_slots:
                slots = np.arange(start, min(start + MAX_SLOTS_PER_PAGE, host.pool.num_slots))
                start = int(slots[-1]) + 1
                slots = slots[host.pool.are_named(slots)]
                if len(slots) > PAGE_BLOCKS:
                    slots = slots[:PAGE_BLOCKS]
                    start = int(slots[-1]) + 1
                names = [name for slot in slots.tolist() if (name := host.pool.name(slot)) is not None]
                yield frame_of(InHost(group_id, joined(names), packed(slots))) if names else b""
        for group_id in range(len(index.host)):
            for page in index.disk.index.pages(group_id):
                yield frame_of(OnDisk(group_id, joined(page))) if page else b""


def _read_state(status: LowerStatus, tier: Tier) -> ReadState:
    speed = status.read_speed(tier)
    return ReadState(speed.bytes_per_s, speed.latency_s, status.queued_read_bytes(tier))


def _kind_of(event: BlockStored | BlockRemoved) -> tuple[Tier, int, EvictionCause | None]:
    return event.tier, event.group_id, event.cause if isinstance(event, BlockRemoved) else None


def _may_be_told(client: Client[bytes]) -> bool:
    return client.is_open and len(client.unread) < MAX_UNREAD_BYTES
