"""Host slots that a sidecar has reserved for an engine ahead of use."""

from collections.abc import Callable, Sequence

from kvtier.tiers.device.slot_ids import Ids

IDLE_S = 0.5  # return unused slots after this long, because other engines may need them
RETRY_S = 0.5  # ask a sidecar without room again after this long
MAX_PART = 16  # at most 1/16 of all slots is kept ready in addition to the slots requested


class SlotStock:
    """A stock of host slots that a sidecar has reserved for one attention group of an engine.

    The stock exists because the sidecar does not answer at once. A caller gets the slots that are ready, and the
    missing ones are requested. For the next call, the stock also keeps slots ready: as many as the last call asked for,
    if the sidecar has room. A taken slot is *lent* until the caller has filled or returned it. Owned by the engine's
    thread.
    """

    def __init__(
        self, num_slots: int, ask: Callable[[int], None], clock: Callable[[], float], num_kept: int = 0
    ) -> None:
        """Create an empty stock.

        Args:
            num_slots: Number of host slots that the sidecar has for the group.
            ask: Requests the given number of slots from the sidecar.
            clock: Returns the time in seconds.
            num_kept: Number of slots to keep ready even while none is used, if the sidecar has room. Needed if the
                caller cannot retry, because a block that gets no slot at once is then never stored.
        """
        self.lent: set[int] = set()
        self.is_short = False  # whether the last caller got too few slots, and the request for more is unanswered
        self.has_room = True  # whether the sidecar's last answer granted all requested slots
        self._max_ahead = num_slots // MAX_PART
        self._num_kept = min(num_kept, self._max_ahead)
        self._answered_at = float("-inf")
        self._ask = ask
        self._clock = clock
        self._ready: list[int] = []
        self._num_asked = 0  # slots requested and not answered yet
        self._used_at = clock()

    @property
    def is_waiting(self) -> bool:
        """True if the sidecar has yet to answer a request for slots."""
        return self._num_asked > 0

    def take(self, num_slots: int) -> list[int]:
        """Take up to *num_slots* of the ready slots, and request more from the sidecar if necessary."""
        self._used_at = self._clock()
        taken, self._ready = self._ready[:num_slots], self._ready[num_slots:]
        self.lent.update(taken)
        lacking, kept = num_slots - len(taken), max(self._num_kept, min(num_slots, self._max_ahead))
        self.is_short = lacking > 0
        if lacking or 2 * len(self._ready) <= kept:
            self._want(lacking + kept - len(self._ready))
        return taken

    def fill(self) -> None:
        """Refill the stock to *num_kept* ready slots, without too many requests.

        Usually, slots are requested once half of *num_kept* or fewer are ready, or after `IDLE_S` without use. If the
        sidecar's last answer had too few slots, they are requested `RETRY_S` after that answer.
        """
        if self.is_waiting or len(self._ready) >= self._num_kept:
            return
        now = self._clock()
        if self.has_room:
            is_due = 2 * len(self._ready) <= self._num_kept or now - self._used_at > IDLE_S
        else:
            is_due = now - self._answered_at > RETRY_S
        if is_due:
            self._want(self._num_kept - len(self._ready))

    def on_reserved(self, num_asked: int, slots: Sequence[int]) -> None:
        """Add *slots*, the sidecar's answer to a request for *num_asked* slots."""
        self._num_asked -= num_asked
        self.has_room = len(slots) >= num_asked
        self._answered_at = self._clock()
        self.is_short = False
        self._ready += slots

    def return_lent_slots(self, slots: Ids) -> None:
        """Record that these slots are no longer lent: the caller has filled them or gives them back."""
        gone = set(slots.tolist())
        assert gone <= self.lent, "a slot that was not reserved is returned"
        self.lent -= gone

    def pop_idle(self) -> list[int]:
        """Remove and return unused slots beyond *num_kept*, if the last `take` was more than `IDLE_S` seconds ago.

        The caller must give them back to the sidecar.
        """
        if self._clock() - self._used_at <= IDLE_S:
            return []
        idle, self._ready = self._ready[self._num_kept :], self._ready[: self._num_kept]
        return idle

    def take_ready(self) -> list[int]:
        """Remove and return all reserved slots that no caller has taken."""
        ready, self._ready = self._ready, []
        return ready

    def _want(self, wanted: int) -> None:
        if wanted > self._num_asked:
            self._ask(wanted - self._num_asked)
            self._num_asked = wanted
