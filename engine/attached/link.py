"""The connection of an engine to its sidecar, over the sidecars that come and go."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.engine.attached.attachment import AttachableMemory, Attachment
from kvtier.engine.attached.session import Session
from kvtier.engine.attached.wire import FromEngine, FromSidecar, Malformed, Ping, Welcome

ASK_AFTER_S = 0.25  # ask a sidecar that owes an answer whether it lives after this much silence
LOST_AFTER_S = 1.0  # do not use it after this much silence, until it sends something
MAX_STEP_S = 0.1  # longest time between two checks that counts: a busy or stopped engine has not listened
MAX_COME = 1024  # limit on received but unprocessed messages; beyond it, the connection is not read
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SidecarStanding:
    """State of the connection to a sidecar at one moment."""

    path: str  # of its socket
    is_attached: bool  # whether the sidecar is attached and answers
    num_attached: int  # how often the engine has attached
    attached_s: float  # seconds since it attached last; 0 while it is not attached


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

    def look(self, is_waited_for: bool) -> bool:
        """Account for the time since the last call, and return whether the sidecar has just been lost.

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
    """The session with the present sidecar, if any. Owned by the engine's thread.

    The memory of a sidecar that is gone stays mapped until all leases on it are released, because copies may be in
    flight. Then the engine attaches to the next sidecar. A silent sidecar is not used until it sends something.
    """

    def __init__(
        self,
        attachment: Attachment[Any],
        memories: Sequence[AttachableMemory[Any]],
        clock: Callable[[], float],
    ) -> None:
        """Take ownership of *attachment*, which attaches the same *memories*."""
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
        """Attach to a sidecar that is ready, and return its welcome; None if there is no new one.

        *is_released* says whether all slots of the previous sidecar are released.
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
        """Process the sidecar's messages until the time *until*, at least one; the rest stays queued.

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
        """End the session when no copy is in flight; leased and reserved slots return to the sidecar."""
        for session in self._sessions():
            session.close()
        self._attachment.close()

    def close_while_copying(self) -> None:
        """End everything but the copies; leased and reserved slots return to the sidecar when this process ends."""
        for session in self._sessions():
            session.leave_open()
        self._attachment.close()

    def _sessions(self) -> list[Session]:
        return [session for session in (self.session, self._ended) if session is not None]
