"""Outcomes: what has become of tasks, until LMCache asks."""

import os
import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class Outcomes(Generic[T]):
    """The outcomes of tasks of one kind. Each is given once; the eventfd is readable while there may be some.

    All methods may be called from any thread. After `close` outcomes are dropped.
    """

    def __init__(self) -> None:
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # guards the next two
        self._outcomes: dict[int, T] = {}
        self._is_closed = False

    def put(self, task_id: int, outcome: T) -> None:
        """Take in a task's outcome, and make the eventfd readable."""
        with self._lock:
            if not self._is_closed:
                self._outcomes[task_id] = outcome
                os.eventfd_write(self.event_fd, 1)

    def pop(self, task_id: int) -> T | None:
        """The task's outcome, None if it has none yet or was asked for before."""
        with self._lock:
            return self._outcomes.pop(task_id, None)

    def pop_all(self) -> dict[int, T]:
        """The outcomes of all tasks that have one."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, {}
            return outcomes

    def close(self) -> None:
        """Close the eventfd. A second call does nothing."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.event_fd)
