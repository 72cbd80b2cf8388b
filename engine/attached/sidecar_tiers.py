"""The tiers below the device in a sidecar process that outlives the engine."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvtier.engine.attached.attached_fetch import AttachedFetch
from kvtier.engine.attached.attached_inquiries import AttachedInquiries
from kvtier.engine.attached.attachment import AttachableMemory, Attachment
from kvtier.engine.attached.mirror import Mirror
from kvtier.engine.attached.session import Session
from kvtier.engine.attached.slot_stock import SlotStock
from kvtier.engine.attached.standing import SidecarStanding
from kvtier.engine.attached.wire import (
    Abandon,
    Chain,
    Clear,
    Cleared,
    Fetch,
    Fetched,
    Forget,
    FromEngine,
    FromSidecar,
    InHost,
    Inquired,
    LeftDisk,
    LeftHost,
    Malformed,
    OnDisk,
    Ping,
    Publish,
    ReadState,
    Refresh,
    Release,
    Reserve,
    Reserved,
    State,
    TimeOut,
    Told,
    Traced,
    digests_in,
    joined,
    names_in,
    numbers_in,
    owners_in,
    packed,
    starts_of,
)
from kvtier.tiers.device.eviction_order import Row
from kvtier.tiers.device.slot_ids import Ids
from kvtier.tiers.lower.inquiry import NOTHING_TO_ASK, Inquiry
from kvtier.tiers.lower.lower_tiers import NOWHERE, Lost, LowerStatistics, OnFetched, Places, SpillProgress
from kvtier.tiers.lower.purge import NothingPurged, PurgeOrder
from kvtier.tiers.lower.statistics import TierStatistics
from kvtier.tiers.naming.block_hash import BlockName
from kvtier.tiers.naming.events import EventLog
from kvtier.tiers.naming.groups import AttentionGroup
from kvtier.tiers.naming.named_blocks import NamedBlocks
from kvtier.tiers.naming.tenant import OwnerNumbers
from kvtier.tiers.naming.tier import Reason, Tier
from kvtier.transfer.lane import Lane, Transfer
from kvtier.transfer.lane_speed import LaneSpeed
from kvtier.transfer.transfer_engine import TransferEngine

ASK_AFTER_S = 0.25  # ask a sidecar that owes an answer whether it lives after this much silence
LOST_AFTER_S = 1.0  # do not use it after this much silence, until it sends something
MAX_STEP_S = 0.1  # longest time between two checks that counts: a busy or stopped engine has not listened
log = logging.getLogger(__name__)

TAKING_IN_S = 0.001  # time per poll for the sidecar's messages; the next poll continues
MAX_COME = 1024  # limit on received but unprocessed messages; beyond it, the connection is not read
WAKE_S = 0.25  # timeout of one wait for the sidecar's answer, after which the wait is renewed
CLEAR_S = 30.0  # timeout of `clear`: reporting a million blocks on disk as gone takes eight seconds
NO_STATE = State(True, True, False, {}, {}, None, None, [])
NO_READS = ReadState()
NOTHING_THERE = LowerStatistics({Tier.HOST: TierStatistics()})


class Silence:
    """How long a sidecar has been silent although it should have sent something, while the engine listened.

    A disk may take long to answer, but the sidecar's thread never does. Owned by the tiers' thread.
    """

    def __init__(self, ask: Callable[[], None], clock: Callable[[], float]) -> None:
        """Start without silence; *ask* is called to make the sidecar send something."""
        self._ask = ask
        self._clock = clock
        self._looked_at = clock()
        self._silent_s = 0.0
        self._is_asked = False

    @property
    def is_lost(self) -> bool:
        """Whether the sidecar has been silent for too long."""
        return self._silent_s > LOST_AFTER_S

    def on_answers(self) -> None:
        """Record that the sidecar has sent something."""
        self._silent_s = 0.0
        self._is_asked = False

    def look(self, is_waited_for: bool) -> None:
        """Account for the time since the last call; *is_waited_for*: whether the sidecar owes an answer."""
        now = self._clock()
        step, self._looked_at = min(now - self._looked_at, MAX_STEP_S), now
        if is_waited_for or self.is_lost:
            self._silent_s += step
        elif not self._is_asked:
            self._silent_s = 0.0
        if self._silent_s > ASK_AFTER_S and not self._is_asked:
            self._is_asked = True
            self._ask()


class SidecarTiers:
    """The tiers below the device in a sidecar; implements `LowerTiers`. Owned by the engine's thread.

    Lookups use what the sidecar has reported (`Mirror`). Requests to the sidecar are answered in later polls, and never
    raise. Without a sidecar, nothing is found and no block is accepted.

    The memory of a sidecar that is gone stays mapped until all leases on it are released, because copies may be in
    flight. Then the engine attaches to the next sidecar. A silent sidecar is not used until it sends something, and
    requests to it fail.
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

        *attachment* has the same *memories*. The lane *answers* waits for the sidecar's answers, so that
        `transfers.poll` returns when one has come. *find_traced* returns the traced requests of published blocks, which
        are reported to the sidecar. *num_kept* slots per group are kept ready for `reserve` at all times.
        """
        self.num_attached = 0  # how often the engine has attached to a sidecar
        self._attached_at = float("-inf")  # when it attached last
        self._attachment = attachment
        self._groups = groups
        self._num_kept = [0 for _ in groups] if num_kept is None else num_kept
        self._memories = memories
        self._transfers = transfers
        self._answers = answers
        self._clock = clock
        self._find_traced = find_traced
        self._mirror = Mirror([group.block_size for group in groups], events, clock)
        self._session: Session | None = None
        self._boot: bytes | None = None
        self._silence = Silence(lambda: self._send(Ping()), clock)
        self._was_lost = False
        self._num_host_slots = [0 for _ in groups]  # the sidecar's slots, by group
        self._stocks = [SlotStock(0, lambda num: None, clock) for _ in groups]
        self._fetches: dict[int, AttachedFetch] = {}  # fetches of this session that are not over
        self._left: set[AttachedFetch] = set()  # fetches of the previous session that still hold leases
        self._inquiries = AttachedInquiries(self._mirror.remote, self._send, clock)
        self._next_number = 0
        self._dead: list[AttachedFetch] = []  # fetches without a sidecar, whose failure was not reported yet
        self._come: list[FromSidecar] = []  # messages received but not processed yet
        self._ended: Session | None = None  # the previous session, while copies of its leased slots may be in flight
        self._is_told = False
        self._is_cleared = False
        self._is_waking = False
        self._state = NO_STATE
        self._read_speeds = {tier: LaneSpeed() for tier in Tier}
        self._num_published = 0
        self._epoch = 0

    @property
    def is_attached(self) -> bool:
        """Whether a sidecar is attached and answers."""
        return self._session is not None and not self._silence.is_lost

    def standing(self) -> SidecarStanding:
        """Return the state of the connection to the sidecar."""
        attached_s = self._clock() - self._attached_at if self.is_attached else 0.0
        return SidecarStanding(self._attachment.path, self.is_attached, self.num_attached, attached_s)

    @property
    def boot(self) -> bytes | None:
        """Id of the sidecar process that the host slots belong to; None if there is none.

        It is kept after that process has gone, while any of its slots are leased. Other processes that map the segment
        compare it to know that they mean the same slots.
        """
        return self._boot

    @property
    def num_slots(self) -> Sequence[int]:
        # A sidecar may come at any time, and the next one may have a different number of slots.
        return [1 for _ in self._groups]

    @property
    def host_bytes(self) -> int:
        return 0 if self._session is None else self._session.welcome.num_bytes

    @property
    def num_changes(self) -> int:
        return self._mirror.num_changes

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def is_told(self) -> bool:
        """Whether the attached sidecar has reported all blocks that it had when the engine attached."""
        return self._session is not None and self._is_told

    @property
    def is_indexed(self) -> bool:
        return self.is_told and self._state.is_indexed

    @property
    def is_readable(self) -> bool:
        return self.is_attached and self._state.is_readable

    @property
    def is_making_room(self) -> bool:
        return self.is_attached and self._state.is_making_room

    def find(self, group_id: int, names: Sequence[BlockName]) -> Places:
        if not self.is_attached:
            return np.full(len(names), NOWHERE, np.int32)
        return self._mirror.find(group_id, names, self._state.is_readable)

    def find_run(self, group_id: int, names: Sequence[BlockName]) -> Places:
        if not self.is_attached:
            return np.empty(0, np.int32)
        return self._mirror.find_run(group_id, names, self._state.is_readable)

    @property
    def can_ask(self) -> bool:
        return self.is_attached and self._state.remote is not None

    def inquire(self, group_id: int, names: Sequence[BlockName]) -> Inquiry:
        inquiry = self._inquiries.begin(group_id, names) if self.can_ask else NOTHING_TO_ASK
        self._wake_when_heard()
        return inquiry

    def fetch(
        self,
        group_id: int,
        blocks: NamedBlocks,
        on_fetched: OnFetched,
        found: Places | None = None,
    ) -> AttachedFetch:
        return self._fetch(group_id, blocks, on_fetched, is_for_later=False)

    def fetch_later(self, group_id: int, blocks: NamedBlocks, on_fetched: OnFetched) -> AttachedFetch:
        return self._fetch(group_id, blocks, on_fetched, is_for_later=True)

    def reserve(self, group_id: int, num_slots: int) -> list[int]:
        if not self.is_attached or num_slots <= 0:
            return []
        slots = self._stocks[group_id].take(num_slots)
        self._wake_when_heard()
        return slots

    def has_room(self, group_id: int) -> bool:
        """Return whether the sidecar had all slots of the group that were last requested."""
        return self._stocks[group_id].has_room

    def publish(
        self, group_id: int, slots: Ids, rows: Sequence[Row], digests: Sequence[bytes], owners: OwnerNumbers
    ) -> None:
        self._stocks[group_id].return_lent_slots(slots)
        self._num_published += len(slots)
        names = [name for row in rows for name in row.names]
        chains = [Chain(row.start, row.end, row.parent) for row in rows]
        numbers = np.asarray(owners, "<u8").tobytes()
        traced = list(self._find_traced(names))
        self._send(Publish(group_id, packed(slots), joined(names), chains, b"".join(digests), numbers, traced))

    def abandon(self, group_id: int, slots: Ids) -> None:
        self._stocks[group_id].return_lent_slots(slots)
        self._send(Abandon(group_id, packed(slots)))

    def refresh(self, group_id: int, names: Sequence[BlockName], were_read: Sequence[bool]) -> None:
        if self._session is not None and self.is_attached:
            self._session.send_hint(Refresh(group_id, joined(names), bytes(were_read)))

    def evict_last(self, group_id: int, places: Places) -> None:
        """Do nothing: by the time the sidecar got the message, other blocks could be in these slots."""

    def forget(self, group_id: int, names: Sequence[BlockName]) -> None:
        if self._session is not None:
            self._session.send_hint(Forget(group_id, joined(names)))

    def clear(self) -> bool:
        """Forget every block of this namespace, for all engines of the sidecar; see `LowerTiers.clear`."""
        self._take_in(float("inf"))
        if not self.is_attached or any(stock.lent for stock in self._stocks) or self._is_any_waiting():
            return False
        for fetch in list(self._fetches.values()):
            fetch.release(range(len(fetch.slots)))
        for group_id, stock in enumerate(self._stocks):  # blocks in slots reserved before a clear are never found
            self._give_back(group_id, stock.take_ready())
        self._is_cleared = False
        self._send(Clear())
        give_up_at = time.monotonic() + CLEAR_S
        while not self._is_cleared and self._session is not None and time.monotonic() < give_up_at:
            self._session.flush()
            self._session.wait_readable(WAKE_S)
            self._take_in(float("inf"))
        return self._is_cleared

    def purge(self, order: PurgeOrder) -> NothingPurged:
        """Purge nothing, because all engines of the sidecar share its tiers; see `LowerTiers.purge`."""
        return NothingPurged()

    def spill(self) -> None:
        """Do nothing: the sidecar writes to its disk by itself."""

    def make_room(self) -> None:
        """Do nothing: the sidecar makes room by itself."""

    def poll(self) -> None:
        self._attach()
        if self._session is not None:
            self._session.flush()
        self._take_in(self._clock() + TAKING_IN_S)
        self._silence.look(self._session is not None and (self._is_any_waiting() or self._session.is_sending))
        if self._silence.is_lost and not self._was_lost:
            self._was_lost = True
            self._fail_waiting(Reason.DEADLINE)
        for group_id, stock in enumerate(self._stocks):
            self._give_back(group_id, stock.pop_idle())
            if self.is_attached:
                stock.fill()
        self._mirror.go_on()
        self._inquiries.go_on()
        dead, self._dead = self._dead, []
        for fetch in dead:
            fetch.fail(Reason.FAILED)
        self._wake_when_heard()

    def pop_lost(self) -> Sequence[Lost]:
        return self._mirror.pop_lost()

    def read_speed(self, tier: Tier) -> LaneSpeed:
        return self._read_speeds[tier]

    def queued_read_bytes(self, tier: Tier) -> int:
        return self._state.reads.get(tier, NO_READS).queued_bytes if self.is_attached else 0

    def spill_progress(self) -> SpillProgress:
        """Return the progress, see `LowerTiers`; the target is host memory, because it outlives the engine."""
        is_busy = self._session is not None and self._session.is_sending
        return SpillProgress(True, self.is_attached, num_done=self._num_published, is_busy=is_busy)

    def statistics(self) -> LowerStatistics:
        if self._session is None or not self._state.tiers:
            return NOTHING_THERE
        state = self._state
        return LowerStatistics(state.tiers, state.disk, state.remote, host_tenants=dict(state.host_tenants))

    def check(self) -> None:
        for number, fetch in self._fetches.items():
            assert number == fetch.number, "a fetch is kept under another number"
            assert not fetch.is_over, "a fetch that is over is kept"
        assert self._session is None or self._ended is None, "attached before the previous sidecar was released"

    def close(self) -> None:
        """End the session when no copy is in flight; leased and reserved slots return to the sidecar."""
        for session in self._sessions():
            session.close()
        self._attachment.close()
        self._answers.close()

    def close_while_copying(self) -> None:
        """End everything but the copies; leased and reserved slots return to the sidecar when this process ends."""
        for session in self._sessions():
            session.leave_open()
        self._attachment.close()
        self._answers.close()

    def _sessions(self) -> list[Session]:
        return [session for session in (self._session, self._ended) if session is not None]

    def _fetch(self, group_id: int, blocks: NamedBlocks, on_fetched: OnFetched, is_for_later: bool) -> AttachedFetch:
        number, self._next_number = self._next_number, self._next_number + 1
        fetch = AttachedFetch(number, group_id, len(blocks.names), on_fetched, self._on_released, self._on_late)
        if not self.is_attached:
            self._dead.append(fetch)
        elif len(blocks.names):
            self._fetches[number] = fetch
            starts = starts_of(blocks.names, blocks.parents)
            self._send(Fetch(number, group_id, joined(blocks.names), starts, blocks.tenant, is_for_later))
            self._wake_when_heard()
        return fetch

    def _on_released(self, fetch: AttachedFetch, places: Ids) -> None:
        if fetch.number in self._fetches:
            self._send(Release(fetch.number, packed(places)))
            if fetch.is_over:
                del self._fetches[fetch.number]
        elif fetch.is_over:
            self._left.discard(fetch)

    def _give_back(self, group_id: int, slots: Sequence[int]) -> None:
        if slots:
            self._send(Abandon(group_id, packed(slots)))

    def _on_late(self, fetch: AttachedFetch) -> None:
        self._send(TimeOut(fetch.number))

    def _send(self, message: FromEngine) -> None:
        if self._session is not None:
            self._session.send(message)

    def _is_any_waiting(self) -> bool:
        """Return whether the sidecar owes an answer."""
        return any(stock.is_waiting for stock in self._stocks) or self._is_any_fetch_waiting()

    def _is_any_fetch_waiting(self) -> bool:
        return any(fetch.is_waiting for fetch in self._fetches.values())

    def _wake_when_heard(self) -> None:
        """End the owner's wait for copies when the sidecar sends something, while a caller needs the answer.

        Slots that are merely kept ready can wait until the next poll.
        """
        session = self._session
        if self._is_waking or session is None:
            return
        is_asking = bool(self._inquiries) or self._is_any_fetch_waiting()
        if not is_asking and not any(stock.is_short for stock in self._stocks):
            return

        def on_answers(transfer: Transfer) -> None:
            self._is_waking = False

        self._is_waking = self._transfers.watch(self._answers, lambda: session.wait_readable(WAKE_S), on_answers)

    def _attach(self) -> None:
        """Attach to a sidecar that is ready, once the previous one's slots are released."""
        if self._ended is not None and not self._left and not any(stock.lent for stock in self._stocks):
            for memory in self._memories:
                memory.detach()
            self._boot = None
            self._ended.close()
            self._ended = None
            self._attachment.attach_again()
        if self._session is not None or self._ended is not None or (ready := self._attachment.take()) is None:
            return
        for memory, host in zip(self._memories, ready.hosts, strict=True):
            memory.attach(host)
        self._session = ready.session
        self._boot = ready.session.welcome.boot
        self._num_host_slots = [ready.session.welcome.num_bytes // memory.block_bytes for memory in self._memories]
        self._stocks = [self._stock(group_id, num) for group_id, num in enumerate(self._num_host_slots)]
        self._mirror.begin(self._num_host_slots)
        self._silence.on_answers()
        self._was_lost = False
        self._is_told = False
        self._state = NO_STATE
        self.num_attached += 1
        self._attached_at = self._clock()

    def _stock(self, group_id: int, num_slots: int) -> SlotStock:
        num_kept = self._num_kept[group_id]
        return SlotStock(num_slots, lambda num: self._send(Reserve(group_id, num)), self._clock, num_kept)

    def _take_in(self, until: float) -> None:
        """Process the sidecar's messages until the time *until*, at least one; the rest stays queued."""
        session = self._session
        if session is None:
            return
        if len(self._come) < MAX_COME:
            self._come += session.receive()
        if self._come:
            self._silence.on_answers()
            self._was_lost = False
        num_taken = 0
        try:
            for message in self._come:
                num_taken += 1
                self._on_message(message)
                if self._clock() > until:
                    break
        except Malformed as error:  # a sidecar of this version does not send such a message
            log.warning("sidecar: %s sent an invalid message (%s); disconnecting", self._attachment.path, error)
            session.disconnect()
            num_taken = len(self._come)  # its remaining messages are discarded
        del self._come[:num_taken]
        if not session.is_open and not self._come:
            self._detach(session)

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
                self._is_told = True
                self._epoch += 1  # which device blocks have a copy below is known from now on
            case Fetched():
                self._on_fetched(message)
            case Reserved():
                group_id = self._group(message.group)
                slots = numbers_in(message.slots, self._num_host_slots[group_id]).tolist()
                self._stocks[group_id].on_reserved(message.num_asked, slots)
            case Inquired():
                self._inquiries.on_answered(message)
            case State():
                self._on_state(message)
            case Cleared():
                self._is_cleared = True
            case _:  # a sign of life
                pass

    def _on_in_host(self, message: InHost) -> None:
        group_id, names = self._group(message.group), names_in(message.names)
        slots = numbers_in(message.slots, self._num_host_slots[group_id]).tolist()
        if len(slots) != len(names):
            raise Malformed(f"{len(names)} blocks have {len(slots)} slots")
        self._mirror.on_in_host(group_id, names, slots)

    def _on_state(self, message: State) -> None:
        before, self._state = self._state.reads, message
        for tier, read in message.reads.items():
            speed = self._read_speeds[tier]
            speed.latency_s = read.latency_s
            if read.bytes_per_s is not None and read.bytes_per_s != before.get(tier, NO_READS).bytes_per_s:
                speed.take_over(read.bytes_per_s, self._clock())  # an equal speed is old: nothing was read since

    def _on_fetched(self, message: Fetched) -> None:
        fetch = self._fetches.get(message.number)
        if fetch is None:  # released in the meantime, which the sidecar has been told
            return
        places = numbers_in(message.places, len(fetch.slots))
        slots = numbers_in(message.slots, self._num_host_slots[fetch.group_id])
        owners = owners_in(message.owners, len(places))
        if not all(0 <= place < len(fetch.slots) for place, _ in message.failures):
            raise Malformed("a failure is not of a block of the fetch")
        if not len(places) == len(slots) == len(digests_in(message.digests, len(places))):
            raise Malformed("blocks of a fetch lack slots or digests")
        fetch.on_come(places, slots, message.digests, owners)
        for place, reason in message.failures:
            fetch.on_failed(place, reason)
        if any(reason is Reason.EVICTED_FROM_REMOTE for _, reason in message.failures):
            self._mirror.remote.clear()  # its hints are outdated
        if fetch.is_over:
            self._fetches.pop(fetch.number, None)

    def _group(self, group_id: int) -> int:
        if not 0 <= group_id < len(self._groups):
            raise Malformed(f"group {group_id} does not exist; the engine has {len(self._groups)} groups")
        return group_id

    def _fail_waiting(self, reason: Reason) -> None:
        """Fail all requests that have not been answered."""
        for fetch in list(self._fetches.values()):
            if len(places := fetch.waiting_places()):
                self._send(Release(fetch.number, packed(places)))
                fetch.fail(reason)
            if fetch.is_over:
                self._fetches.pop(fetch.number, None)

    def _detach(self, session: Session) -> None:
        """Handle the loss of the sidecar. Its leased slots stay mapped until they are released."""
        session.disconnect()
        self._session = None
        self._ended = session
        self._is_told = False
        self._mirror.end()
        self._inquiries.end()
        self._epoch += 1
        fetches = list(self._fetches.values())
        self._fetches.clear()
        self._left.update(fetch for fetch in fetches if fetch.num_leased)
        for stock in self._stocks:
            stock.take_ready()
        for fetch in fetches:
            fetch.fail(Reason.FAILED)
