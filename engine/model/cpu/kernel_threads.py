"""KernelThreads: threads that compiled kernels run in beside the caller's own."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise


class KernelThreads:
    """So many threads, the caller's among them, until they are closed; owned by one runner."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._others = ThreadPoolExecutor(max(1, num_threads - 1), "kvtier-kernels")  # begins them when they have work

    def close(self) -> None:
        """End the threads."""
        self._others.shutdown()

    def worth(self, work: int, work_of_a_thread: int) -> int:
        """How many of the threads so much work is worth; at least one."""
        return max(1, min(self.num_threads, work // work_of_a_thread))

    def run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Make all calls, at least one, and return when all have ended: the first in this thread, others beside it."""
        first, *others = calls
        under_way = [self._others.submit(call) for call in others]
        first()
        for future in under_way:
            future.result()

    def run_rows(self, kernel: Callable[[slice], None], num_rows: int, num_shares: int) -> None:
        """Call *kernel* with each of so many equal shares of the rows, as `run` does."""
        cuts = [i * num_rows // num_shares for i in range(num_shares + 1)]
        self.run([partial(kernel, slice(*cut)) for cut in pairwise(cuts)])
