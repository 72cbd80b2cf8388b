"""KernelThreads: threads that compiled kernels run in beside the caller's own."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor


class KernelThreads:
    """So many threads, the caller's among them; used by one thread, until they are closed."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._others = ThreadPoolExecutor(max(1, num_threads - 1), "kvtier-kernels")  # begins them when they have work

    def close(self) -> None:
        """End the threads."""
        self._others.shutdown()

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make all calls, at least one, and return when all have ended: the first in this thread, others beside it."""
        first, *others = calls
        under_way = [self._others.submit(call) for call in others]
        first()
        for future in under_way:
            future.result()
