"""`SidecarTiers`: the tiers below the device (host memory, disk, remote) in a sidecar process."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvtier.engine.attached.attached_fetch import AttachedFetch, AttachedFetches
from kvtier.engine.attached.attached_inquiries import AttachedInquiries
from kvtier.engine.attached.attachment import AttachableMemory, Attachment
from kvtier.engine.attached.link import SidecarLink, SidecarStanding
from kvtier.engine.attached.mirror import Mirror
from kvtier.engine.attached.slot_stock import SlotStock
from kvtier.engine.attached.wire import (
    Abandon,
    Chain,
    Clear,
    Cleared,
    Fetched,
    Forget,
    FromSidecar,
    InHost,
    Inquired,
    LeftDisk,
    LeftHost,
    Malformed,
    OnDisk,
    Publish,
    ReadState,
    Refresh,
    Reserve,
    Reserved,
    TiersState,
    Told,
    Traced,
    joined,
    names_in,
    numbers_in,
    packed,
)
from kvtier.tiers.device.eviction_order import NamedSpan
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.lower.lower_tiers import (
    NOT_CLEARING,
    NOTHING_TO_ASK,
    NOWHERE,
    Clearing,
    Inquiry,
    Lost,
    LowerHints,
    LowerStatistics,
    OnFetched,
    Places,
    ReadPriority,
    SpillProgress,
)
from kvtier.tiers.lower.purge import NothingPurged, PurgeOrder
from kvtier.tiers.lower.statistics import TierStatistics
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.events import EventLog
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.tiers.naming.named_blocks import NamedBlocks, OwnerNumbers
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.transfer.lane import Lane, LaneSpeed, Transfer
from kvtier.transfer.transfer_engine import TransferEngine

TAKING_IN_S = 0.001  # time per poll for the sidecar's messages; the next poll continues
WAKE_S = 0.25  # timeout of one wait for the sidecar's answer, after which the wait is renewed
CLEAR_S = 30.0  # timeout of `clear`: reporting a million blocks on disk as gone takes eight seconds
NO_STATE = TiersState(True, True, False, {}, {}, None, None, [])
NO_READS = ReadState()
NOTHING_THERE = LowerStatistics({Tier.HOST: TierStatistics()})


class AttachedStatus:
    """The state of a sidecar's tiers as last reported; implements `LowerStatus`."""

    def __init__(
        self,
        link: SidecarLink,
        mirror: Mirror,
        fetches: AttachedFetches,
        num_groups: int,
        clock: Callable[[], float],
    ) -> None:
        self.epoch = 0
        self.is_told = False  # whether the sidecar has reported all blocks that it had when the engine attached
        self.state = NO_STATE  # as reported last
        self.num_published = 0
        # Not 0, because a sidecar may attach at any time. Not its true number of slots either, because that may change
        # with the next sidecar, and `LowerStatus.num_slots` must never change.
        self.num_slots: Sequence[int] = [1] * num_groups
        self._link = link
        self._mirror = mirror
        self._fetches = fetches
        self._clock = clock
        self._read_speeds = {tier: LaneSpeed() for tier in Tier}

    @property
    def host_bytes(self) -> int:
        session = self._link.session
        return 0 if session is None else session.welcome.num_bytes

    @property
    def num_changes(self) -> int:
        return self._mirror.num_changes

    @property
    def is_indexed(self) -> bool:
        return self.is_told and self.state.is_indexed

    @property
    def is_readable(self) -> bool:
        return self._link.is_attached and self.state.is_readable

    @property
    def is_making_room(self) -> bool:
        return self._link.is_attached and self.state.is_making_room

    @property
    def clearing(self) -> Clearing:
        return NOT_CLEARING  # the sidecar deletes the records

    def on_attached(self) -> None:
        """Forget what the previous sidecar reported on its tiers, because a new one is attached."""
        self.is_told, self.state = False, NO_STATE

    def on_told(self) -> None:
        """Record that a new sidecar has reported all its blocks, so that earlier lookups must be repeated."""
        self.is_told = True
        self.epoch += 1

    def on_detached(self) -> None:
        """Record that the sidecar is gone, so that the results of earlier lookups are invalid."""
        self.is_told = False
        self.epoch += 1

    def on_state(self, state: TiersState) -> None:
        """Record the sidecar's latest report on the state of its tiers."""
        before, self.state = self.state.reads, state
        for tier, read in state.reads.items():
            speed = self._read_speeds[tier]
            speed.latency_s = read.latency_s
            if read.bytes_per_s is not None and read.bytes_per_s != before.get(tier, NO_READS).bytes_per_s:
                speed.take_over(read.bytes_per_s, self._clock())  # an unchanged speed is not a new measurement

    def read_speed(self, tier: Tier) -> LaneSpeed:
        return self._read_speeds[tier]

    def queued_read_bytes(self, tier: Tier) -> int:
        return self.state.reads.get(tier, NO_READS).queued_bytes if self._link.is_attached else 0

    def spill_progress(self) -> SpillProgress:
        """Return the progress of spilling, which here copies blocks to the sidecar's host memory."""
        session = self._link.session
        is_busy = session is not None and session.is_sending
        return SpillProgress(True, self._link.is_attached, num_done=self.num_published, is_busy=is_busy)

    def statistics(self) -> LowerStatistics:
        state = self.state
        if self._link.session is None or not state.tiers:
            return NOTHING_THERE
        return LowerStatistics(state.tiers, state.disk, state.remote, host_tenants=dict(state.host_tenants))

    def check(self) -> None:
        self._fetches.check()
        self._link.check()


