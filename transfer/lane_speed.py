"""LaneSpeed: the bytes per second that a lane moves while it is busy."""

from kvtier.transfer.lane import Transfer

_MEMORY_S = 0.5  # half-life of a measurement, in seconds of copying
_MIN_S = 1e-6


class LaneSpeed:
    """The speed of one lane, measured from its transfers in the order in which they finish. Owned by the lane's owner.

    Time during which several threads copy counts once, because the lane is measured and not the single transfer. Failed
    transfers and transfers of 0 bytes are ignored.
    """

    def __init__(self) -> None:
        self._num_bytes = 0.0
        self._seconds = 0.0
        self._until = float("-inf")  # the lane's time has been counted up to here
        self.latency_s = 0.0  # time to the first byte; 0 if it was not measured

    @property
    def measured_at(self) -> float:
        """Time at which the last transfer finished, on the clock of `Transfer.finished_at`."""
        return self._until

    @property
    def bytes_per_s(self) -> float | None:
        """Recent speed, weighted towards newer transfers; None before the first transfer."""
        return self._num_bytes / max(self._seconds, _MIN_S) if self._num_bytes else None

    def update_from(self, transfer: Transfer) -> None:
        """Update the speed with one finished transfer."""
        if transfer.error is not None or not transfer.num_bytes:
            return
        started_at = max(self._until, transfer.finished_at - transfer.seconds)
        seconds = max(0.0, transfer.finished_at - started_at)
        fading = 0.5 ** (seconds / _MEMORY_S)
        self._num_bytes = self._num_bytes * fading + transfer.num_bytes
        self._seconds = self._seconds * fading + seconds
        self._until = max(self._until, transfer.finished_at)

    def update_latency(self, seconds: float) -> None:
        """Update the latency with the duration of a query whose response carried no payload."""
        self.latency_s = 0.8 * self.latency_s + 0.2 * seconds if self.latency_s else seconds

    def take_over(self, bytes_per_s: float, measured_at: float) -> None:
        """Replace the speed measured here by the speed that another process measured."""
        self._num_bytes, self._seconds, self._until = bytes_per_s, 1.0, measured_at
