"""SlotStock: host slots that a sidecar has reserved for an engine, before it copies blocks into them."""

from collections.abc import Callable, Sequence

from kvtier.tiers.device.slot_ids import Ids

IDLE_S = 0.5  # after which slots that were not used go back: others may need them
RETRY_S = 0.5  # after which a sidecar without room is asked again
MAX_PART = 16  # of all slots, the part of them that is kept ready beyond what was asked for


class SlotStock:
    """One group's slots: those that lie ready, and those lent to the caller, who fills them or gives them back.

    A sidecar's answer takes a moment, so a caller gets what lies ready, and as much as it lacked is asked for; where
    there is room, as much again as it takes each time is kept ready. Owned by the tiers' thread.
    """

    def __init__(
        self, num_slots: int, ask: Callable[[int], None], clock: Callable[[], float], num_kept: int = 0
    ) -> None:
        """*num_slots* that the sidecar may have; *ask* is called with how many slots are to be reserved. *num_kept* lie
        ready also while none is used, as far as there is room: a caller that cannot offer a block twice needs them."""
        self.lent: set[int] = set()
        self.is_short = False  # who took last lacks some, for which the answer has still to come
        self.has_room = True  # the sidecar's last answer had all slots that were asked for
        self._max_ahead = num_slots // MAX_PART
        self._num_kept = min(num_kept, self._max_ahead)
        self._answered_at = float("-inf")
        self._ask = ask
        self._clock = clock
        self._ready: list[int] = []
        self._num_asked = 0  # slots for which no answer has come
        self._used_at = clock()

    @property
    def is_waiting(self) -> bool:
        """Whether an answer has still to come."""
        return self._num_asked > 0

    def take(self, num_slots: int) -> list[int]:
        """Lend up to so many slots."""
        self._used_at = self._clock()
        taken, self._ready = self._ready[:num_slots], self._ready[num_slots:]
        self.lent.update(taken)
        lacking, kept = num_slots - len(taken), max(self._num_kept, min(num_slots, self._max_ahead))
        self.is_short = lacking > 0
        if lacking or 2 * len(self._ready) <= kept:
            self._want(lacking + kept - len(self._ready))
        return taken

    def fill(self) -> None:
        """Reserve slots until as many lie ready as are kept: at once if half are gone, otherwise once no slot is used.

        Only a sidecar whose last answer fell short is left alone for `RETRY_S`.
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
        """Take in the answer to a question for *num_asked* slots."""
        self._num_asked -= num_asked
        self.has_room = len(slots) >= num_asked
        self._answered_at = self._clock()
        self.is_short = False
        self._ready += slots

    def end_loan(self, slots: Ids) -> None:
        """These slots were filled, or given back."""
        gone = set(slots.tolist())
        assert gone <= self.lent, "a slot that was not reserved"
        self.lent -= gone

    def take_idle(self) -> list[int]:
        """Take out slots that have lain ready for long, to give them back."""
        if self._clock() - self._used_at <= IDLE_S:
            return []
        idle, self._ready = self._ready[self._num_kept :], self._ready[: self._num_kept]
        return idle

    def take_ready(self) -> list[int]:
        """Take out all slots that lie ready."""
        ready, self._ready = self._ready, []
        return ready

    def _want(self, wanted: int) -> None:
        if wanted > self._num_asked:
            self._ask(wanted - self._num_asked)
            self._num_asked = wanted
