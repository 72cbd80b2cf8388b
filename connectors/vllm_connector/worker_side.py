"""WorkerSide: the connector's half in each of vLLM's workers. It copies, and decides nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.connectors.vllm_connector.engine_layout import GroupLayout
from kvtier.connectors.vllm_connector.mapped_segment import MappedSegment
from kvtier.connectors.vllm_connector.pages import Pages, group_pages
from kvtier.connectors.vllm_connector.step_work import StepWork, WorkerReport


class WorkerSide:
    """Copies pages from and to the sidecar's memory before vLLM computes a step: first what the step before computed,
    then what this one goes on from. Owned by the worker's thread."""

    def __init__(self, layouts: Sequence[GroupLayout], rank: int, segment: MappedSegment) -> None:
        self._layouts = layouts
        self._rank = rank
        self._segment = segment
        self._pages: list[Pages] = []
        self._unloaded: set[int] = set()  # not taken yet
        self._unloaded_in_step: set[int] = set()
        self._stored_step: int | None = None  # the last one all of whose stores are copied

    def register(self, kv_caches: Mapping[str, Any], num_pages: int) -> None:
        """Use these tensors from now on. `NotServed` for a layout that cannot be copied as whole blocks."""
        self._pages = [group_pages(layout, kv_caches, num_pages, self._rank) for layout in self._layouts]

    def begin(self, work: StepWork) -> None:
        """Take the step's work up."""
        self._unloaded_in_step.clear()
        if work.wanted is not None:
            self._segment.want(work.wanted)

    def load(self, work: StepWork) -> None:
        """Copy what the step's requests go on from into their pages."""
        missing = self._unloaded_in_step
        missing.update(work.unloadable, *(copies.pages for copies in work.loads))
        try:
            for copies in work.loads:
                self._pages[copies.group_id].load(copies.pages, copies.slots, self._segment.slots(copies.group_id))
                missing.difference_update(copies.pages)
        finally:
            self._unloaded |= missing

    def store(self, work: StepWork) -> None:
        """Copy what the step before has completed into its slots: before `begin`, and before any page is written."""
        for copies in work.stores:
            self._pages[copies.group_id].store(copies.pages, copies.slots, self._segment.slots(copies.group_id))
        self._stored_step = work.number

    def take_unloaded(self) -> set[int]:
        """Pages that do not have what vLLM was told of: none, unless something has failed that nothing foresaw."""
        taken, self._unloaded = self._unloaded, set()
        return taken

    def report(self, work: StepWork) -> WorkerReport | None:
        """What became of the step's work; None if nobody asks."""
        if not work.is_reported:
            return None
        if work.wanted is not None:
            self._segment.want(work.wanted)  # takes over what has been mapped meanwhile
        has_stored = not work.stores or self._stored_step == work.number
        return WorkerReport(work.number, self._segment.boot, has_stored, frozenset(self._unloaded_in_step))

    def close(self) -> None:
        """Give up the sidecar's memory."""
        self._segment.close()
