"""`WorkerSide`: the connector's half in each of vLLM's workers, which copies pages and decides nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.connectors.vllm_connector.engine_layout import GroupLayout
from kvtier.connectors.vllm_connector.mapped_segment import MappedSegment
from kvtier.connectors.vllm_connector.pages import Pages, group_pages
from kvtier.connectors.vllm_connector.step_work import StepWork, WorkerReport


class WorkerSide:
    """The copies of one worker's pages to and from the sidecar's memory.

    Before vLLM computes a step, the worker first stores the blocks of the previous step, then loads the blocks that
    this step needs. Owned by the worker's thread.
    """

    def __init__(self, layouts: Sequence[GroupLayout], rank: int, segment: MappedSegment) -> None:
        self._layouts = layouts
        self._rank = rank
        self._segment = segment
        self._pages: list[Pages] = []
        self._unloaded: set[int] = set()  # pages not yet returned by `pop_failed_pages`
        self._unloaded_in_step: set[int] = set()
        self._stored_step: int | None = None  # the last step whose stores have all been copied

    def register(self, kv_caches: Mapping[str, Any], num_pages: int) -> None:
        """Use *kv_caches* from now on. Raise `UnsupportedEngine` if their layout cannot be copied as whole blocks."""
        self._pages = [group_pages(layout, kv_caches, num_pages, self._rank) for layout in self._layouts]

    def begin(self, work: StepWork) -> None:
        """Begin a step: start to map the segment that the scheduler's half wants, if any."""
        self._unloaded_in_step.clear()
        if work.wanted is not None:
            self._segment.want(work.wanted)

    def load(self, work: StepWork) -> None:
        """Copy the blocks that the step's requests need into their pages."""
        missing = self._unloaded_in_step
        missing.update(work.unloadable_pages, *(copies.pages for copies in work.loads))
        try:
            for copies in work.loads:
                self._pages[copies.group_id].load(copies.pages, copies.slots, self._segment.slots(copies.group_id))
                missing.difference_update(copies.pages)
        finally:
            self._unloaded |= missing

    def store(self, work: StepWork) -> None:
        """Copy the previous step's blocks into their slots. Call before `begin`, and before any page is written."""
        for copies in work.stores:
            self._pages[copies.group_id].store(copies.pages, copies.slots, self._segment.slots(copies.group_id))
        self._stored_step = work.number

    def pop_failed_pages(self) -> set[int]:
        """Return the pages whose load failed since the last call. Without an unexpected error there are none."""
        taken, self._unloaded = self._unloaded, set()
        return taken

    def report(self, work: StepWork) -> WorkerReport | None:
        """Return the outcome of the step's work, or None if the step needs no report."""
        if not work.is_reported:
            return None
        if work.wanted is not None:
            self._segment.want(work.wanted)  # switches to the segment if it has been mapped in the meantime
        has_stored = not work.stores or self._stored_step == work.number
        return WorkerReport(work.number, self._segment.boot, has_stored, frozenset(self._unloaded_in_step))

    def close(self) -> None:
        """Unmap the sidecar's memory."""
        self._segment.close()
