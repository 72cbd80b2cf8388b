"""TransferEngine: submits transfers, such as copies of blocks, to lanes (queues with threads), and keeps statistics."""

import queue
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kvtier.transfer.lane import Finished, Lane, LaneSpeed, Transfer


class Route(StrEnum):
    """Source and target tier of a transfer.

    Each route has its own lane (a queue with threads), so that spills (copies to a lower tier) never delay loads.
    """

    DEVICE_TO_HOST = "device_to_host"
    HOST_TO_DEVICE = "host_to_device"
    HOST_TO_DISK = "host_to_disk"
    DISK_TO_HOST = "disk_to_host"
    HOST_TO_REMOTE = "host_to_remote"
    REMOTE_TO_HOST = "remote_to_host"


@dataclass(frozen=True, slots=True)
class CopyCounts:
    """Totals of the transfers that move blocks. Lookups, touches, deletions and verifications are not counted."""

    num_submitted: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_submitted_blocks: int = 0
    num_done_blocks: int = 0


@dataclass(frozen=True, slots=True)
class RouteStatistics:
    """Totals of the finished transfers on one route since the start, and the transfers that are pending now."""

    num_transfers: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    num_failed: int = 0
    bytes_per_s: float | None = None  # recent speed, idle time excluded
    num_pending: int = 0
    pending_bytes: int = 0
    copies: CopyCounts = CopyCounts()


@dataclass(slots=True)
class _Totals:
    """The running totals of one route; see `RouteStatistics` and `CopyCounts`."""

    num_transfers: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    num_failed: int = 0
    num_submitted_copies: int = 0
    num_done_copies: int = 0
    num_failed_copies: int = 0
    num_submitted_blocks: int = 0
    num_done_blocks: int = 0

    def on_submitted(self, num_blocks: int) -> None:
        """Count a submitted transfer, if it moves blocks."""
        if num_blocks:
            self.num_submitted_copies += 1
            self.num_submitted_blocks += num_blocks

    def on_finished(self, transfer: Transfer) -> None:
        """Count a finished transfer."""
        failed = transfer.error is not None
        self.num_transfers += 1
        self.num_bytes += 0 if failed else transfer.num_bytes
        self.seconds += transfer.seconds
        self.num_failed += failed
        if not transfer.num_blocks:
            return
        if failed:
            self.num_failed_copies += 1
        else:
            self.num_done_copies += 1
            self.num_done_blocks += transfer.num_blocks

    def copies(self) -> CopyCounts:
        """Return the totals of the transfers that move blocks."""
        return CopyCounts(
            self.num_submitted_copies,
            self.num_done_copies,
            self.num_failed_copies,
            self.num_submitted_blocks,
            self.num_done_blocks,
        )


class TransferEngine:
    """A dispatcher that submits work to *lanes*, one for each route, and delivers the outcomes in `poll`.

    Only one thread may call the methods. All lanes must have been created with the same queue *finished*.
    """

    def __init__(self, lanes: Mapping[Route, Lane], finished: Finished) -> None:
        self._lanes = dict(lanes)
        self._finished = finished
        self._totals = {route: _Totals() for route in self._lanes}
        self._speeds = {route: LaneSpeed() for route in Route}
        self._pending_bytes = dict.fromkeys(Route, 0)
        self.in_flight = 0  # transfers submitted but not delivered, on all routes

    def submit(
        self,
        route: Route,
        work: Callable[[], Any],
        num_bytes: int,
        deliver: Callable[[Transfer], None],
        num_blocks: int = 0,
    ) -> bool:
        """Submit *work*, which copies *num_blocks* blocks, to the lane (copy queue) of *route* (a pair of tiers).

        A later `poll` calls *deliver* with the finished transfer. Returns False without any effect if the lane is full
        or closed.
        """

        def count_and_deliver(transfer: Transfer) -> None:
            self._totals[route].on_finished(transfer)
            self._speeds[route].update_from(transfer)
            self._pending_bytes[route] -= num_bytes
            deliver(transfer)

        if not self._lanes[route].submit(Transfer(work, num_bytes, count_and_deliver, num_blocks=num_blocks)):
            return False
        self._totals[route].on_submitted(num_blocks)
        self._pending_bytes[route] += num_bytes
        self.in_flight += 1
        return True

    def watch(self, lane: Lane, work: Callable[[], Any], deliver: Callable[[Transfer], None]) -> bool:
        """Submit *work*, which copies no blocks, to a *lane* that belongs to the caller. `poll` delivers the outcome.

        The lane must have been created with this engine's *finished* queue. The statistics do not include *work*.
        Returns False if the lane is full or closed.
        """
        if not lane.submit(Transfer(work, 0, deliver)):
            return False
        self.in_flight += 1
        return True

    def poll(self, timeout_s: float = 0.0, should_continue: Callable[[], bool] = lambda: True) -> int:
        """Deliver the finished transfers, waiting up to *timeout_s* for the first, and return their number.

        *should_continue* is called after each delivery. If it returns False, the next `poll` delivers the rest.
        """
        num_delivered = 0
        while self.in_flight:
            try:
                transfer = self._finished.get(timeout=timeout_s) if timeout_s > 0 else self._finished.get_nowait()
            except queue.Empty:
                break
            timeout_s = 0.0
            self.in_flight -= 1
            num_delivered += 1
            transfer.deliver(transfer)
            if not should_continue():
                break
        return num_delivered

    @property
    def has_undelivered(self) -> bool:
        """True if there are finished transfers that `poll` has not delivered yet."""
        return not self._finished.empty()

    def num_pending(self, route: Route) -> int:
        """Return the number of transfers on this route that are queued or running."""
        return self._lanes[route].num_pending

    def pending_bytes(self, route: Route) -> int:
        """Return the bytes of the transfers on this route that were submitted but not delivered."""
        return self._pending_bytes[route]

    def speed(self, route: Route) -> LaneSpeed:
        """Return the recent speed of the transfers on this route."""
        return self._speeds[route]

    def statistics(self) -> dict[Route, RouteStatistics]:
        """Return a copy of the statistics of each route (pair of tiers) that the engine was created for."""
        return {
            route: RouteStatistics(
                totals.num_transfers,
                totals.num_bytes,
                totals.seconds,
                totals.num_failed,
                self._speeds[route].bytes_per_s,
                self._lanes[route].num_pending,
                self._pending_bytes[route],
                totals.copies(),
            )
            for route, totals in self._totals.items()
        }

    def close(self) -> bool:
        """Close the lanes and deliver their remaining transfers. The queued ones fail with `LaneClosed`.

        Returns False if a running transfer hangs.
        """
        closed = [lane.close() for lane in self._lanes.values()]
        self.poll()
        return all(closed)
