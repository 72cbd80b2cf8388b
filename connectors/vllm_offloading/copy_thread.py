"""CopyThread: jobs of copies, one after the other, beside the thread that computes."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Thread

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that has ended, and the bytes that it copied; None if it failed, perhaps half copied."""

    job_id: int
    num_bytes: int | None
    took_s: float


class CopyThread:
    """Runs jobs in the order in which they came. Owned by one thread, vLLM's worker; the jobs run on another one, and
    what they copy must stay until they have ended. `close` ends it."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[int, Callable[[], int], Event] | None] = SimpleQueue()
        self._ended: deque[EndedJob] = deque()
        self._pending: dict[int, Event] = {}
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job_id: int, copy: Callable[[], int]) -> None:
        """Have *copy* run after those before it; returns at once. It gives the bytes that it copied."""
        self._pending[job_id] = Event()
        self._jobs.put((job_id, copy, self._pending[job_id]))

    def take_ended(self) -> list[EndedJob]:
        """The jobs that have ended since the last call, in their order."""
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        for job in ended:
            del self._pending[job.job_id]
        return ended

    def wait(self, job_ids: Iterable[int]) -> None:
        """Return once these jobs have ended. One that was taken, or never submitted, has."""
        for job_id in job_ids:
            if job_id in self._pending:
                self._pending[job_id].wait()

    def close(self) -> None:
        """Run what was submitted, and end."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job_id, copy, has_ended = job
            began_at, num_bytes = time.monotonic(), None
            try:
                num_bytes = copy()
            except Exception:  # a thread's top
                log.exception("kvtier: copies between vLLM's KV cache and its host pool failed")
            self._ended.append(EndedJob(job_id, num_bytes, time.monotonic() - began_at))
            has_ended.set()
