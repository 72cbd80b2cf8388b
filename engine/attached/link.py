"""SidecarLink: an engine's connection to its sidecar, which is renewed when the sidecar restarts."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.engine.attached.attachment import AttachableMemory, Attachment
from kvtier.engine.attached.session import Session
from kvtier.engine.attached.wire import FromEngine, FromSidecar, Malformed, Ping, Welcome

ASK_AFTER_S = 0.25  # after this much silence, ping a sidecar that owes an answer
LOST_AFTER_S = 1.0  # after this much silence, do not use the sidecar until it sends something
MAX_STEP_S = 0.1  # between two checks, count at most this much silence: the engine may have been busy or stopped
MAX_COME = 1024  # with this many received but unprocessed messages, do not read more from the connection
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SidecarStanding:
    """State of the connection to a sidecar at one moment."""

    path: str  # of its socket
    is_attached: bool  # whether the sidecar is attached and answers
    num_attached: int  # how often the engine has attached
    attached_s: float  # seconds since it attached last; 0 while it is not attached


class Silence:
    """A watchdog for a sidecar that owes an answer: measures how long the sidecar has sent nothing.

    Only time in which the engine listened counts. The sidecar's disk may take long to answer, but its thread answers a
    ping at once. Owned by the tiers' thread.
    """

    def __init__(self, ask: Callable[[], None], clock: Callable[[], float]) -> None:
        """Start without silence; *ask* is called to ping the sidecar."""
        self._ask = ask
        self._clock = clock
        self._looked_at = clock()
        self._silent_s = 0.0
        self._is_asked = False

    @property
    def is_lost(self) -> bool:
        """Whether the sidecar has been silent for more than `LOST_AFTER_S`."""
        return self._silent_s > LOST_AFTER_S

    def on_answers(self) -> None:
        """Record that the sidecar has sent something."""
        self._silent_s = 0.0
        self._is_asked = False

    def look(self, is_waited_for: bool) -> bool:
        """Count the time since the last call, and return True if the sidecar became lost with this call.

        *is_waited_for* says whether the sidecar owes an answer.
        """
        was_lost = self.is_lost
        now = self._clock()
        step, self._looked_at = min(now - self._looked_at, MAX_STEP_S), now
        if is_waited_for or self.is_lost:
            self._silent_s += step
        elif not self._is_asked:
            self._silent_s = 0.0
        if self._silent_s > ASK_AFTER_S and not self._is_asked:
            self._is_asked = True
            self._ask()
        return self.is_lost and not was_lost


class SidecarLink:
    """An engine's connection to its sidecar: at most one session at a time. Owned by the engine's thread.

    The shared memory of a sidecar that is gone stays mapped until all leases on it are released, because copies may be
    in flight. Then the engine attaches to the next sidecar. A silent sidecar is not used until it sends something.
    """

    def __init__(
        self,
        attachment: Attachment[Any],
        memories: Sequence[AttachableMemory[Any]],
        clock: Callable[[], float],
    ) -> None:
        """Take ownership of *attachment*. *memories*, one for each group, are those that *attachment* was made with."""
        self.session: Session | None = None
        self.boot: bytes | None = None  # id of the process whose slots are mapped, kept while any of them is leased
        self.silence = Silence(lambda: self.send(Ping()), clock)
        self._attachment = attachment
        self._memories = memories
        self._clock = clock
        self._num_attached = 0
        self._attached_at = float("-inf")
        self._ended: Session | None = None  # the previous session, while copies of its leased slots may be in flight
        self._come: list[FromSidecar] = []  # messages received but not processed yet

    @property
    def is_attached(self) -> bool:
        """Whether a sidecar is attached and answers."""
        return self.session is not None and not self.silence.is_lost

    def standing(self) -> SidecarStanding:
        """Return the state of the connection."""
        attached_s = self._clock() - self._attached_at if self.is_attached else 0.0
        return SidecarStanding(self._attachment.path, self.is_attached, self._num_attached, attached_s)

    def send(self, message: FromEngine) -> None:
        """Send a message; does nothing without a sidecar."""
        if self.session is not None:
            self.session.send(message)

    def send_hint(self, message: FromEngine) -> None:
        """Send a message that may be lost."""
        if self.session is not None:
            self.session.send_hint(message)

    def attach(self, is_released: bool) -> Welcome | None:
        """Begin to use a new session if one is ready, and return its welcome; otherwise return None.

        *is_released* says whether the caller has released all slots of the previous sidecar.
        """
        if self._ended is not None and is_released:
            for memory in self._memories:
                memory.detach()
            self.boot = None
            self._ended.close()
            self._ended = None
            self._attachment.attach_again()
        if self.session is not None or self._ended is not None or (ready := self._attachment.take()) is None:
            return None
        for memory, host in zip(self._memories, ready.hosts, strict=True):
            memory.attach(host)
        self.session = ready.session
        self.boot = ready.session.welcome.boot
        self.silence.on_answers()
        self._num_attached += 1
        self._attached_at = self._clock()
        return ready.session.welcome

    def receive(self, until: float, on_message: Callable[[FromSidecar], None]) -> bool:
        """Process the sidecar's messages until the time *until*, but at least one. The rest stay queued.

        Returns:
            False if the session has ended and all its messages are processed; then call `end`.
        """
        session = self.session
        if session is None:
            return True
        if len(self._come) < MAX_COME:
            self._come += session.receive()
        if self._come:
            self.silence.on_answers()
        num_taken = 0
        try:
            for message in self._come:
                num_taken += 1
                on_message(message)
                if self._clock() > until:
                    break
        except Malformed as error:  # a sidecar of this version does not send such a message
            log.warning("sidecar: %s sent an invalid message (%s); disconnecting", self._attachment.path, error)
            session.disconnect()
            num_taken = len(self._come)  # its remaining messages are discarded
        del self._come[:num_taken]
        return session.is_open or bool(self._come)

    def end(self) -> None:
        """Stop using the session; its leased slots stay mapped."""
        assert self.session is not None, "there is no session to end"
        self.session.disconnect()
        self.session, self._ended = None, self.session

    def check(self) -> None:
        """Raise AssertionError if two sidecars are in use."""
        assert self.session is None or self._ended is None, "attached before the previous sidecar was released"

    def close(self) -> None:
        """End the session, so that leased and reserved slots return to the sidecar.

        Call this only when no copy is in flight.
        """
        for session in self._sessions():
            session.close()
        self._attachment.close()

    def close_while_copying(self) -> None:
        """Stop using the sidecar although copies hang. Leased slots return to the sidecar when this process ends."""
        for session in self._sessions():
            session.leave_open()
        self._attachment.close()

    def _sessions(self) -> list[Session]:
        return [session for session in (self.session, self._ended) if session is not None]
