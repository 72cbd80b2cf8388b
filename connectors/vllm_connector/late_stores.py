"""`LateStores`: copies of vLLM's pages to host slots, made by a thread between two steps of the engine."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Step:
    """State of one step's copies: how many are still to be made, and whether any copy has failed."""

    number: int
    num_left: int
    has_failed: bool


class LateStores:
    """Copies that a thread makes after a step's forward pass, while vLLM samples, sends tokens and plans the next step.

    The worker's thread submits the copies of a step, and calls `begin` after the forward pass. Before vLLM may change a
    page that is still to be copied, the worker's thread calls `end`, which makes all remaining copies. Only the
    worker's thread calls the methods.

    The copying thread runs at the worker's priority. It holds the GIL for short times. If it had a lower priority and
    were preempted while it holds the GIL, the whole engine would wait for it.
    """

    def __init__(self) -> None:
        """Create an object without copies. Its thread starts at the first call of `begin` that finds a copy to make."""
        self._copies: deque[tuple[_Step, Callable[[], None]]] = deque()
        self._ended: deque[_Step] = deque()
        self._is_copying = threading.Lock()  # held while a copy is made
        self._has_begun = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def submit(self, step: int, copies: Sequence[Callable[[], None]], has_failed: bool = False) -> None:
        """Add the copies of a step that are still to be made. They are made in the given order.

        The step ends with the last of these copies. *has_failed* is True if an earlier copy of the step failed.
        """
        state = _Step(step, len(copies), has_failed)
        if not copies:
            self._ended.append(state)
        self._copies.extend((state, copy) for copy in copies)

    def begin(self) -> None:
        """Start to make all submitted copies on the copying thread. Do not wait for it."""
        if not self._copies:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtier-stores", daemon=True)
            self._thread.start()
        self._has_begun.set()

    def end(self) -> None:
        """Make all remaining copies in the calling thread, and wait for one that the copying thread is making."""
        self._make_all()

    def pop_ended(self) -> list[tuple[int, bool]]:
        """Return the number of each step that ended since the last call, and whether all its copies succeeded."""
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        return [(step.number, not step.has_failed) for step in ended]

    def close(self) -> None:
        """End the thread. Copies that have not begun are never made."""
        with self._is_copying:
            self._copies.clear()
        self._is_closing = True
        self._has_begun.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._has_begun.wait() and not self._is_closing:
            self._has_begun.clear()
            self._make_all()

    def _make_all(self) -> None:
        while True:
            with self._is_copying:  # even if no copy is left, to wait for the one that the other thread is making
                if not self._copies:
                    return
                step, copy = self._copies.popleft()
                try:
                    copy()
                except Exception:  # the blocks of the step are given up
                    log.exception("kvtier: blocks could not be copied to host memory")
                    step.has_failed = True
                step.num_left -= 1
                if not step.num_left:
                    self._ended.append(step)
