"""LaneSpeed: how many bytes a second a lane moves while it has something to move."""

from kvtier.transfer.lane import Transfer

_MEMORY_S = 0.5  # of copying, after which a measurement counts half
_MIN_S = 1e-6


class LaneSpeed:
    """The speed of one lane, learned from its transfers in the order in which they finish. Owned by the lane's owner.

    Seconds in which several threads copy count once: what is measured is the lane, not a transfer. Failed transfers and
    those without bytes do not count.
    """

    def __init__(self) -> None:
        self._num_bytes = 0.0
        self._seconds = 0.0
        self._until = float("-inf")  # up to when the lane's time has been counted
        self.latency_s = 0.0  # before the first byte comes, where that has been measured

    @property
    def measured_at(self) -> float:
        """When the last transfer finished, on the clock of `Transfer.finished_at`."""
        return self._until

    @property
    def bytes_per_s(self) -> float | None:
        """The speed of late, in which newer transfers count more; None before the first."""
        return self._num_bytes / max(self._seconds, _MIN_S) if self._num_bytes else None

    def learn_from(self, transfer: Transfer) -> None:
        """Take one finished transfer into the speed."""
        if transfer.error is not None or not transfer.num_bytes:
            return
        started_at = max(self._until, transfer.finished_at - transfer.seconds)
        seconds = max(0.0, transfer.finished_at - started_at)
        fading = 0.5 ** (seconds / _MEMORY_S)
        self._num_bytes = self._num_bytes * fading + transfer.num_bytes
        self._seconds = self._seconds * fading + seconds
        self._until = max(self._until, transfer.finished_at)

    def learn_latency(self, seconds: float) -> None:
        """Take into the latency how long a question without an answer of any size took."""
        self.latency_s = 0.8 * self.latency_s + 0.2 * seconds if self.latency_s else seconds

    def take_over(self, bytes_per_s: float, measured_at: float) -> None:
        """Take the speed that another process has measured in place of what was learned here."""
        self._num_bytes, self._seconds, self._until = bytes_per_s, 1.0, measured_at