class AttachedHints(LowerHints):
    """Hints from an engine to its sidecar. The only one with an effect is `inquire`, a lookup in the remote tier.

    The sidecar itself decides when to spill blocks to disk and when to free slots. `evict_last` does nothing: by the
    time the sidecar received the slot numbers, the slots could hold other blocks.
    """

    def __init__(
        self, link: SidecarLink, status: AttachedStatus, inquiries: AttachedInquiries, on_asked: Callable[[], None]
    ) -> None:
        self._link = link
        self._status = status
        self._inquiries = inquiries
        self._on_asked = on_asked

    @property
    def can_ask(self) -> bool:
        return self._link.is_attached and self._status.state.remote is not None

    def inquire(self, group_id: int, names: Sequence[BlockName]) -> Inquiry:
        inquiry = self._inquiries.begin(group_id, names) if self.can_ask else NOTHING_TO_ASK
        self._on_asked()
        return inquiry


class SidecarTiers:
    """The tiers below the device in a sidecar; implements `LowerTiers`. Owned by the engine's thread.

    Lookups use the engine's copy of the sidecar's index (`Mirror`). Requests to the sidecar never raise, and are
    answered in later polls. While no sidecar is attached, lookups find nothing and no block is stored.
    """

    def __init__(
        self,
        attachment: Attachment[Any],
        groups: Sequence[AttentionGroup],
        memories: Sequence[AttachableMemory[Any]],
        transfers: TransferEngine,
        answers: Lane,
        clock: Callable[[], float] = time.monotonic,
        *,
        events: EventLog | None = None,
        find_traced: Callable[[Sequence[BlockName]], Sequence[Traced]] = lambda names: (),
        num_kept: Sequence[int] | None = None,
    ) -> None:
        """Create tiers that are not attached yet, and take ownership of *attachment* and *answers*.

        Args:
            attachment: Thread that connects to the sidecar.
            groups: Attention groups of the model.
            memories: KV memory of each group, the same as in *attachment*.
            transfers: Copies between device and host slots.
            answers: Lane (thread) that waits for the sidecar's answers. Each answer also wakes an engine that waits for
                *transfers* to end.
            clock: Returns the time in seconds.
            events: Log of KV events, or None.
            find_traced: Returns the traced requests to which stored blocks belong, for the sidecar's traces.
            num_kept: Number of slots of each group to keep ready for `reserve` at all times (default: 0).
        """
        self._groups = groups
        self._num_kept = [0 for _ in groups] if num_kept is None else num_kept
        self._block_bytes = [memory.block_bytes for memory in memories]
        self._transfers = transfers
        self._answers = answers
        self._clock = clock
        self._find_traced = find_traced
        self._link = SidecarLink(attachment, memories, clock)
        self._mirror = Mirror([group.block_size for group in groups], events, clock)
        self._num_host_slots = [0 for _ in groups]  # the sidecar's slots, by group
        self._stocks = [SlotStock(0, lambda num: None, clock) for _ in groups]
        self._fetches = AttachedFetches(self._link.send)
        self._inquiries = AttachedInquiries(self._mirror.remote, self._link.send, clock)
        self._is_cleared = False
        self._is_waking = False
        self.status = AttachedStatus(self._link, self._mirror, self._fetches, len(groups), clock)
        self.hints = AttachedHints(self._link, self.status, self._inquiries, self._wake_when_heard)

    @property
    def is_attached(self) -> bool:
        """True if a sidecar is attached and answers."""
        return self._link.is_attached

    @property
    def is_told(self) -> bool:
        """True if the attached sidecar has reported all blocks that it had when the engine attached."""
        return self._link.session is not None and self.status.is_told

    @property
    def boot(self) -> bytes | None:
        """Id of the sidecar process whose host slots are used; None if there is none.

        The id stays until all leases on the slots have ended, even if the process is gone. Other processes that map
        the shared memory, such as workers of vLLM, compare the id to be sure that they map the same memory.
        """
        return self._link.boot

    def standing(self) -> SidecarStanding:
        """Return the state of the connection to the sidecar."""
        return self._link.standing()

    def find(self, group_id: int, names: Sequence[BlockName]) -> Places:
        if not self.is_attached:
            return np.full(len(names), NOWHERE, np.int32)
        return self._mirror.find(group_id, names, self.status.state.is_readable)

    def find_run(self, group_id: int, names: Sequence[BlockName]) -> Places:
        if not self.is_attached:
            return np.empty(0, np.int32)
        return self._mirror.find_run(group_id, names, self.status.state.is_readable)

    def fetch(
        self,
        group_id: int,
        blocks: NamedBlocks,
        on_fetched: OnFetched,
        found: Places | None = None,
        priority: ReadPriority = ReadPriority.NOW,
    ) -> AttachedFetch:
        fetch = self._fetches.begin(group_id, blocks, on_fetched, priority, self.is_attached)
        self._wake_when_heard()
        return fetch

    def reserve(self, group_id: int, num_slots: int) -> list[int]:
        if not self.is_attached or num_slots <= 0:
            return []
        slots = self._stocks[group_id].take(num_slots)
        self._wake_when_heard()
        return slots

    def has_room(self, group_id: int) -> bool:
        """Return whether the sidecar's last answer granted all slots of the group that were requested."""
        return self._stocks[group_id].has_room

    def publish(
        self, group_id: int, slots: Ids, rows: Sequence[NamedSpan], digests: Sequence[bytes], owners: OwnerNumbers
    ) -> None:
        self._stocks[group_id].return_lent_slots(slots)
        self.status.num_published += len(slots)
        names = [name for row in rows for name in row.names]
        chains = [Chain(row.start, row.end, row.parent) for row in rows]
        numbers = np.asarray(owners, "<u8").tobytes()
        traced = list(self._find_traced(names))
        self._link.send(Publish(group_id, packed(slots), joined(names), chains, b"".join(digests), numbers, traced))

    def abandon(self, group_id: int, slots: Ids) -> None:
        self._stocks[group_id].return_lent_slots(slots)
        self._link.send(Abandon(group_id, packed(slots)))

    def refresh(self, group_id: int, names: Sequence[BlockName], were_read: Sequence[bool]) -> None:
        if self.is_attached:
            self._link.send_hint(Refresh(group_id, joined(names), bytes(were_read)))

    def forget(self, group_id: int, names: Sequence[BlockName]) -> None:
        self._link.send_hint(Forget(group_id, joined(names)))

    def clear(self) -> bool:
        """Forget every block of this namespace, for all engines that use the sidecar; see `LowerTiers.clear`."""
        self._receive(float("inf"))
        if not self.is_attached or any(stock.lent for stock in self._stocks) or self._is_any_waiting():
            return False
        self._fetches.release_all()
        # Give back the reserved slots: a block in a slot that was reserved before the clear would never be found.
        for group_id, stock in enumerate(self._stocks):
            self._give_back(group_id, stock.take_ready())
        self._is_cleared = False
        self._link.send(Clear())
        give_up_at = time.monotonic() + CLEAR_S
        while not self._is_cleared and (session := self._link.session) is not None and time.monotonic() < give_up_at:
            session.flush()
            session.wait_readable(WAKE_S)
            self._receive(float("inf"))
        return self._is_cleared

    def purge(self, order: PurgeOrder) -> NothingPurged:
        """Purge nothing, because other engines may use the sidecar's blocks; see `LowerTiers.purge`."""
        return NothingPurged()

    def poll(self) -> None:
        self._attach()
        session = self._link.session
        if session is not None:
            session.flush()
        self._receive(self._clock() + TAKING_IN_S)
        session = self._link.session
        if self._link.silence.look(session is not None and (self._is_any_waiting() or session.is_sending)):
            self._fetches.fail_waiting(Reason.DEADLINE)
        for group_id, stock in enumerate(self._stocks):
            self._give_back(group_id, stock.pop_idle())
            if self.is_attached:
                stock.fill()
        self._mirror.go_on()
        self._inquiries.go_on()
        self._fetches.fail_dead()
        self._wake_when_heard()

    def pop_lost(self) -> Sequence[Lost]:
        return self._mirror.pop_lost()

    def close(self) -> None:
        """End the session, so that leased and reserved slots return to the sidecar.

        Call this only when no copy is in flight.
        """
        self._link.close()
        self._answers.close()

    def close_while_copying(self) -> None:
        """Stop using the sidecar while copies hang. Leased slots return to the sidecar when this process ends."""
        self._link.close_while_copying()
        self._answers.close()

    def _give_back(self, group_id: int, slots: Sequence[int]) -> None:
        if slots:
            self._link.send(Abandon(group_id, packed(slots)))

    def _is_any_waiting(self) -> bool:
        """Return whether the sidecar has yet to answer a request for slots or blocks."""
        return any(stock.is_waiting for stock in self._stocks) or self._fetches.is_any_waiting

    def _wake_when_heard(self) -> None:
        """Wake the thread that waits for copies at the sidecar's next answer, if a fetch, query or store needs one.

        An answer that only reserves spare slots wakes no thread, and is processed at the next poll.
        """
        session = self._link.session
        if self._is_waking or session is None:
            return
        is_asking = bool(self._inquiries) or self._fetches.is_any_waiting
        if not is_asking and not any(stock.is_short for stock in self._stocks):
            return

        def on_answers(transfer: Transfer) -> None:
            self._is_waking = False

        self._is_waking = self._transfers.watch(self._answers, lambda: session.wait_readable(WAKE_S), on_answers)

    def _attach(self) -> None:
        """Start to use a new session if one is ready and all slots of the previous sidecar are released."""
        is_released = not self._fetches.has_left_over and not any(stock.lent for stock in self._stocks)
        if (welcome := self._link.attach(is_released)) is None:
            return

        def request_slots(group_id: int, num_slots: int) -> None:
            self._link.send(Reserve(group_id, num_slots))

        self._num_host_slots = [welcome.num_bytes // block_bytes for block_bytes in self._block_bytes]
        self._stocks = [
            SlotStock(num_slots, partial(request_slots, group_id), self._clock, self._num_kept[group_id])
            for group_id, num_slots in enumerate(self._num_host_slots)
        ]
        self._mirror.begin(self._num_host_slots)
        self.status.on_attached()

    def _receive(self, until: float) -> None:
        """Process the sidecar's messages until the time *until*, and clean up if the sidecar is gone.

        Leased slots of a sidecar that is gone stay mapped until they are released.
        """
        if self._link.receive(until, self._on_message):
            return
        self._link.end()
        self.status.on_detached()
        self._mirror.end()
        self._inquiries.end()
        fetches = self._fetches.end()
        for stock in self._stocks:
            stock.take_ready()
        for fetch in fetches:
            fetch.fail(Reason.FAILED)

    def _on_message(self, message: FromSidecar) -> None:
        match message:
            case InHost():
                self._on_in_host(message)
            case LeftHost():
                self._mirror.on_left_host(self._group(message.group), names_in(message.names), message.cause)
            case OnDisk():
                self._mirror.on_disk(self._group(message.group), names_in(message.names))
            case LeftDisk():
                self._mirror.on_left_disk(self._group(message.group), names_in(message.names), message.cause)
            case Told():
                self.status.on_told()
            case Fetched():
                self._fetches.on_fetched(message, self._num_host_slots)
                if any(reason is Reason.EVICTED_FROM_REMOTE for _, reason in message.failures):
                    self._mirror.remote.clear()  # its hints are outdated
            case Reserved():
                group_id = self._group(message.group)
                slots = numbers_in(message.slots, self._num_host_slots[group_id]).tolist()
                self._stocks[group_id].on_reserved(message.num_asked, slots)
            case Inquired():
                self._inquiries.on_answered(message)
            case TiersState():
                self.status.on_state(message)
            case Cleared():
                self._is_cleared = True
            case _:  # such as `Pong`, which only shows that the sidecar answers
                pass

    def _on_in_host(self, message: InHost) -> None:
        group_id, names = self._group(message.group), names_in(message.names)
        slots = numbers_in(message.slots, self._num_host_slots[group_id]).tolist()
        if len(slots) != len(names):
            raise Malformed(f"{len(names)} block names came with {len(slots)} slots")
        self._mirror.on_in_host(group_id, names, slots)

    def _group(self, group_id: int) -> int:
        if not 0 <= group_id < len(self._groups):
            raise Malformed(f"group {group_id} does not exist; the engine has {len(self._groups)} groups")
        return group_id
