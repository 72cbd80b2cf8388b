"""Attachment: a thread that connects an engine to its sidecar, and reconnects when the sidecar has restarted."""

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from kvtier.engine.attached.session import AttachRefused, Session, open_session
from kvtier.engine.attached.wire import Hello

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05  # between two attempts; doubles each time …
LONGEST_PAUSE_S = 1.0  # … up to this, so that a restarted sidecar is used soon
REFUSED_PAUSE_S = 10.0  # after a refusal, which lasts until an operator intervenes


class PreparedSlots(Protocol):
    """Host slots in a sidecar's shared memory that are mapped but not used yet."""

    def close(self) -> None:
        """Unmap the slots."""


Prepared = TypeVar("Prepared", bound=PreparedSlots)


class AttachableMemory(Protocol[Prepared]):
    """The KV memory of one attention group, with host slots in a sidecar's shared memory; see `AttachedMemory`."""

    block_bytes: int

    def prepare(self, file: int, num_bytes: int) -> Prepared:
        """Map *num_bytes* bytes of shared memory, whose file descriptor is *file*. Any thread may call this.

        Raises:
            OSError: If the memory cannot be mapped.
        """

    def attach(self, prepared: Prepared) -> None:
        """Start to use the prepared host slots."""

    def detach(self) -> None:
        """Stop using the host slots. None of them may be leased."""


@dataclass(frozen=True, slots=True)
class Attached(Generic[Prepared]):
    """A new session (connection to the sidecar), and the mapped host slots of each attention group."""

    session: Session
    hosts: Sequence[Prepared]

    def close(self) -> None:
        """End the session and unmap its slots. Call this only if the session was never used."""
        self.session.close()
        for host in self.hosts:
            host.close()


class Attachment(Generic[Prepared]):
    """A thread that connects to the sidecar and maps and pins its shared memory, which takes seconds.

    The owner gets the new session with `take`. When the session has ended, the owner closes it and calls
    `attach_again`.
    """

    def __init__(self, path: str, hello: Hello, memories: Sequence[AttachableMemory[Prepared]]) -> None:
        """Start to attach to the sidecar.

        *path* is the sidecar's Unix socket. *hello* describes this engine to the sidecar. *memories* has one memory for
        each attention group.
        """
        self.path = path
        self._hello = hello
        self._memories = memories
        self._ready: SimpleQueue[Attached[Prepared]] = SimpleQueue()
        self._is_wanted = threading.Event()
        self._is_closing = threading.Event()
        self._has_tried = threading.Event()
        self._why_refused = ""
        self._is_wanted.set()
        self._thread = threading.Thread(target=self._attach, name="kvtier-attachment", daemon=True)
        self._thread.start()

    @property
    def why_refused(self) -> str:
        """Why the sidecar refuses this engine; empty if it has not refused."""
        return self._why_refused

    def wait_tried(self, timeout_s: float) -> bool:
        """Wait until the first attempt to attach to the sidecar has ended. Return False after *timeout_s* seconds."""
        return self._has_tried.wait(timeout_s)

    def take(self) -> Attached[Prepared] | None:
        """Return the new session if one is ready, otherwise None. Each session is returned once."""
        try:
            return self._ready.get_nowait()
        except Empty:
            return None

    def attach_again(self) -> None:
        """Start to attach again, after the previous session has ended."""
        self._is_wanted.set()

    def close(self) -> None:
        """End the thread, and close a new session if there is one that `take` has not returned."""
        self._is_closing.set()
        self._is_wanted.set()
        self._thread.join(timeout=2 * LONGEST_PAUSE_S)  # may time out if the sidecar hangs; the thread is a daemon
        while (attached := self.take()) is not None:
            attached.close()

    def _attach(self) -> None:
        while not self._is_closing.is_set():
            self._is_wanted.wait()
            self._is_wanted.clear()
            pause_s = FIRST_PAUSE_S
            while not self._is_closing.is_set() and not self._try():
                self._has_tried.set()
                self._is_closing.wait(REFUSED_PAUSE_S if self._why_refused else pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            self._has_tried.set()

    def _try(self) -> bool:
        try:
            with ExitStack() as undo:
                session = open_session(self.path, self._hello)
                undo.callback(session.close)
                hosts: list[Prepared] = []
                for memory in self._memories:
                    hosts.append(memory.prepare(session.file, session.welcome.num_bytes))
                    undo.callback(hosts[-1].close)
                self._ready.put(Attached(session, hosts))
                undo.pop_all()
        except AttachRefused as error:
            # A refusal of the first attempt is not logged, because the caller that waits for the attempt reports it.
            if str(error) != self._why_refused and self._has_tried.is_set():
                log.warning("sidecar: it refuses this engine (%s); serving without it", error)
            self._why_refused = str(error)
            return False
        except OSError as error:
            if not self._has_tried.is_set():
                log.warning("sidecar: no answer at %s (%s); serving without it until it answers", self.path, error)
            return False
        except Exception:  # must not end the thread: a device's driver may refuse the memory
            log.exception("sidecar: the shared memory of %s cannot be used; serving without it", self.path)
            return False
        self._why_refused = ""
        return True
