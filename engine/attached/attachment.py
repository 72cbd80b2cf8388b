"""Attachment: keeps an engine attached to its sidecar, and attaches it anew when the sidecar has gone."""

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

FIRST_PAUSE_S = 0.05  # between two tries; each one is twice as long …
LONGEST_PAUSE_S = 1.0  # … up to this: a sidecar that comes back is used soon
REFUSED_PAUSE_S = 10.0  # one that refuses will not do otherwise before someone has done something


class PreparedSlots(Protocol):
    """Host slots that are mapped, and not used yet."""

    def close(self) -> None:
        """Give them up."""


Prepared = TypeVar("Prepared", bound=PreparedSlots)


class AttachableMemory(Protocol[Prepared]):
    """One group's memory, whose host slots are in the sidecar's segment, see `AttachedMemory`."""

    block_bytes: int

    def prepare(self, file: int, num_bytes: int) -> Prepared:
        """Map the segment in that file; called by any thread. OSError if that cannot be."""

    def attach(self, prepared: Prepared) -> None:
        """Have host slots, those that were prepared."""

    def detach(self) -> None:
        """Have no host slots any more. None may be leased."""


@dataclass(frozen=True, slots=True)
class Attached(Generic[Prepared]):
    """A session that has begun, and the host slots of each group in its segment."""

    session: Session
    hosts: Sequence[Prepared]

    def close(self) -> None:
        """End the session, and give the slots up. For what is not used."""
        self.session.close()
        for host in self.hosts:
            host.close()


class Attachment(Generic[Prepared]):
    """Attaches on a thread of its own, as mapping and pinning a segment take seconds, and hands over what it has.

    The owner takes it with `take`, uses it, closes the session when it has ended, and calls `attach_again`.
    """

    def __init__(self, path: str, hello: Hello, memories: Sequence[AttachableMemory[Prepared]]) -> None:
        """*path* is the sidecar's Unix socket; *memories* by group."""
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
        """Why the sidecar does not take this engine, empty if it has not said so."""
        return self._why_refused

    def wait_tried(self, timeout_s: float) -> bool:
        """Wait until the first try has succeeded or failed, *timeout_s* at most; whether it has."""
        return self._has_tried.wait(timeout_s)

    def take(self) -> Attached[Prepared] | None:
        """What is ready: handed over once. None: not yet."""
        try:
            return self._ready.get_nowait()
        except Empty:
            return None

    def attach_again(self) -> None:
        """Begin to attach anew."""
        self._is_wanted.set()

    def close(self) -> None:
        """End the thread. What was not taken is closed."""
        self._is_closing.set()
        self._is_wanted.set()
        self._thread.join(timeout=2 * LONGEST_PAUSE_S)  # it may wait for a sidecar that hangs: a daemon thread
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
        """Attach once; whether that was done."""
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
            if str(error) != self._why_refused and self._has_tried.is_set():  # else who waits for the first try tells
                log.warning("sidecar: %s; serving without it", error)
            self._why_refused = str(error)
            return False
        except OSError as error:
            if not self._has_tried.is_set():
                log.warning("sidecar: nobody answers at %s (%s); serving without it until then", self.path, error)
            return False
        except Exception:  # a thread's top: a device's driver may refuse the memory
            log.exception("sidecar: its memory at %s cannot be used; serving without it", self.path)
            return False
        self._why_refused = ""
        return True
