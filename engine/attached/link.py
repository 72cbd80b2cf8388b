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
    """A watchdog that detects a sidecar that hangs: it owes an answer, but sends nothing and does not answer pings.

    A busy disk does not make the sidecar silent, because the thread that answers pings never waits for the disk. Only
    time in which the engine listened is counted as silence. Owned by the engine's thread.
    """

    def __init__(self, ask: Callable[[], None], clock: Callable[[], float]) -> None:
        """Begin to watch a connection on which the sidecar has just answered. *ask* is called to ping the sidecar."""
        self._ask = ask
        self._clock = clock
        self._looked_at = clock()
        self._silent_s = 0.0
        self._is_asked = False

    @property
    def is_lost(self) -> bool:
        """True if the sidecar has been silent for more than `LOST_AFTER_S`."""
        return self._silent_s > LOST_AFTER_S

    def on_answers(self) -> None:
        """Record that the sidecar has sent something."""
        self._silent_s = 0.0
        self._is_asked = False

    def look(self, is_waited_for: bool) -> bool:
        """Update the duration of the silence, and ping a silent sidecar. Return True if `is_lost` has just become True.

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

    When the sidecar is gone, its shared memory stays mapped until all leases on it are released, because copies may be
    in flight. Only then does the engine attach to the restarted sidecar. A silent sidecar is not used until it sends
    something.
    """

    def __init__(
        self,
        attachment: Attachment[Any],
        memories: Sequence[AttachableMemory[Any]],
        clock: Callable[[], float],
    ) -> None:
        """Take ownership of *attachment*. *memories*, one for each group, are the same as in *attachment*."""
        self.session: Session | None = None
        self.boot: bytes | None = None  # id of the sidecar process whose slots are mapped
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
        """True if a sidecar is attached and answers."""
        return self.session is not None and not self.silence.is_lost

    def standing(self) -> SidecarStanding:
        """Return the state of the connection."""
        attached_s = self._clock() - self._attached_at if self.is_attached else 0.0
        return SidecarStanding(self._attachment.path, self.is_attached, self._num_attached, attached_s)

    def send(self, message: FromEngine) -> None:
        """Send a message. Do nothing if there is no session."""
        if self.session is not None:
            self.session.send(message)

    def send_hint(self, message: FromEngine) -> None:
        """Send a message that is dropped if the sidecar is slow to read."""
        if self.session is not None:
            self.session.send_hint(message)

    def attach(self, is_released: bool) -> Welcome | None:
        """Start to use a new session if one is ready, and return its `Welcome` message; otherwise return None.

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
        """Call *on_message* for the received messages, and stop at the time *until*.

        At least one message is processed. The remaining messages stay queued.

        Returns:
            False if the session has ended and all its messages are processed. The caller must then call `end`.
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
        except Malformed as error:  # a correct sidecar of this version sends no invalid messages
            log.warning("sidecar: %s sent an invalid message (%s); disconnecting", self._attachment.path, error)
            session.disconnect()
            num_taken = len(self._come)  # discard the remaining messages
        del self._come[:num_taken]
        return session.is_open or bool(self._come)

    def end(self) -> None:
        """Stop using the session. Its slots stay mapped until their leases are released."""
        assert self.session is not None, "there is no session to end"
        self.session.disconnect()
        self.session, self._ended = None, self.session

    def check(self) -> None:
        """Raise AssertionError if two sessions are in use."""
        assert self.session is None or self._ended is None, "attached before the previous sidecar was released"

    def close(self) -> None:
        """End the session, so that leased and reserved slots return to the sidecar.

        Call this only when no copy is in flight.
        """
        for session in self._sessions():
            session.close()
        self._attachment.close()

    def close_while_copying(self) -> None:
        """Stop using the sidecar. Call this instead of `close` if a copy hangs.

        Leased slots return to the sidecar when this process ends, because until then the copy may continue.
        """
        for session in self._sessions():
            session.leave_open()
        self._attachment.close()

    def _sessions(self) -> list[Session]:
        return [session for session in (self.session, self._ended) if session is not None]
