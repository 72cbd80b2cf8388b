"""MappedSegment: a worker's mapping of a sidecar's memory."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kvtier.engine.attached.session import AttachRefused, Session, open_session
from kvtier.engine.attached.wire import Map
from kvtier.engine.doors.vllm_connector.pages import Slots
from kvtier.engine.doors.vllm_connector.step_work import Segment
from kvtier.transfer.host_slab import HostSlab

log = logging.getLogger(__name__)

PAUSE_S = 0.25  # between two tries to map the same segment


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A segment that is mapped: the slots of each group."""

    session: Session
    slabs: Sequence[HostSlab]

    def close(self) -> None:
        """Give the mapping up, and say so to the sidecar by ending the session."""
        for slab in self.slabs:
            slab.close()
        self.session.close()


class MappedSegment:
    """The slots of each group in the segment that is wanted. A worker attaches at the sidecar's socket for the
    segment's descriptor, on a thread, and keeps that connection for as long as it maps the segment: the sidecar knows
    by it whether the worker may still copy. The mapping outlives the sidecar. Owned by the worker's thread."""

    def __init__(
        self,
        block_bytes: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
        attach: Callable[[str, Map], Session] = open_session,
    ) -> None:
        """*block_bytes* by group."""
        self.boot: bytes | None = None  # of the segment that is mapped
        self._block_bytes = block_bytes
        self._clock = clock
        self._attach = attach
        self._mapped: _Mapped | None = None
        self._thread: threading.Thread | None = None
        self._come: _Mapped | None = None  # what the thread has mapped
        self._tried_at = float("-inf")

    @property
    def is_mapping(self) -> bool:
        """Whether a segment is being mapped."""
        return self._thread is not None and self._thread.is_alive()

    def want(self, segment: Segment) -> None:
        """Begin to map this segment in place of another, unless that is under way; returns at once."""
        self._take()
        if self.boot == segment.boot or self._thread is not None or self._clock() - self._tried_at < PAUSE_S:
            return
        self._tried_at = self._clock()
        self._thread = threading.Thread(target=self._map, args=(segment,), name="kvtier-map", daemon=True)
        self._thread.start()

    def slots(self, group_id: int) -> Slots:
        """The slots of a group. IndexError while nothing is mapped."""
        slabs = () if self._mapped is None else self._mapped.slabs
        return slabs[group_id].blocks

    def close(self) -> None:
        """Give the mapping up."""
        if self._thread is not None:
            self._thread.join()
        self._take()
        if self._mapped is not None:
            self._mapped.close()
        self._mapped, self.boot = None, None

    def _take(self) -> None:
        """Use what the thread has mapped, once it has ended. No slot of the segment before is copied any more: the
        scheduler's half attaches to another sidecar only then."""
        if self._thread is None or self._thread.is_alive():
            return
        self._thread.join()
        self._thread = None
        if self._come is not None:
            before, self._mapped, self._come = self._mapped, self._come, None
            self.boot = self._mapped.session.welcome.boot
            if before is not None:
                before.close()

    def _map(self, segment: Segment) -> None:
        try:
            with ExitStack() as undo:
                hello = segment.hello
                session = self._attach(segment.path, Map(hello.version, hello.program, hello.engine))
                undo.callback(session.close)
                if session.welcome.boot != segment.boot:
                    return  # it was restarted: the scheduler's half will say so
                slabs: list[HostSlab] = []
                for block_bytes in self._block_bytes:
                    num_slots = session.welcome.num_bytes // block_bytes
                    slabs.append(HostSlab(num_slots, block_bytes, file=session.file))
                    undo.callback(slabs[-1].close)
                session.close_file()
                self._come = _Mapped(session, slabs)
                undo.pop_all()
        except (OSError, AttachRefused) as error:
            log.warning("kvtier: the sidecar's memory at %s cannot be mapped (%s); tried again", segment.path, error)
        except Exception:  # a thread's top
            log.exception("kvtier: the sidecar's memory at %s cannot be mapped", segment.path)
