"""`SchedulerHalf`: the scheduler's half of the connector, with the threads that run while vLLM computes."""

import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from kvtier.connectors.guard import Guard
from kvtier.connectors.vllm_connector.scheduler_side import SchedulerSide
from kvtier.connectors.vllm_connector.step_work import StepWork, WorkerReport
from kvtier.connectors.vllm_connector.vllm_request import Pages, StatePage, VllmRequest
from kvtier.engine.attached.link import SidecarStanding
from kvtier.engine.attached.sidecar_tiers import SidecarTiers
from kvtier.transfer.lane import Transfer
from kvtier.transfer.transfer_engine import TransferEngine

LISTEN_S = 0.25  # between two polls of the sidecar while the engine is idle
TOLD_LOOK_S = 0.002  # between two polls of the sidecar in `wait_told`
EMPTY_STEP_S = 0.001  # max wait in a step that only waits for blocks, because vLLM begins the next step at once
SETTLE_S = 5.0  # max wait for finished copies to be published, before a reset or `close`


class Heard(queue.SimpleQueue[Transfer]):
    """A queue of the sidecar's answers, which calls a function after each new answer."""

    def __init__(self, on_put: Callable[[], None]) -> None:
        """Create an empty queue. `put` calls *on_put* after it has added an answer."""
        super().__init__()
        self._on_put = on_put

    def put(self, item: Transfer, block: bool = True, timeout: float | None = None) -> None:
        super().put(item)
        self._on_put()


class SchedulerHalf:
    """The scheduler's half of the connector: a `SchedulerSide`, and threads that process the sidecar's messages.

    vLLM calls the connector only in its steps. Between steps, one thread processes the sidecar's answers as they
    arrive. Another thread polls for messages a few times a second, which keeps the connection alive while the engine is
    idle. All of this runs under the guard's lock.
    """

    side: SchedulerSide

    def __init__(self) -> None:
        """Create the object without its `SchedulerSide`. Call `attach` before any other method."""
        self.guard = Guard(self._give_up)
        self._has_news = threading.Condition(self.guard.lock)
        self._is_closing = threading.Event()
        self._has_polled = False  # in this step
        self._listener = threading.Thread(target=self._listen, name="kvtier-listener", daemon=True)

    def attach(
        self, side: SchedulerSide, tiers: SidecarTiers, transfers: TransferEngine, end_threads: Callable[[], None]
    ) -> None:
        """Set the scheduler side, and start the thread that polls for the sidecar's messages.

        *end_threads* ends the threads that compute digests and wait for the sidecar; `close` calls it.
        """
        self.side = side
        self._tiers = tiers
        self._transfers = transfers
        self._end_threads = end_threads
        self._listener.start()

    def standing(self) -> SidecarStanding:
        """Return the current state of the connection to the sidecar."""
        with self.guard.lock:
            return self._tiers.standing()

    def wait_told(self, timeout_s: float) -> bool:
        """Wait until the sidecar has announced all of its blocks. Return whether it has.

        Returns early if no sidecar is attached.
        """
        give_up_at = time.monotonic() + timeout_s
        while time.monotonic() < give_up_at:
            self.guard.run_always(self._poll, None)
            if not self._tiers.is_attached or self._tiers.is_told:
                break
            self._is_closing.wait(TOLD_LOOK_S)
        return self._tiers.is_told

    def on_answers(self) -> None:
        """Process the sidecar's answers. The thread that waits for the answers calls this."""
        if not self._is_closing.is_set():
            self.guard.run_always(self._poll, None)

    def on_digests(self, tell: Callable[[], None]) -> None:
        """Call *tell*, a function that processes new digests, under the connector's lock.

        The threads that compute digests call this.
        """

        def take_in() -> None:
            tell()
            self._has_news.notify_all()

        self.guard.run_always(take_in, None)

    def num_matched(self, request: VllmRequest, num_computed: int) -> int | None:
        """Return how many tokens after the first *num_computed* will be loaded, or None if vLLM must ask again."""
        if not self._has_polled:
            self._has_polled = True
            self._poll()
        return self.side.num_matched(request, num_computed)

    def step(
        self,
        num_scheduled: Mapping[str, int],
        pages_of: Callable[[str], Pages | None],
        overwritten: Collection[int] = (),
        states: Mapping[str, Sequence[StatePage]] | None = None,
    ) -> StepWork:
        """Return the copies that workers must make in a step.

        *num_scheduled* has the number of tokens that vLLM computes for each request. *pages_of* returns the current
        pages of a request. Blocks in *overwritten* pages are not stored, because vLLM may change these pages before the
        workers copy them. *states* has the pages that hold recurrent states once the step has ended.
        """
        self._has_polled = False
        if not num_scheduled and self.side.is_waiting:
            self._has_news.wait(EMPTY_STEP_S)  # releases the lock, so that other threads can process answers
        self._poll()
        return self.side.step(num_scheduled, pages_of, not self.guard.is_resting, overwritten, states)

    def on_output(self, report: WorkerReport | None, unloaded: Collection[int]) -> None:
        """Process the workers' *report* on a step, if there is one, and *unloaded*, the pages whose load failed."""
        if unloaded:
            self.side.on_unloaded(unloaded)
        if report is not None:
            self.side.on_report(report)

    def reset(self) -> bool:
        """Evict all stored blocks, and name blocks differently from now on, because the weights may have been updated.

        Waits a few seconds at most for blocks that are being stored. See `start_new_lineage` and `clear` of
        `SchedulerSide`.
        """
        self.side.start_new_lineage()
        self._settle()
        return self.side.clear()

    def close(self) -> None:
        """Wait a few seconds at most until the copied blocks can be found, then end the session and all threads."""
        self.guard.run_always(self._settle, None)
        self._is_closing.set()
        self._end_threads()  # without the lock, because the threads may wait for it
        self.guard.run_always(self._tiers.close, None)

    def _settle(self) -> None:
        give_up_at = time.monotonic() + SETTLE_S
        while self.side.is_digesting and time.monotonic() < give_up_at:
            self._has_news.wait(SETTLE_S)

    def _listen(self) -> None:
        while not self._is_closing.wait(LISTEN_S):
            self.guard.run_always(self._poll, None)

    def _give_up(self) -> None:
        self.side.give_up()

    def _poll(self) -> None:
        self._transfers.poll()
        self.side.poll()
