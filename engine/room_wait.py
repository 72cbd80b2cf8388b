"""RoomWait: how long the queue waits until a hit can come up without pushing out a last copy."""

from collections.abc import Callable


class RoomWait:
    """One stretch of waiting has an end, whoever stands at the head of the queue meanwhile; the next begins once there
    has been room, or nobody has asked for as long. So copies that are too slow hold up the queue once, and not each
    request in its turn. Owned by the engine's thread.
    """

    def __init__(self, most_s: float, clock: Callable[[], float]) -> None:
        self._most_s = most_s
        self._clock = clock
        self._since: float | None = None
        self._asked_at = 0.0

    def is_over(self, has_room: bool) -> bool:
        """Whether to go on: there is room, or it has been waited for long enough."""
        now = self._clock()
        if has_room:
            self._since = None
            return True
        if self._since is None or now - self._asked_at > self._most_s:
            self._since = now
        self._asked_at = now
        return now - self._since >= self._most_s
