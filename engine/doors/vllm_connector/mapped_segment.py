"""MappedSegment: a worker's mapping of a sidecar's memory."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvtier.engine.attached.session import AttachRefused, Session, open_session
from kvtier.engine.attached.wire import Hello
from kvtier.engine.doors.vllm_connector.pages import Slots
from kvtier.engine.doors.vllm_connector.step_work import Segment
from kvtier.transfer.host_slab import HostSlab

log = logging.getLogger(__name__)

PAUSE_S = 0.25  # between two tries to map the same segment


class MappedSegment:
    """The slots of each group in the segment that is wanted. A worker attaches at the sidecar's socket for the
    segment's descriptor alone, on a thread, and ends that session at once: it leases nothing, and the mapping outlives
    the sidecar. Owned by the worker's thread."""

    def __init__(
        self,
        block_bytes: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
        attach: Callable[[str, Hello], Session] = open_session,
    ) -> None:
        """*block_bytes* by group."""
        self.boot: bytes | None = None  # of the segment that is mapped
        self._block_bytes = block_bytes
        self._clock = clock
        self._attach = attach
        self._slabs: list[HostSlab] = []
        self._thread: threading.Thread | None = None
        self._come: tuple[bytes, list[HostSlab]] | None = None  # what the thread has mapped
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
        return self._slabs[group_id].blocks

    def close(self) -> None:
        """Give the mapping up."""
        if self._thread is not None:
            self._thread.join()
        self._take()
        self._give_up(self._slabs)
        self._slabs, self.boot = [], None

    def _take(self) -> None:
        """Use what the thread has mapped, once it has ended. No slot of the segment before is copied any more: the
        scheduler's half attaches to another sidecar only then."""
        if self._thread is None or self._thread.is_alive():
            return
        self._thread.join()
        self._thread = None
        if self._come is not None:
            before = self._slabs
            (self.boot, self._slabs), self._come = self._come, None
            self._give_up(before)

    def _map(self, segment: Segment) -> None:
        try:
            with ExitStack() as undo:
                session = self._attach(segment.path, segment.hello)
                undo.callback(session.close)
                if session.welcome.boot != segment.boot:
                    return  # it was restarted: the scheduler's half will say so
                slabs: list[HostSlab] = []
                with ExitStack() as mapped:
                    for block_bytes in self._block_bytes:
                        num_slots = session.welcome.num_bytes // block_bytes
                        slabs.append(HostSlab(num_slots, block_bytes, file=session.file))
                        mapped.callback(slabs[-1].close)
                    mapped.pop_all()
                self._come = segment.boot, slabs
        except (OSError, AttachRefused) as error:
            log.warning("kvtier: the sidecar's memory at %s cannot be mapped (%s); tried again", segment.path, error)
        except Exception:  # a thread's top
            log.exception("kvtier: the sidecar's memory at %s cannot be mapped", segment.path)

    def _give_up(self, slabs: Sequence[HostSlab]) -> None:
        for slab in slabs:
            slab.close()
