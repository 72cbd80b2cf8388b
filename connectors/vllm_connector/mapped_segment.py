"""MappedSegment: a worker's mapping of a sidecar's memory."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kvtier.connectors.vllm_connector.pages import Slots
from kvtier.connectors.vllm_connector.step_work import Segment
from kvtier.engine.attached.session import AttachRefused, Session, open_session
from kvtier.engine.attached.wire import Map
from kvtier.transfer.host_slab import HostSlab

log = logging.getLogger(__name__)

PAUSE_S = 0.25  # between two tries to map a segment
LOOK_S = 1.0  # between two looks whether a mapping that is waited at is given up


def wait_ended(session: Session) -> bool:
    """Wait until the session of a worker has ended, to which nothing is said, for `LOOK_S` at most; whether it has."""
    session.wait_readable(LOOK_S)
    session.receive()
    return not session.is_open


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A segment that is mapped: the slots of each group."""

    session: Session
    slabs: Sequence[HostSlab]

    @property
    def boot(self) -> bytes:
        """Which process of a sidecar it is of."""
        return self.session.welcome.boot

    def close(self) -> None:
        """Give the mapping up, and say so to the sidecar by ending the session."""
        for slab in self.slabs:
            slab.close()
        self.session.close()


class MappedSegment:
    """The slots of each group in the segment that is wanted. A worker attaches at the sidecar's socket for the
    segment's descriptor, on a thread, and keeps that connection for as long as it maps the segment: the sidecar knows
    by it whether the worker may still copy. The mapping outlives the sidecar.

    The thread goes on to wait for the sidecar's end, and maps the memory of the next one as soon as that is there. So
    it is ready when the scheduler's half, which attaches by itself too, wants it in a step. Owned by the worker's
    thread."""

    def __init__(
        self,
        block_bytes: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
        attach: Callable[[str, Map], Session] = open_session,
        wait_ended: Callable[[Session], bool] | None = wait_ended,
    ) -> None:
        """*block_bytes* by group. *wait_ended* waits until a session has ended, or for a while, and says whether it
        has; None: nothing is mapped that no step wants."""
        self._block_bytes = block_bytes
        self._clock = clock
        self._attach = attach
        self._wait_ended = wait_ended
        self._mapped: _Mapped | None = None
        self._thread: threading.Thread | None = None
        self._is_mapping = threading.Event()
        self._is_closing = threading.Event()
        self._lock = threading.Lock()
        self._come: _Mapped | None = None  # what the thread has mapped, under the lock
        self._tried_at = float("-inf")

    @property
    def boot(self) -> bytes | None:
        """The sidecar's process whose segment is mapped and used; None while none is."""
        return None if self._mapped is None else self._mapped.boot

    @property
    def is_mapping(self) -> bool:
        """Whether a segment that is wanted is being mapped."""
        return self._is_mapping.is_set()

    def is_ready(self, boot: bytes) -> bool:
        """Return whether the segment of that process of a sidecar is mapped, used or not."""
        with self._lock:
            return self.boot == boot or (self._come is not None and self._come.boot == boot)

    def want(self, segment: Segment) -> None:
        """Use this segment in place of another if it is mapped; else begin to map it, unless that is under way. Returns
        at once. No slot of the segment before is copied any more."""
        self._take(segment.boot)
        if self.boot == segment.boot or self._is_running() or self._clock() - self._tried_at < PAUSE_S:
            return
        self._tried_at = self._clock()
        self._is_mapping.set()
        self._thread = threading.Thread(target=self._run, args=(segment,), name="kvtier-map", daemon=True)
        self._thread.start()

    def slots(self, group_id: int) -> Slots:
        """The slots of a group. IndexError while nothing is mapped."""
        slabs = () if self._mapped is None else self._mapped.slabs
        return slabs[group_id].blocks

    def close(self) -> None:
        """Give the mappings up."""
        self._is_closing.set()
        self._give_up()  # which ends the thread's wait, too
        if self._thread is not None:
            self._thread.join()
        self._give_up()

    def _give_up(self) -> None:
        with self._lock:
            given_up, self._mapped, self._come = (self._mapped, self._come), None, None
        for mapped in given_up:
            if mapped is not None:
                mapped.close()

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _take(self, boot: bytes) -> None:
        """Use what the thread has mapped, if it is of that process. The scheduler's half wants the memory of another
        sidecar only once all that it leased of the one before has been copied."""
        with self._lock:
            if self._come is None or self._come.boot != boot:
                return
            before, self._mapped, self._come = self._mapped, self._come, None
        if before is not None:
            before.close()

    def _run(self, segment: Segment) -> None:
        """Map the segment, then that of each sidecar that comes after it."""
        try:
            session = self._map(segment)
        finally:
            self._is_mapping.clear()
        wait = self._wait_ended
        while session is not None and wait is not None and not self._is_closing.is_set():
            if not wait(session):
                continue
            session = None
            while session is None and not self._is_closing.wait(PAUSE_S):
                session = self._map(segment, is_any=True)

    def _map(self, segment: Segment, *, is_any: bool = False) -> Session | None:
        """Map the segment, or with *is_any* that of whichever sidecar is there; its session, None if that failed."""
        try:
            with ExitStack() as undo:
                hello = segment.hello
                session = self._attach(segment.path, Map(hello.version, hello.program, hello.engine))
                undo.callback(session.close)
                if session.welcome.boot != segment.boot and not is_any:
                    return None  # it was restarted: the scheduler's half will say so
                slabs: list[HostSlab] = []
                for block_bytes in self._block_bytes:
                    num_slots = session.welcome.num_bytes // block_bytes
                    slabs.append(HostSlab(num_slots, block_bytes, file=session.file))
                    undo.callback(slabs[-1].close)
                session.close_file()
                undo.pop_all()
        except (OSError, AttachRefused) as error:
            if not is_any:  # else the next sidecar is not there yet
                log.warning(
                    "kvtier: the sidecar's memory at %s cannot be mapped (%s); until it can be, nothing is loaded or "
                    "stored, and the worker keeps trying",
                    segment.path,
                    error,
                )
            return None
        except Exception:  # a thread's top
            log.exception("kvtier: the sidecar's memory at %s cannot be mapped", segment.path)
            return None
        with self._lock:
            unused, self._come = self._come, _Mapped(session, slabs)
        if unused is not None:
            unused.close()
        return session
