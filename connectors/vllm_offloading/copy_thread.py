"""`CopyThread`: a thread that runs copy jobs one after the other while another thread computes."""

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
    """A copy job that has ended. *num_bytes* is None if the job failed, possibly after copying some of its bytes."""

    job_id: int
    num_bytes: int | None
    took_s: float


class CopyThread:
    """A thread that runs copy jobs in the order of submission, until `close`.

    Only vLLM's worker thread calls the methods. The memory that a job copies must stay valid until the job has ended.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[int, Callable[[], int], Event] | None] = SimpleQueue()
        self._ended: deque[EndedJob] = deque()
        self._pending: dict[int, Event] = {}
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job_id: int, copy: Callable[[], int]) -> None:
        """Queue a job and return at once. The thread calls *copy*, which returns the number of bytes copied."""
        self._pending[job_id] = Event()
        self._jobs.put((job_id, copy, self._pending[job_id]))

    def take_ended(self) -> list[EndedJob]:
        """Return the jobs that have ended since the last call, in order."""
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        for job in ended:
            del self._pending[job.job_id]
        return ended

    def wait(self, job_ids: Iterable[int]) -> None:
        """Wait until these jobs have ended. Ignore jobs that are unknown or that `take_ended` has already returned."""
        for job_id in job_ids:
            if job_id in self._pending:
                self._pending[job_id].wait()

    def close(self) -> None:
        """Run all submitted jobs, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job_id, copy, has_ended = job
            began_at, num_bytes = time.monotonic(), None
            try:
                num_bytes = copy()
            except Exception:  # a failed job must not end the thread
                log.exception("kvtier: copies between vLLM's KV cache and its host pool failed")
            self._ended.append(EndedJob(job_id, num_bytes, time.monotonic() - began_at))
            has_ended.set()
