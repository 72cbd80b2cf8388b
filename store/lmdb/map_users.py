"""Who uses a map, which must not be unmapped under them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class MapUsers:
    """Counts those inside a `with` block of it. ValueError for who comes once it is closed; not one inside another."""

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
        """Nobody uses the map inside: waits for those that do, and has those wait who come. Not for one of them."""
        with self._gate:
            self._gate.wait_for(lambda: self._num_users == 0)
            yield

    def close(self) -> bool:
        """Let nobody in any more, and wait for those inside; False if that was done before."""
        with self._gate:
            if self.is_closed:
                return False
            self.is_closed = True
            self._gate.wait_for(lambda: self._num_users == 0)
        return True
