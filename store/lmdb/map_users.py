"""`MapUsers`: counts the users of a memory map, which must not be unmapped while there are any."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class MapUsers:
    """Counts the threads inside a `with` block of it. Never nest two blocks. ValueError on entering after `close`."""

    def __init__(self) -> None:
        self._gate = threading.Condition()  # guards the two below
        self._num_users = 0
        self.is_closed = False

    def __enter__(self) -> None:
        with self._gate:
            if self.is_closed:
                raise ValueError("store is closed")
            self._num_users += 1

    def __exit__(self, *error: object) -> None:
        with self._gate:
            self._num_users -= 1
            self._gate.notify_all()

    @contextmanager
    def kept_out(self) -> Iterator[None]:
        """A block in which no thread uses the map: it waits for users, and new ones wait. Not for a user's thread."""
        with self._gate:
            self._gate.wait_for(lambda: self._num_users == 0)
            yield

    def close(self) -> bool:
        """Refuse new users, and wait until all have left; False if it was closed before."""
        with self._gate:
            if self.is_closed:
                return False
            self.is_closed = True
            self._gate.wait_for(lambda: self._num_users == 0)
        return True
