"""`WorkerSide`: the part of the connector that runs in each vLLM worker and copies pages as the scheduler decides."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvtier.connectors.vllm_connector.engine_layout import GroupLayout
from kvtier.connectors.vllm_connector.late_stores import LateStores
from kvtier.connectors.vllm_connector.mapped_segment import MappedSegment
from kvtier.connectors.vllm_connector.pages import CpuPages, Pages, group_pages
from kvtier.connectors.vllm_connector.step_work import StepWork, WorkerReport

LATE_COPY_BYTES = 4 << 20  # limit for one copy of the thread; `LateStores.end` waits for one such copy at most


class WorkerSide:
    """A copier of pages between one worker's KV cache and the sidecar's shared memory.

    Before vLLM computes a step, the worker first stores blocks of the previous step, then loads the blocks that this
    step needs. Blocks that only a later step needs may be loaded after the step. If the pages of blocks stay unchanged
    during the step, a thread stores these blocks after the forward pass. Only the worker's thread calls the methods.
    """

    def __init__(
        self, layouts: Sequence[GroupLayout], rank: int, segment: MappedSegment, late_stores: LateStores
    ) -> None:
        """Create the worker side of a rank, and take ownership of *segment* and *late_stores*."""
        self._layouts = layouts
        self._rank = rank
        self._segment = segment
        self._late_stores = late_stores
        self._pages: list[Pages] = []
        self._unloaded: set[int] = set()  # pages not yet returned by `pop_failed_pages`
        self._unloaded_in_step: set[int] = set()
        self._stored_step: int | None = None  # the last step whose work was passed to `store`

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
            awaited = frozenset[int]().union(*(each.pages for each in work.awaited))
            self._unloaded |= missing - awaited

    def ended_loads(self, work: StepWork) -> tuple[set[str], set[str]]:
        """Return the requests that need not wait for their loads any more, and those of them whose load failed.

        Call this after `load`.
        """
        failed = {each.request_id for each in work.awaited if each.pages & self._unloaded_in_step}
        return {each.request_id for each in work.awaited}, failed

    def store(self, work: StepWork) -> None:
        """Copy the previous step's blocks into the sidecar's memory, but leave late copies for `store_late`.

        Call this before `begin`, and before vLLM changes a page. Late copies of at most one step are pending, because
        those of earlier steps are completed first.
        """
        self._stored_step = work.number
        stores = [copies for copies in work.stores if self._layouts[copies.group_id].is_stored_by(self._rank)]
        are_late = [copies.is_late and self._is_in_cpu_memory(copies.group_id) for copies in stores]
        if any(are_late) or work.ends_late_stores:
            self._late_stores.end()
        if not work.stores:
            return
        later, has_failed = list[Callable[[], None]](), True
        try:
            for copies, is_late in zip(stores, are_late, strict=True):
                pages, slots = self._pages[copies.group_id], self._segment.slots(copies.group_id)
                if not is_late:
                    pages.store(copies.pages, copies.slots, slots)
                    continue
                limit = max(1, LATE_COPY_BYTES // self._layouts[copies.group_id].rank_bytes)
                for start in range(0, len(copies.pages), limit):
                    part = slice(start, start + limit)
                    later.append(partial(pages.store, copies.pages[part], copies.slots[part], slots))
            has_failed = False
        finally:
            self._late_stores.submit(work.number, later, has_failed)

    def store_late(self) -> None:
        """Start a thread's work on the copies that `store` did not make. Call this after the step's forward pass."""
        self._late_stores.begin()

    def pop_failed_pages(self) -> set[int]:
        """Return the pages that could not be loaded since the last call, except those of awaited loads."""
        taken, self._unloaded = self._unloaded, set()
        return taken

    def report(self, work: StepWork) -> WorkerReport | None:
        """Return the outcome of copies for the scheduler, or None if there is nothing to report."""
        ended = self._late_stores.pop_ended()
        if not work.is_reported and not ended:
            return None
        if work.wanted is not None:
            self._segment.want(work.wanted)  # switches to the segment if it has been mapped in the meantime
        if work.stores and self._stored_step != work.number:  # `store` was never called
            ended.append((work.number, False))
        stored = tuple(number for number, has_stored in ended if has_stored)
        unstored = tuple(number for number, has_stored in ended if not has_stored)
        return WorkerReport(work.number, self._segment.boot, stored, unstored, frozenset(self._unloaded_in_step))

    def close(self) -> None:
        """End the thread of late copies, and unmap the sidecar's memory."""
        self._late_stores.close()
        self._segment.close()

    def _is_in_cpu_memory(self, group_id: int) -> bool:
        """Return whether the group's pages are in CPU memory, where the forward pass has ended when its call returns.

        Pages on a device are not copied late, because a thread would have to wait for the device's streams.
        """
        return isinstance(self._pages[group_id], CpuPages)
