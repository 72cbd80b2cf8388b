"""`MappedSegment`: a worker's mapping of a sidecar's memory."""

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

PAUSE_S = 0.25  # between two attempts to map a segment
LOOK_S = 1.0  # max wait of `wait_ended`, after which the thread checks whether the mapping is closing


def wait_ended(session: Session) -> bool:
    """Wait until a worker's session with the sidecar has ended, for `LOOK_S` at most. Return whether it has."""
    session.wait_readable(LOOK_S)
    session.receive()
    return not session.is_open


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A mapped segment, with the slots of each group."""

    session: Session
    slabs: Sequence[HostSlab]

    @property
    def boot(self) -> bytes:
        """Boot id of the sidecar process that owns the segment."""
        return self.session.welcome.boot

    def close(self) -> None:
        """Unmap the segment, then end the session, which tells the sidecar that the worker has stopped copying."""
        for slab in self.slabs:
            slab.close()
        self.session.close()


class MappedSegment:
    """A worker's mapping of the memory segment of a sidecar process, which contains the host slots of each group.

    A thread connects to the sidecar's socket to get the segment's file descriptor, and maps the segment. While the
    segment is mapped, the connection stays open, which tells the sidecar that the worker may still copy. The mapping
    stays valid even if the sidecar ends.

    After the sidecar has ended, the thread waits for a new sidecar process, and maps its segment. The worker switches
    to the new segment only when the scheduler's half of the connector asks for it, see `want`. Only the worker's thread
    may call the methods.
    """

    def __init__(
        self,
        block_bytes: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
        attach: Callable[[str, Map], Session] = open_session,
        wait_ended: Callable[[Session], bool] | None = wait_ended,
    ) -> None:
        """Create an object that maps nothing yet.

        *block_bytes* has the size of a block of each group. *wait_ended* waits for a limited time until a session has
        ended, and returns whether it has. When it has, the segment of the next sidecar process is mapped in advance. If
        *wait_ended* is None, segments are mapped only when they are passed to `want`.
        """
        self._block_bytes = block_bytes
        self._clock = clock
        self._attach = attach
        self._wait_ended = wait_ended
        self._mapped: _Mapped | None = None
        self._thread: threading.Thread | None = None
        self._is_mapping = threading.Event()
        self._is_closing = threading.Event()
        self._lock = threading.Lock()
        self._come: _Mapped | None = None  # segment that the thread has mapped, under the lock
        self._tried_at = float("-inf")

    @property
    def boot(self) -> bytes | None:
        """Boot id of the sidecar process whose segment is in use, or None if no segment is in use."""
        return None if self._mapped is None else self._mapped.boot

    @property
    def is_mapping(self) -> bool:
        """True if a segment that was passed to `want` is being mapped."""
        return self._is_mapping.is_set()

    def is_ready(self, boot: bytes) -> bool:
        """Return whether the segment of the sidecar process with this boot id is mapped, even if it is not in use."""
        with self._lock:
            return self.boot == boot or (self._come is not None and self._come.boot == boot)

    def want(self, segment: Segment) -> None:
        """Switch to *segment* if it is mapped. Otherwise start to map it, unless a mapping is in progress.

        Returns at once. The caller must not copy slots of the previous segment any more.
        """
        self._take(segment.boot)
        if self.boot == segment.boot or self._is_running() or self._clock() - self._tried_at < PAUSE_S:
            return
        self._tried_at = self._clock()
        self._is_mapping.set()
        self._thread = threading.Thread(target=self._run, args=(segment,), name="kvtier-map", daemon=True)
        self._thread.start()

    def slots(self, group_id: int) -> Slots:
        """Return the slots of a group. Raise IndexError while nothing is mapped."""
        slabs = () if self._mapped is None else self._mapped.slabs
        return slabs[group_id].blocks

    def close(self) -> None:
        """Stop mapping segments, and unmap the one in use and the next one, if it is already mapped."""
        self._is_closing.set()
        self._give_up()  # also ends the thread's wait
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
        # Unmapping the previous segment is safe, because the connector's scheduler half asks for another segment only
        # after all copies to and from the previous one have ended.
        with self._lock:
            if self._come is None or self._come.boot != boot:
                return
            before, self._mapped, self._come = self._mapped, self._come, None
        if before is not None:
            before.close()

    def _run(self, segment: Segment) -> None:
        """Map the segment, then the segment of each later sidecar process."""
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
        """Map the segment. Return the session with its sidecar, or None on failure.

        With *is_any*, map the segment of whichever sidecar process is running.
        """
        try:
            with ExitStack() as undo:
                hello = segment.hello
                session = self._attach(segment.path, Map(hello.version, hello.program, hello.engine))
                undo.callback(session.close)
                if session.welcome.boot != segment.boot and not is_any:
                    return None  # the sidecar has restarted, and the scheduler's half will want its new segment
                slabs: list[HostSlab] = []
                for block_bytes in self._block_bytes:
                    num_slots = session.welcome.num_bytes // block_bytes
                    slabs.append(HostSlab(num_slots, block_bytes, file=session.file))
                    undo.callback(slabs[-1].close)
                session.close_file()
                undo.pop_all()
        except (OSError, AttachRefused) as error:
            if not is_any:  # with `is_any`, failures are normal until the next sidecar is running
                log.warning(
                    "kvtier: cannot map the sidecar's memory at %s (%s); the worker retries, and nothing is loaded or "
                    "stored until it succeeds",
                    segment.path,
                    error,
                )
            return None
        except Exception:  # a thread's top
            log.exception("kvtier: cannot map the sidecar's memory at %s", segment.path)
            return None
        with self._lock:
            unused, self._come = self._come, _Mapped(session, slabs)
        if unused is not None:
            unused.close()
        return session
