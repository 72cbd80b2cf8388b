"""`WorkerSide`: the part of the connector that runs in each vLLM worker and copies pages as the scheduler decides."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.connectors.vllm_connector.engine_layout import GroupLayout
from kvtier.connectors.vllm_connector.mapped_segment import MappedSegment
from kvtier.connectors.vllm_connector.pages import Pages, group_pages
from kvtier.connectors.vllm_connector.step_work import StepWork, WorkerReport


class WorkerSide:
    """A copier of pages between one worker's KV cache and the sidecar's shared memory.

    Before vLLM computes a step, the worker first stores the blocks of the previous step, then loads the blocks that
    this step needs. Only the worker's thread calls the methods.
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
        """Set vLLM's KV caches. Raise `UnsupportedEngine` if their layout does not allow copying whole blocks."""
        self._pages = [group_pages(layout, kv_caches, num_pages, self._rank) for layout in self._layouts]

    def begin(self, work: StepWork) -> None:
        """Begin a step: start to map the sidecar's shared memory if the scheduler asks for it."""
        self._unloaded_in_step.clear()
        if work.wanted is not None:
            self._segment.want(work.wanted)

    def load(self, work: StepWork) -> None:
        """Copy the blocks that the step needs from the sidecar's memory into vLLM's pages."""
        missing = self._unloaded_in_step
        missing.update(work.unloadable_pages, *(copies.pages for copies in work.loads))
        try:
            for copies in work.loads:
                self._pages[copies.group_id].load(copies.pages, copies.slots, self._segment.slots(copies.group_id))
                missing.difference_update(copies.pages)
        finally:
            self._unloaded |= missing

    def store(self, work: StepWork) -> None:
        """Copy the previous step's blocks into the sidecar's memory.

        Call this before `begin`, and before vLLM changes a page.
        """
        for copies in work.stores:
            self._pages[copies.group_id].store(copies.pages, copies.slots, self._segment.slots(copies.group_id))
        self._stored_step = work.number

    def pop_failed_pages(self) -> set[int]:
        """Return the pages that could not be loaded since the last call."""
        taken, self._unloaded = self._unloaded, set()
        return taken

    def report(self, work: StepWork) -> WorkerReport | None:
        """Return the outcome of the step's copies for the scheduler, or None if the step needs no report."""
        if not work.is_reported:
            return None
        if work.wanted is not None:
            self._segment.want(work.wanted)  # switches to the segment if it has been mapped in the meantime
        has_stored = not work.stores or self._stored_step == work.number
        return WorkerReport(work.number, self._segment.boot, has_stored, frozenset(self._unloaded_in_step))

    def close(self) -> None:
        """Unmap the sidecar's memory."""
        self._segment.close()
